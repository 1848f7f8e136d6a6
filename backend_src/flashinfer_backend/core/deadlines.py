# SPDX-License-Identifier: Apache-2.0
"""Which of many requests that wait are late, without a look at the others."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

from flashinfer_backend.core.request import Request


class Deadlines:
    """Requests in the order of their deadlines. Those without one may be added and removed as well."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, Request]] = []  # (deadline, handle, request), sorted

    def add(self, request: Request) -> None:
        if request.deadline_ns:
            insort(self._entries, (request.deadline_ns, request.handle, request))

    def remove(self, request: Request) -> None:
        """Of one that was added, with the deadline that it had then."""
        if request.deadline_ns:
            del self._entries[bisect_left(self._entries, (request.deadline_ns, request.handle))]

    def late(self, now_ns: int) -> list[Request]:
        """Those whose deadline, of the monotonic clock, is `now_ns` or before, the earliest first."""
        end = bisect_right(self._entries, now_ns, key=lambda entry: entry[0])
        return [request for _, _, request in self._entries[:end]]

    def handles(self) -> list[tuple[int, int]]:
        """(deadline, handle) of all, in their order."""
        return [(deadline, handle) for deadline, handle, _ in self._entries]
