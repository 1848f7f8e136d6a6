# SPDX-License-Identifier: Apache-2.0
"""Requests that wait, and which of them are late, without a look at the others."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable
from typing import Generic, TypeVar

from flashinfer_backend.core.request import Request

T = TypeVar("T")


class Deadlines:
    """Requests in the order of their deadlines. Those without one may be added and removed as well."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, Request]] = []  # (deadline, handle, request), sorted

    def add(self, request: Request) -> None:
        if request.deadline_ns:
            insort(self._entries, (request.deadline_ns, request.handle, request))

    def remove(self, request: Request) -> None:
        """Remove a request whose deadline is still the one that it was added with."""
        if request.deadline_ns:
            del self._entries[bisect_left(self._entries, (request.deadline_ns, request.handle))]

    def late(self, now_ns: int) -> list[Request]:
        """Those whose deadline, of the monotonic clock, is `now_ns` or before, the earliest first."""
        end = bisect_right(self._entries, now_ns, key=lambda entry: entry[0])
        return [request for _, _, request in self._entries[:end]]

    def handles(self) -> list[tuple[int, int]]:
        """(deadline, handle) of all, in their order."""
        return [(deadline, handle) for deadline, handle, _ in self._entries]


class Waiting(Generic[T]):
    """Requests in order of arrival, each with what is known of it."""

    def __init__(self, left: Callable[[T], object] = lambda entry: None) -> None:
        """left: told of what was known of a request that is forgotten."""
        self._entries: dict[int, tuple[Request, T]] = {}  # by handle
        self._deadlines, self._left = Deadlines(), left

    def __len__(self) -> int:
        return len(self._entries)

    def holds(self, request: Request) -> bool:
        """Whether it is this one that waits; its handle may have been used again."""
        return self._entries.get(request.handle, (None,))[0] is request

    @property
    def entries(self) -> list[tuple[Request, T]]:
        """A copy, during whose use requests may leave."""
        return list(self._entries.values())

    def add(self, request: Request, entry: T) -> None:
        if request.handle in self._entries:
            raise ValueError(f"handle {request.handle} is already in use by an open request")
        self._entries[request.handle] = request, entry
        self._deadlines.add(request)

    def cancel(self, handle: int) -> Request | None:
        """Forget a request; None if there is no such one."""
        if handle not in self._entries:
            return None
        request, entry = self._entries.pop(handle)
        self._deadlines.remove(request)
        self._left(entry)
        return request

    def drop_late(self, now_ns: int) -> list[Request]:
        """Forget and return the requests whose deadline, of the monotonic clock, is `now_ns` or before."""
        late = self._deadlines.late(now_ns)
        for request in late:
            self.cancel(request.handle)
        return late

    def drop_stub(self, pid: int) -> None:
        for handle in [handle for handle in self._entries if handle >> 32 == pid]:
            self.cancel(handle)
