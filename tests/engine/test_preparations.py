# SPDX-License-Identifier: Apache-2.0
"""What requests go through before the scheduler's queue: those of the engine, and one more in its list."""

import gc
import threading
import time
from collections.abc import Iterator
from concurrent import futures

import msgspec
import pytest

from engine.test_waiting import STUB, Engine, protocol
from flashinfer_backend.core.gate import Gate
from flashinfer_backend.core.request import Request
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.engine.preparations import Preparations
from flashinfer_backend.structured.grammar import Grammar
from waiting import wait_for

GUIDE = {"grammar_type": "regex", "grammar": "[ab]{3}"}


class Barrier:
    """Requests with a seed wait until it is opened; the seed 13 is refused."""

    poll_ms = 5
    overtaken = False

    def __init__(self) -> None:
        self.open = False
        self.waiting: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self.waiting)

    def needed(self, params: SamplingParams) -> bool:
        return params.seed > 0

    def submit(self, request: Request) -> None:
        self.waiting[request.handle] = request

    def ready(self) -> Iterator[tuple[Request, str | None]]:
        while self.open and self.waiting:
            request = self.waiting.pop(next(iter(self.waiting)))
            yield request, "13 is no seed" if request.params.seed == 13 else None

    def cancel(self, handle: int) -> Request | None:
        return self.waiting.pop(handle, None)

    def drop_late(self, now_ns: int) -> list[Request]:
        late = [r for r in self.waiting.values() if r.deadline_ns and r.deadline_ns <= now_ns]
        return [self.waiting.pop(request.handle) for request in late]

    def drop_stub(self, pid: int) -> None:
        self.waiting = {handle: r for handle, r in self.waiting.items() if handle >> 32 != pid}


def engine(**settings: object) -> tuple[Engine, Barrier]:
    """An engine with a barrier between its grammars and the room for logits."""
    made, barrier = Engine(max_num_seqs=1, max_logits_mib=1, **settings), Barrier()
    loop = made.loop
    grammars, _, logits = loop.preparations._line
    loop.preparations = Preparations([grammars, barrier, logits], loop.scheduler, loop._refuse)
    return made, barrier


def until(made: Engine, barrier: Barrier, waiting: int) -> None:
    """Advances the preparations until `waiting` requests wait at the barrier."""
    while len(barrier) < waiting:
        time.sleep(0.001)
        made.loop.preparations.advance()


def test_a_request_goes_through_all_that_it_needs_and_keeps_its_place() -> None:
    made, barrier = engine()
    made.submit(1, 20)
    made.step()
    made.submit(2, 3, seed=1, **GUIDE)
    made.submit(3, 3, seed=1, generation_logits=True, **GUIDE)
    made.submit(4, 3)
    made.submit(5, 3, seed=13)
    made.step()
    until(made, barrier, 3)
    status = made.loop.status()
    assert (status.requests_waiting, status.requests_active, status.logits_waiting) == (4, 5, 0)
    assert made.waiting == [4] and not made.loop.logits.held
    barrier.open = True
    made.step()
    assert made.loop.logits.held == 3 * 4 * 2048
    assert made.waiting == [2, 4, 3], "others pass one that asks for logits, and none else"
    failure = made.socket.failures.pop(5)
    assert failure.refused and failure.message == "13 is no seed"
    made.run()
    assert list(made.socket.tokens) == [1, 2, 4, 3] and not made.socket.failures


def test_what_waits_there_is_counted_cancelled_refused_late_and_dropped_with_its_stub(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made, barrier = engine(max_queue_size=3, stats_check_period_ms=60_000)
    for local_id, timeout_us in ((1, 0), (2, 1), (3, 0), (4, 0)):
        made.submit(local_id, 3, seed=1, timeout_us=timeout_us)
    made.step()
    messages = {local_id: failure.message for local_id, failure in made.socket.failures.items()}
    assert list(messages) == [4, 2] and "Maximum queue size" in messages[4] and "expired" in messages[2]
    assert made.loop.preparations.poll_ms == 5
    made.cancel(1)
    made.step()
    assert made.socket.codes == {1: protocol.FINISHED_CANCELLED} and len(barrier) == 1
    made.socket.inbox.append(protocol.Goodbye(STUB, said=False))
    made.step()
    assert len(barrier) == 0 and made.loop.status().requests_active == 0
    made.submit(5, 3, seed=1)
    made.step()
    made.socket.inbox.append(protocol.Goodbye(STUB))  # as at the end of a server whose streams are open
    made.step()
    texts = [record.getMessage() for record in caplog.records]
    assert texts == [f"process {STUB} has died; its open requests, 1, are dropped"]
    assert made.loop.preparations.poll_ms is None


def grammars_there() -> int:
    return sum(isinstance(each, Grammar) for each in gc.get_objects())


def test_grammars_that_find_no_room_are_made_again_when_others_have_slots() -> None:
    gc.collect()
    before, made = grammars_there(), Engine(max_num_seqs=1)
    grammars = made.loop._grammars
    grammars._room = room = Gate(1)  # each takes more, and so has it alone
    guided = set(range(1, 9))
    for local_id in guided:
        made.submit(local_id, 9, **GUIDE)
    made.submit(9, 9)
    made.step()
    # Mostly all are there then. One that was made within the step waits for room, and so does its future.
    futures.wait([entry.made for _, entry in grammars.entries], timeout=2)
    made.cancel(3)
    while made.loop.in_flight or made.loop.scheduler.requests or len(grammars):
        made.step()
        if made.running == [4]:
            made.cancel(5)  # may wait for room, or for a slot
        # Of one that runs, one that has ended since the last step, one that waits and one in the making.
        assert grammars_there() - before <= 4
    assert made.socket.codes.pop(3) == protocol.FINISHED_CANCELLED
    assert not made.socket.failures and set(made.socket.tokens) - {3, 5} == {1, 2, 4, 6, 7, 8, 9}
    assert all(len(made.socket.tokens[each]) == 3 for each in guided - {3, 5})
    made.loop.preparations.advance()
    assert room.held == room.waiting == len(grammars._in_room) == 0


def test_a_grammar_that_nobody_waits_for_any_more_is_not_compiled() -> None:
    """Of those that have not begun: one that is being compiled is so to its end."""
    made, go_on, begun = Engine(max_num_seqs=1), threading.Event(), list[str]()
    grammars = made.loop._grammars
    compile_guide, threads = grammars._compiler.compile, grammars._threads._max_workers

    def slow(kind: str, text: str, end_id: int) -> Grammar:
        begun.append(text)
        assert go_on.wait(120)
        return compile_guide(kind, text, end_id)

    grammars._compiler.compile = slow  # type: ignore[method-assign]
    for local_id in range(1, threads + 4):
        made.submit(local_id, 3, grammar_type="regex", grammar=str(local_id))
    made.step()
    wait_for(lambda: len(begun) == threads)
    made.cancel(threads + 1)
    made.cancel(1)
    made.step()
    assert set(made.socket.codes.values()) == {protocol.FINISHED_CANCELLED} and len(made.socket.codes) == 2
    go_on.set()
    made.run()
    while len(grammars):
        made.step()
    made.run()
    assert sorted(begun) == [str(each) for each in range(1, threads + 4) if each != threads + 1]


def test_who_finds_room_for_its_logits_keeps_its_place() -> None:
    made, _ = engine()
    for local_id, more in enumerate([{}, {"context_logits": True}, {}, {"generation_logits": True}, {}], 1):
        made.submit(local_id, 3, **more)
    made.step()
    assert made.running + made.waiting == [1, 2, 3, 4, 5]


def test_the_parameters_of_a_client_stay_as_they_are() -> None:
    made = Engine()
    params = SamplingParams(max_tokens=4, min_tokens=2, end_id=1 << 20, late_ids=[9, 7])
    before = msgspec.structs.replace(params, late_ids=[9, 7])
    message = protocol.Submit(protocol.make_handle(STUB, 1), b"\5\0\0\0", params, 0, 0, 0)
    request = made.loop.admission.request(message, queued=0)
    assert (request.params.end_id, request.params.late_ids) == (-1, [7, 9])
    assert params == before
