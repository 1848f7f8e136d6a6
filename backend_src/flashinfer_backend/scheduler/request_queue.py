# SPDX-License-Identifier: Apache-2.0
"""The queue of requests that have no slot."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator

from flashinfer_backend.core.request import Request


class RequestQueue:
    """Preempted sequences first, the one preempted last at their head; then in order of arrival, or by
    the tokens that they may still generate, most first, equal ones in order of arrival."""

    def __init__(self, longest_first: bool) -> None:
        self._longest_first = longest_first
        self._count = itertools.count()
        self.arrived = 0  # requests, ever
        self._ranks: dict[int, tuple[int, int, int]] = {}  # by handle; no two are equal
        self._line: list[tuple[int, int, int, Request]] = []  # sorted: the head of the queue is at the end
        self.tokens = 0  # that remain to be computed and generated, of all

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Request]:
        """From the head on."""
        return (entry[-1] for entry in reversed(self._line))

    @property
    def head(self) -> Request:
        return self._line[-1][-1]

    @property
    def tail(self) -> Request:
        return self._line[0][-1]

    def add(self, request: Request) -> None:
        self.arrived += 1
        self._insert(request, (0, request.max_new if self._longest_first else 0, -next(self._count)))

    def put_back(self, request: Request) -> None:
        """Make a preempted request the head."""
        self._insert(request, (1, 0, next(self._count)))

    def pop(self) -> None:
        """Take the head out."""
        self._leave(self._line.pop()[-1])

    def remove(self, request: Request) -> None:
        del self._line[bisect_left(self._line, self._ranks[request.handle])]
        self._leave(request)

    def _insert(self, request: Request, rank: tuple[int, int, int]) -> None:
        self._ranks[request.handle] = rank
        insort(self._line, (*rank, request))
        self.tokens += _tokens(request)

    def _leave(self, request: Request) -> None:
        del self._ranks[request.handle]
        self.tokens -= _tokens(request)


def _tokens(request: Request) -> int:
    return len(request.prompt) + request.max_new  # what was generated before is computed anew
