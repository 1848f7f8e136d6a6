# SPDX-License-Identifier: Apache-2.0
"""Requests that ask for logits, from their wait for room until nobody holds these any more."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from flashinfer_backend.core.gate import Gate, Place
from flashinfer_backend.core.request import Request

# Logits of prompts that a step computes, unless it has to compute a whole prompt at once. They are copied to
# the host while nothing else is computed, so every stream waits for them.
STEP_BYTES = 64 << 20


def step_tokens(vocab_size: int) -> int:
    """How many of a prompt's tokens a step computes whose logits are wanted."""
    return max(1, STEP_BYTES // (4 * vocab_size))


class LogitsRoom:
    """Bounds the bytes of logits that this engine and the processes which it sends them to hold together. A
    request has its room before it has a slot, and keeps it until its stub has said `Freed`, or has ended:
    longer than it is the scheduler's. The scheduler gets prompts whose logits are wanted one after the other,
    or as many as one step computes: others have steps between."""

    def __init__(self, most: int, vocab_size: int, admit: Callable[[Request], None]) -> None:
        """most: bytes. admit: takes a request that has its room."""
        self._gate = Gate(most)
        self._turns = Gate(STEP_BYTES)  # of the prompts' logits that the scheduler has and are not computed
        self._turn: dict[int, Place] = {}  # by handle, of who has room and waits or is inside
        self._vocab_size, self._admit = vocab_size, admit
        self._places: dict[int, Place] = {}  # by handle, of who waits or is inside
        self._waiting: dict[int, Request] = {}  # by handle

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        """Those that wait, in order of arrival."""
        return iter(list(self._waiting.values()))

    @property
    def held(self) -> int:
        """Bytes of those inside."""
        return self._gate.held

    def enter(self, request: Request) -> None:
        """Lets a request in, at once or when there is room: by priority, then by arrival. It must not want
        more than there is in all."""
        rows = request.params.logits_rows(len(request.prompt), request.max_new)
        self._waiting[request.handle] = request
        place = Place(4 * rows * self._vocab_size, request.priority, lambda: self._start(request))
        self._places[request.handle] = place
        self._gate.enter(place)

    def freed(self, handle: int) -> None:
        """Nobody holds the sequence's logits any more. Nothing happens where they have no room."""
        self._waiting.pop(handle, None)
        self.computed(handle)
        place = self._places.pop(handle, None)
        if place is not None:
            self._gate.leave(place)

    def computed(self, handle: int) -> None:
        """All of the logits of a sequence's prompt are. May be said more than once."""
        turn = self._turn.pop(handle, None)
        if turn is not None:
            self._turns.leave(turn)

    def cancel(self, handle: int) -> Request | None:
        """Forget a request that waits; None if there is no such one."""
        request = self._waiting.get(handle)
        if request is not None:
            self.freed(handle)
        return request

    def drop_late(self, now_ns: int) -> list[Request]:
        """Forget and return who waits and whose deadline, of the monotonic clock, is `now_ns` or before."""
        late = [request for request in self._waiting.values() if 0 < request.deadline_ns <= now_ns]
        self._forget([request.handle for request in late])
        return late

    def drop_stub(self, pid: int) -> None:
        """A stub holds nothing any more, and wants nothing."""
        self._forget([handle for handle in self._places if handle >> 32 == pid])

    def _forget(self, handles: list[int]) -> None:
        # None of them waits any more when the first gives back its room, or its place in the line: one of the
        # others that is let in by that goes no further.
        for handle in handles:
            self._waiting.pop(handle, None)
        for handle in handles:
            self.freed(handle)

    def _start(self, request: Request) -> None:
        if not request.params.context_logits:
            self._submit(request)
            return
        size = 4 * len(request.prompt) * self._vocab_size
        turn = Place(size, request.priority, lambda: self._submit(request))
        self._turn[request.handle] = turn
        self._turns.enter(turn)

    def _submit(self, request: Request) -> None:
        if self._waiting.pop(request.handle, None) is not None:
            self._admit(request)
