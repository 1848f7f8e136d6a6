# SPDX-License-Identifier: Apache-2.0
"""What requests wait for between their arrival and the scheduler's queue."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from flashinfer_backend.core.request import Request
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.scheduler.scheduler import Scheduler


class Preparation(Protocol):
    """One thing that requests wait for. All methods are called by the loop's thread."""

    poll_ms: int  # how soon an engine with nothing else to do looks here again while anybody waits
    overtaken: bool  # whether later requests pass those that wait; else these keep their place in the queue

    def __len__(self) -> int:
        """How many wait."""

    def needed(self, params: SamplingParams) -> bool:
        """Whether a request with these parameters has to go through here."""

    def submit(self, request: Request) -> None:
        """Have a request wait, until `ready` yields it."""

    def ready(self) -> Iterator[tuple[Request, str | None]]:
        """Requests that need not wait any more, each once: with None, or with what is wrong with it."""

    def cancel(self, handle: int) -> Request | None:
        """Forget a request. Returns it if it waits here."""

    def drop_late(self, now_ns: int) -> list[Request]:
        """Forget and return who waits and whose deadline, of the monotonic clock, is `now_ns` or before."""

    def drop_stub(self, pid: int) -> None:
        """Forget all requests of a stub."""


class Preparations:
    """Takes each request through those that it needs, in their order, and then to the scheduler."""

    def __init__(
        self, line: Sequence[Preparation], scheduler: Scheduler, refuse: Callable[[Request, str], None]
    ) -> None:
        """refuse: told of a request that cannot be prepared, and why."""
        self._line, self._scheduler, self._refuse = line, scheduler, refuse

    def __len__(self) -> int:
        return sum(map(len, self._line))

    @property
    def poll_ms(self) -> int | None:
        """How soon one of them wants to be looked at; None: none waits."""
        return min((each.poll_ms for each in self._line if len(each)), default=None)

    def submit(self, request: Request) -> None:
        """Take in a request, which is in the scheduler's queue at once if it has to wait for nothing."""
        needed = [each for each in self._line if each.needed(request.params)]
        if needed and not any(each.overtaken for each in needed):
            request.place = self._scheduler.queue.reserve()
        self._send_on(request, self._line)
        self.advance()

    def advance(self) -> None:
        """Send on those that need not wait any more."""
        for number, each in enumerate(self._line, 1):
            for request, problem in each.ready():
                if problem is None:
                    self._send_on(request, self._line[number:])
                else:
                    self._refuse(request, problem)

    def cancel(self, handle: int) -> Request | None:
        """Forget a request. Returns it if it waits here; the scheduler's is not touched."""
        return next(filter(None, [each.cancel(handle) for each in self._line]), None)

    def drop_late(self, now_ns: int) -> list[Request]:
        return [request for each in self._line for request in each.drop_late(now_ns)]

    def drop_stub(self, pid: int) -> None:
        for each in self._line:
            each.drop_stub(pid)

    def _send_on(self, request: Request, line: Sequence[Preparation]) -> None:
        for each in line:
            if each.needed(request.params):
                each.submit(request)
                return
        self._scheduler.submit(request)
