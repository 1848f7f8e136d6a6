# SPDX-License-Identifier: Apache-2.0
"""Room for the logits that requests ask for: who waits for it, who passes, and when it is free again."""

import time

import numpy as np
import pytest
import torch

from engine.test_waiting import STUB, Engine, protocol
from flashinfer_backend.engine import logits_room
from flashinfer_backend.sampling import logprobs

ROW = 4 * 2048  # bytes of a token's logits
ROWS = (1 << 20) // ROW  # for which there is room
WIDE = {"max_num_tokens": 512}


def engine(**settings: object) -> Engine:
    return Engine(max_logits_mib=1, **settings)


def free(of: Engine, local_id: int) -> None:
    of.socket.inbox.append(protocol.Freed(protocol.make_handle(STUB, local_id)))


def run_until_idle(of: Engine) -> None:
    """Until nothing has a slot or waits for one."""
    while of.socket.inbox or of.loop.scheduler.requests or of.loop.in_flight:
        of.step()


def test_who_finds_no_room_waits_until_the_stub_holds_none_and_others_pass() -> None:
    engine_ = engine()
    engine_.submit(1, 2, prompt_tokens=100, context_logits=True)
    engine_.submit(2, 40, prompt_tokens=8, generation_logits=True)
    engine_.submit(3, 2, prompt_tokens=8, context_logits=True)  # would fit
    engine_.submit(4, 2)
    run_until_idle(engine_)
    assert sorted(engine_.socket.codes) == [1, 4], "its stub still has the first one's logits"
    status = engine_.loop.status()
    assert (status.logits_bytes, status.logits_waiting) == (100 * ROW, 2)
    assert (status.requests_waiting, status.requests_active) == (2, 2)
    free(engine_, 1)
    free(engine_, 1)
    run_until_idle(engine_)
    assert sorted(engine_.socket.codes) == [1, 2, 3, 4] and not engine_.socket.failures
    assert engine_.loop.logits.held == 48 * ROW
    free(engine_, 2)
    free(engine_, 3)
    engine_.run()
    engine_.step()
    assert engine_.loop.logits.held == 0


def test_who_needs_more_than_there_is_is_refused_at_once() -> None:
    engine_ = engine()
    engine_.submit(1, 9, prompt_tokens=ROWS + 1, context_logits=True)
    engine_.submit(2, 29, prompt_tokens=100, context_logits=True, generation_logits=True)
    engine_.submit(3, 9000, prompt_tokens=100, generation_logits=True)  # max_seq_len leaves 156
    engine_.submit(4, 28, prompt_tokens=100, context_logits=True, generation_logits=True)
    engine_.submit(5, 2, prompt_tokens=ROWS + 1)
    run_until_idle(engine_)
    assert sorted(engine_.socket.codes) == [4, 5] and sorted(engine_.socket.failures) == [1, 2, 3]
    asked = ["129 prompt tokens,", "100 prompt tokens and of up to 29 generated tokens,", "up to 156 gen"]
    for failure, words in zip(engine_.socket.failures.values(), asked, strict=True):
        assert failure.refused and words in failure.message, failure.message
        assert "room for 1 MiB, those of 128 tokens" in failure.message


def test_one_that_waits_for_room_can_be_cancelled_and_refused_late() -> None:
    engine_ = engine(max_queue_size=3)
    engine_.submit(1, 2, prompt_tokens=ROWS, context_logits=True)
    engine_.submit(2, 2, prompt_tokens=9, context_logits=True)
    engine_.submit(3, 2, prompt_tokens=9, context_logits=True, timeout_us=1)
    engine_.submit(4, 2, prompt_tokens=9, context_logits=True, priority=-1)
    engine_.submit(5, 2)
    engine_.submit(6, 2, prompt_tokens=9, context_logits=True)
    engine_.step()
    messages = {local_id: failure.message for local_id, failure in engine_.socket.failures.items()}
    assert sorted(messages) == [3, 5, 6], "those that wait for room count in the queue"
    assert "Request timeout expired" in messages[3] and "Maximum queue size of 3" in messages[6]
    engine_.cancel(2)
    run_until_idle(engine_)
    assert engine_.socket.codes == {2: protocol.FINISHED_CANCELLED, 1: protocol.FINISHED_LENGTH}
    free(engine_, 1)
    run_until_idle(engine_)
    assert list(engine_.socket.tokens) == [1, 4]


def test_what_waits_for_room_is_not_looked_at_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    class SeenEntry(logits_room.Entry):
        def __getattribute__(self, name: str) -> object:
            looks.append(name)
            return super().__getattribute__(name)

    monkeypatch.setattr(logits_room, "Entry", SeenEntry)
    engine_ = engine()
    for local_id in range(1, 101):
        engine_.submit(local_id, 2, prompt_tokens=100, context_logits=True, timeout_us=local_id * 10**8)
    engine_.step()
    waiting = len(engine_.loop.logits)
    assert waiting > 90
    looks.clear()
    now = time.monotonic_ns()
    assert not engine_.loop.logits.drop_late(now) and not looks
    late = engine_.loop.logits.drop_late(now + 5_000 * 10**9)
    assert [request.handle & 0xFF for request in late] == list(range(101 - waiting, 51))
    assert len(engine_.loop.logits) == 50


def test_an_engine_with_nothing_else_to_do_still_refuses_them_in_time() -> None:
    engine_ = engine(stats_check_period_ms=60_000)
    engine_.submit(1, 2, prompt_tokens=ROWS, context_logits=True)
    engine_.submit(2, 2, prompt_tokens=9, context_logits=True, timeout_us=50_000)
    waits, receive = [0], engine_.socket.receive

    def note(timeout_ms: int, until: float) -> list[protocol.ToEngine]:
        if len(engine_.loop.logits):
            waits.append(timeout_ms)
        return receive(min(timeout_ms, 100), until)

    engine_.socket.receive = note  # type: ignore[method-assign]
    while 2 not in engine_.socket.failures:
        engine_.step()
    assert max(waits) <= engine_.loop.logits.poll_ms


def test_room_goes_by_priority_and_a_stub_that_leaves_gives_all_of_its_own() -> None:
    engine_ = engine()
    engine_.submit(1, 2, prompt_tokens=100, context_logits=True)
    engine_.submit(2, 2, prompt_tokens=99, context_logits=True)
    engine_.submit(3, 2, prompt_tokens=98, context_logits=True, priority=-1)
    run_until_idle(engine_)
    free(engine_, 1)
    run_until_idle(engine_)
    assert list(engine_.socket.tokens) == [1, 3] and len(engine_.loop.logits) == 1
    engine_.socket.inbox.append(protocol.Goodbye(STUB))
    engine_.step()
    assert (engine_.loop.logits.held, len(engine_.loop.logits)) == (0, 0)


def test_a_guided_request_has_its_room_once_its_guide_is_there() -> None:
    engine_ = engine()
    engine_.submit(1, 2, prompt_tokens=ROWS, context_logits=True)
    guide = {"grammar_type": "regex", "grammar": "[ab]{5}"}
    engine_.submit(2, 5, prompt_tokens=9, context_logits=True, **guide)
    while not engine_.loop.status().logits_waiting:
        engine_.step()
    assert engine_.loop.status().requests_waiting == 1, "and waits for its guide no more"
    free(engine_, 1)
    while 2 not in engine_.socket.codes:
        engine_.step()


def computed(of: Engine, lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> tuple[list[list[int]], list]:
    """Tokens of each prompt whose logits a step computes, step by step, and the logits by prompt: of prompts
    of these lengths, and of one behind them that asks for none."""
    steps, found = [], {}
    schedule, send = of.loop.scheduler.schedule, of.socket.send_tokens

    def note(in_flight: bool, decode_s: float | None) -> object:
        plan = schedule(in_flight, decode_s)
        if plan is not None and len(plan.logits_rows):
            steps.append(plan.lengths[plan.logits_rows].tolist())
        return plan

    def keep(pid: int, frame: bytes, reports: list[protocol.RowReport] | None) -> None:
        for report in reports or []:
            if report.context_logits is not None:
                found[report.local_id] = np.frombuffer(report.context_logits, np.float32).reshape(-1, 2048)
        send(pid, frame, reports)

    monkeypatch.setattr(of.loop.scheduler, "schedule", note)
    monkeypatch.setattr(of.socket, "send_tokens", keep)
    for local_id, length in enumerate(lengths, 1):
        of.submit(local_id, 2, prompt_tokens=length, context_logits=True)
    of.submit(9, 2)
    run_until_idle(of)
    assert not of.socket.failures
    return steps, [found[n] for n in sorted(found)]


def test_prompts_with_logits_come_one_after_the_other_in_parts_and_others_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps, whole = computed(Engine(**WIDE), [100, 100], monkeypatch)
    assert steps == [[100, 100]]
    monkeypatch.setattr(logits_room, "STEP_BYTES", 40 * ROW)
    engine_ = Engine(**WIDE)
    steps, parts = computed(engine_, [100, 100], monkeypatch)
    assert steps == [[40], [40], [20]] * 2
    assert list(engine_.socket.tokens) == [9, 1, 2]
    for expected, found in zip(whole, parts, strict=True):
        assert found.shape == (100, 2048)
        np.testing.assert_allclose(found, expected, atol=1e-3)
    assert computed(Engine(**WIDE), [10, 20, 10, 20], monkeypatch)[0] == [[10, 20, 10], [20]]
    assert computed(Engine(enable_chunked_context=False, **WIDE), [100, 100], monkeypatch)[0] == [
        [100],
        [100],
    ]


def test_one_that_leaves_gives_its_turn_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits_room, "STEP_BYTES", 40 * ROW)
    engine_ = Engine()
    for local_id in (1, 2, 3):
        engine_.submit(local_id, 2, prompt_tokens=100, context_logits=True)
    engine_.step()
    assert engine_.running == [1] and len(engine_.loop.logits) == 2
    for local_id in (1, 2):  # amid its prompt, and before its turn
        engine_.cancel(local_id)
        free(engine_, local_id)
    run_until_idle(engine_)
    cancelled = protocol.FINISHED_CANCELLED
    assert engine_.socket.codes == {1: cancelled, 2: cancelled, 3: protocol.FINISHED_LENGTH}
    assert engine_.loop.logits.held == 100 * ROW
    free(engine_, 3)
    engine_.step()
    assert engine_.loop.logits.held == 0


@pytest.mark.parametrize("rows", [1, 64, 100])
def test_context_logits_are_computed_into_one_array(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CONTEXT_ROWS", 32)
    hidden = torch.randn(rows, 8, generator=torch.manual_seed(0)).bfloat16()
    weight = torch.randn(8, 50).bfloat16()

    class Model:
        logits = staticmethod(lambda part, chosen: part @ weight)

    found = logprobs.context_logits(Model(), hidden)  # type: ignore[arg-type]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, (hidden @ weight).float().numpy())


@pytest.mark.parametrize("how", ["late", "left"])
def test_what_one_gives_back_is_for_none_that_goes_with_it(how: str) -> None:
    """Requests that go together, the first of which held up the others."""
    engine_ = engine()
    engine_.submit(1, 200, prompt_tokens=100, context_logits=True)
    engine_.step()
    for local_id, length in ((2, 60), (3, 20), (4, 20)):
        engine_.submit(local_id, 2, prompt_tokens=length, context_logits=True, timeout_us=3_600_000_000)
    engine_.step()
    late = how == "late"
    if late:
        engine_.loop._refuse_late(time.monotonic_ns() + 7200 * 10**9)
    else:
        engine_.socket.inbox.append(protocol.Goodbye(STUB))
    engine_.step()
    assert engine_.running == ([1] if late else []) and not engine_.waiting
    assert not len(engine_.loop.logits)
    assert sorted(engine_.socket.failures) == ([2, 3, 4] if late else [])
    assert engine_.loop.logits.held == (100 * ROW if late else 0)


@pytest.mark.parametrize("begun", [False, True])
def test_the_room_of_one_that_is_cancelled_before_it_has_sent_any_is_free(begun: bool) -> None:
    """Its stub may have said so before the engine had it: by another socket, as its link was lost."""
    engine_ = engine()
    engine_.submit(1, 200)
    engine_.socket.inbox.append(protocol.Hello(STUB))
    free(engine_, 2)
    engine_.submit(2, 20, prompt_tokens=100, context_logits=True)
    if begun:
        engine_.step()
        assert engine_.running == [1, 2]
    engine_.cancel(2)
    engine_.step()
    assert engine_.running == [1] and engine_.loop.logits.held == 0
    engine_.cancel(1)
    engine_.run()
