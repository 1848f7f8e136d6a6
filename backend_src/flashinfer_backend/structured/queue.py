# SPDX-License-Identifier: Apache-2.0
"""Guided requests whose guides are being made, and guides that follow their sequences."""

from __future__ import annotations

import time
from collections.abc import Iterator

from flashinfer_backend.core.deadlines import Deadlines
from flashinfer_backend.core.request import Request
from flashinfer_backend.structured import maker
from flashinfer_backend.structured.grammar import Follower, Grammar, SlowGrammarError
from flashinfer_backend.structured.maker import GrammarMaker, Waiting


class GrammarQueue:
    """Guided requests from their submission until their guides are there."""

    def __init__(self, model_dir: str, vocab_size: int, follower: Follower) -> None:
        """follower: what moves the grammars on later; threads that it has left behind count, too."""
        self._maker = GrammarMaker(model_dir, vocab_size)
        self._follower = follower
        self._waiting: dict[int, Waiting] = {}  # by handle, in order of arrival
        self._deadlines = Deadlines()  # of these

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        params = request.params
        if request.handle in self._waiting:
            raise ValueError(f"handle {request.handle} is already in use by an open request")
        waiting = Waiting(request, (params.grammar_type, params.grammar), time.monotonic())
        self._waiting[request.handle] = waiting
        self._deadlines.add(request)
        left_behind = self._maker.left_behind + self._follower.left_behind
        self._maker.submit(waiting, crowded=left_behind >= maker.MOST_LEFT_BEHIND)

    def cancel(self, handle: int) -> Request | None:
        """Forget a waiting request; None if there is no such one."""
        waiting = self._waiting.pop(handle, None)
        if waiting is None:
            return None
        self._deadlines.remove(waiting.request)
        self._maker.forget(waiting)
        return waiting.request

    def drop_late(self, now_ns: int) -> list[Request]:
        """Forget and return the requests whose deadline, of the monotonic clock, is `now_ns` or before."""
        late = self._deadlines.late(now_ns)
        for request in late:
            self.cancel(request.handle)
        return late

    def drop_stub(self, pid: int) -> None:
        """Forget all requests of a stub."""
        for handle in [h for h in self._waiting if h >> 32 == pid]:
            self.cancel(handle)

    def compiled(self) -> Iterator[tuple[Request, str | None]]:
        """Requests that need not wait any more: with their guide in place, or with what is wrong."""
        if not self._waiting:
            self._maker.done.clear()
            return
        now = time.monotonic()
        late = self._late(
            now
        )  # before turns are passed on: one that gets its turn just now is late all the same
        self._maker.pass_turns(now)
        for request in late:
            self.cancel(request.handle)
            yield (
                request,
                f"the guide was not ready within {maker.MOST_WAIT_SECONDS:g} s, as other guides came first:"
                " try again later",
            )
        while self._maker.done:
            waiting = self._maker.done.popleft()
            request, outcome = waiting.request, waiting.outcome
            if self._waiting.get(request.handle) is not waiting:
                continue
            del self._waiting[request.handle]
            self._deadlines.remove(request)
            if isinstance(outcome, Grammar):
                request.grammar = outcome
                yield request, None
            else:
                yield request, str(outcome)

    def _late(self, now: float) -> list[Request]:
        """Who has waited too long for a turn. One that is at work has its own limit, from when it began."""
        late = []
        for waiting in self._waiting.values():
            if now - waiting.since <= maker.MOST_WAIT_SECONDS:
                break
            if not self._maker.begun(waiting):
                late.append(waiting.request)
        return late

    def refuse(self, request: Request, problem: str) -> None:
        """Refuse the request's grammar whenever it comes back."""
        params = request.params
        self._maker.refuse((params.grammar_type, params.grammar), SlowGrammarError(problem))
