# SPDX-License-Identifier: Apache-2.0
"""Requests that ask for logits, from their wait for room until these are held no more."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from flashinfer_backend.core.deadlines import Deadlines
from flashinfer_backend.core.gate import Gate, Ticket
from flashinfer_backend.core.request import Request
from flashinfer_backend.core.sampling_params import SamplingParams

# Logits of prompts that a step computes, unless it has to compute a whole prompt at once. They are copied to
# the host while nothing else is computed, so every stream waits for them.
STEP_BYTES = 64 << 20


def step_tokens(vocab_size: int) -> int:
    """How many of a prompt's tokens a step computes whose logits are wanted."""
    return max(1, STEP_BYTES // (4 * vocab_size))


# How far a request is. It only goes on to a later stage, and may be forgotten at each. READY has its room and
# its turn, and `ready` has not yielded it yet. The scheduler gets it as COMPUTING, until all logits of its
# prompt are computed, or as HELD where it wants none of these.
Stage = IntEnum("Stage", "WAITS_FOR_ROOM WAITS_FOR_TURN READY COMPUTING HELD")


@dataclass(eq=False)
class Entry:
    """A request with its state: its tickets for the two gates, and whether `ready` has yielded it."""

    request: Request
    room: Ticket
    turn: Ticket  # only taken by one that wants the logits of its prompt
    taken: bool = False

    @property
    def stage(self) -> Stage:
        if self.room.waiting:
            return Stage.WAITS_FOR_ROOM
        if self.turn.waiting:
            return Stage.WAITS_FOR_TURN
        if not self.taken:
            return Stage.READY
        return Stage.COMPUTING if self.turn.inside else Stage.HELD


class LogitsRoom:
    """Bounds the bytes of logits that this engine and the processes which it sends them to hold together. A
    request has its room before it has a slot, and keeps it until its stub has said `Freed`, or has ended:
    longer than it is the scheduler's. The scheduler gets prompts whose logits are wanted one after the other,
    or as many as one step computes: others have steps between."""

    poll_ms = 20  # nothing but a deadline can pass unseen
    overtaken = True

    def __init__(self, most: int, vocab_size: int) -> None:
        """most: bytes."""
        self._room = Gate(most)
        self._turns = Gate(STEP_BYTES)  # of the prompts' logits that the scheduler has and are not computed
        self._vocab_size = vocab_size
        self._entries: dict[int, Entry] = {}  # by handle, in order of arrival
        self._ready: dict[int, Entry] = {}  # by handle, in the order of their turns
        self._deadlines = Deadlines()  # of those that wait

    def __len__(self) -> int:
        return self._room.waiting + self._turns.waiting + len(self._ready)

    def __iter__(self) -> Iterator[Request]:
        """Those that wait, in order of arrival."""
        return iter([entry.request for entry in self._entries.values() if entry.stage < Stage.COMPUTING])

    @property
    def held(self) -> int:
        """Bytes of those that have room."""
        return self._room.held

    @property
    def stages(self) -> dict[int, Stage]:
        """The stage of each request by its handle, in order of arrival."""
        return {handle: entry.stage for handle, entry in self._entries.items()}

    def needed(self, params: SamplingParams) -> bool:
        return params.asks_for_logits

    def submit(self, request: Request) -> None:
        """Lets a request in, at once or when there is room: by priority, then by arrival. It must not want
        more than there is in all."""
        row, prompt, params = 4 * self._vocab_size, len(request.prompt), request.params
        turn = Ticket(row * prompt, request.priority, lambda: self._start(request.handle))
        start = (lambda: self._turns.enter(turn)) if params.context_logits else turn.start
        room = Ticket(row * params.logits_rows(prompt, request.max_new), request.priority, start)
        self._entries[request.handle] = Entry(request, room, turn)
        self._deadlines.add(request)
        self._room.enter(room)

    def ready(self) -> Iterator[tuple[Request, None]]:
        """Requests that have their room and their turn."""
        while self._ready:
            entry = self._ready.pop(next(iter(self._ready)))
            entry.taken = True
            self._deadlines.remove(entry.request)
            yield entry.request, None

    def computed(self, handle: int) -> None:
        """All of the logits of a sequence's prompt are. May be said more than once."""
        entry = self._entries.get(handle)
        if entry is not None:
            self._turns.leave(entry.turn)

    def freed(self, handle: int) -> None:
        """The sequence's logits are held no more. Nothing happens where they have no room."""
        self._forget([handle])

    def cancel(self, handle: int) -> Request | None:
        """Forget a request unless its stub has some of its logits, which it gives back itself. Returns the
        request if it waits here."""
        entry = self._entries.get(handle)
        if entry is None or entry.request.first_token_ns:
            return None
        waits = entry.stage < Stage.COMPUTING
        self._forget([handle])
        return entry.request if waits else None

    def drop_late(self, now_ns: int) -> list[Request]:
        return self._forget([request.handle for request in self._deadlines.late(now_ns)])

    def drop_stub(self, pid: int) -> None:
        """A stub holds nothing any more, and wants nothing."""
        self._forget([handle for handle in self._entries if handle >> 32 == pid])

    def _start(self, handle: int) -> None:
        self._ready[handle] = self._entries[handle]

    def _forget(self, handles: list[int]) -> list[Request]:
        # All leave a gate at once: what one of them gives back lets in none of the others.
        gone = [self._entries.pop(handle) for handle in handles if handle in self._entries]
        for entry in gone:
            if entry.stage < Stage.COMPUTING:
                self._deadlines.remove(entry.request)
            self._ready.pop(entry.request.handle, None)
        self._turns.leave(*(entry.turn for entry in gone))
        self._room.leave(*(entry.room for entry in gone))
        return [entry.request for entry in gone]
