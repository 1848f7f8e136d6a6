# SPDX-License-Identifier: Apache-2.0
"""Clients that have left an ensemble, seen by postprocessing.

The server does not tell the llm step of an ensemble that its client is gone; only requests made
from then on, those for the next chunks, say so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from flashinfer_backend.transport import protocol

POLL_SECONDS = 0.1
CAPACITY = 8192


class EngineCanceller:
    """Sends `Cancel` to the engine of a run directory; connects at the first one."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._socket: zmq.Socket | None = None

    def __call__(self, handle: int) -> bool:
        """Whether the message is on its way; False when the engine takes none (it can be tried again)."""
        if self._socket is None:
            self._socket = zmq.Context.instance().socket(zmq.DEALER)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.connect(protocol.socket_address(self._run_dir))
        try:
            self._socket.send(protocol.encode(protocol.Cancel(handle)), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class CancelWatch:
    """Asks, for each handle, whether its client has left: at its second chunk at the earliest and
    then at most every POLL_SECONDS, since each question is a round trip to the server.

    Cancels a handle once. Handles whose last chunk another instance saw are dropped, oldest first,
    beyond CAPACITY.
    """

    def __init__(self, cancel: Callable[[int], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._cancel = cancel
        self._clock = clock
        self._next_poll: dict[int, float] = {}  # by handle; inf: cancelled

    def client_left(self, handle: int, last: bool, is_cancelled: Callable[[], bool]) -> bool:
        """Whether the client of a chunk is known to have left. The last chunk is never polled for: there
        is nothing left to cancel. Handle 0 has no engine request behind it."""
        if handle == 0:
            return False
        if last:
            return self._next_poll.pop(handle, 0.0) == math.inf
        now = self._clock()
        due = self._next_poll.get(handle)
        if due is None:
            if len(self._next_poll) >= CAPACITY:
                self._next_poll.pop(next(iter(self._next_poll)))
            self._next_poll[handle] = now + POLL_SECONDS
            return False
        if due == math.inf:
            return True
        if now < due:
            return False
        left = is_cancelled()
        self._next_poll[handle] = math.inf if left and self._cancel(handle) else now + POLL_SECONDS
        return left
