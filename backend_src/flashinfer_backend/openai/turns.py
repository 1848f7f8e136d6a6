# SPDX-License-Identifier: Apache-2.0
"""When the work of requests begins that have arrived at the same time."""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """One request begins in each turn of the event loop, so other work waits for one of them, not for all
    that have arrived: streams go on, and the process can say that it is alive. While both wait, large and
    small requests alternate."""

    def __init__(self) -> None:
        self._waiting: tuple[deque[asyncio.Future[None]], ...] = (deque(), deque())
        self._turn = 0  # whose it was last
        self._taken = False  # this turn of the loop, and perhaps later ones

    async def take(self, large: bool) -> None:
        """Returns when a request may begin, or go on with more: at once where none waits."""
        loop = asyncio.get_running_loop()
        if not self._taken:
            self._taken = True
            loop.call_soon(self._next)
            return
        mine = loop.create_future()
        self._waiting[large].append(mine)
        await mine

    def _next(self) -> None:
        self._turn = 1 - self._turn
        for waiting in (self._waiting[self._turn], self._waiting[1 - self._turn]):
            while waiting:
                future = waiting.popleft()
                if not future.done():  # else its request was cancelled
                    future.set_result(None)
                    asyncio.get_running_loop().call_soon(self._next)
                    return
        self._taken = False
