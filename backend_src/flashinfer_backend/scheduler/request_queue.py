# SPDX-License-Identifier: Apache-2.0
"""The queue of requests that have no slot."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator

from flashinfer_backend.core.deadlines import Deadlines
from flashinfer_backend.core.request import Request

Rank = tuple[int, int, int, int]  # whether preempted, priority, length, order: the head has the largest


class RequestQueue:
    """Preempted sequences first, the one preempted last at their head; then by priority, the smallest number
    first. Those of one priority are in order of arrival, or by the tokens that they may still generate, most
    first, equal ones in order of arrival."""

    def __init__(self, longest_first: bool) -> None:
        self._longest_first = longest_first
        self._count = itertools.count()
        self.arrived = 0  # requests, ever
        self._ranks: dict[int, Rank] = {}  # by handle; no two are equal
        self._line: list[tuple[Rank, Request]] = []  # sorted: the head of the queue is at the end
        self._deadlines = Deadlines()
        self.tokens = 0  # that remain to be computed and generated, of all
        self.known_tokens = 0  # that remain to be computed before a next one of each, if none are cached

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

    @property
    def longest(self) -> int:
        """The most tokens that any of them may generate."""
        most, end = 0, len(self._line)
        while end:
            rank, request = self._line[end - 1]
            most = max(most, request.max_new)
            # With the longest first, none behind the first of a priority has more.
            group = rank[:2] if self._longest_first and not rank[0] else rank
            end = bisect_left(self._line, (group,))
        return most

    def reserve(self) -> int:
        """The place in the order of arrival of a request that comes now, and is added later."""
        return next(self._count)

    def add(self, request: Request) -> None:
        self.arrived += 1
        length = request.max_new if self._longest_first else 0
        place = self.reserve() if request.place is None else request.place
        self._insert(request, (0, -request.priority, length, -place))
        self._deadlines.add(request)

    def put_back(self, request: Request) -> None:
        """Make a preempted request the head. Its deadline was for its first slot."""
        self._insert(request, (1, 0, 0, next(self._count)))

    def take(self, request: Request) -> None:
        """Take a request out, as it has a slot."""
        self.remove(request)
        request.deadline_ns = 0

    def remove(self, request: Request) -> None:
        del self._line[bisect_left(self._line, (self._ranks[request.handle],))]
        self._leave(request)

    def late(self, now_ns: int) -> list[Request]:
        """Those whose deadline is `now_ns` or before, the earliest first."""
        return self._deadlines.late(now_ns)

    def _insert(self, request: Request, rank: Rank) -> None:
        self._ranks[request.handle] = rank
        insort(self._line, (rank, request))
        self.tokens += _tokens(request)
        self.known_tokens += request.num_tokens

    def _leave(self, request: Request) -> None:
        del self._ranks[request.handle]
        self.tokens -= _tokens(request)
        self.known_tokens -= request.num_tokens
        self._deadlines.remove(request)


def _tokens(request: Request) -> int:
    return len(request.prompt) + request.max_new  # what was generated before is computed again
