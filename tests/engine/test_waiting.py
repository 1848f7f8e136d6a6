# SPDX-License-Identifier: Apache-2.0
"""Who runs next: the real engine's loop, with requests that have all come before its first step."""

import gc
import re
from typing import Any

import numpy as np
import pytest

from engine.harness import shallow_model, start_core
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.engine import admission
from flashinfer_backend.engine.loop import EngineLoop
from flashinfer_backend.transport import protocol
from perf_configs.bench_engine import STUB, LocalSocket


class Recorder(LocalSocket):
    """`tokens` of each local id, in the order of their first tokens; `codes` and `failures` in the order of
    the ends."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: dict[int, list[int]] = {}
        self.codes: dict[int, int] = {}
        self.failures: dict[int, protocol.Failure] = {}

    def send_failure(self, failure: protocol.Failure) -> None:
        self.failures[protocol.split_handle(failure.handle)[1]] = failure

    def send_tokens(self, pid: int, frame: bytes, reports: Any) -> None:
        for local_id, token, code in protocol.unpack_tokens(frame).tolist():
            if token != protocol.NO_TOKEN:
                self.tokens.setdefault(local_id, []).append(token)
            if code != protocol.RUNNING:
                self.codes[local_id] = code


class Engine:
    """`run` ends when nothing is left, and checks that no slot and no block is held."""

    def __init__(self, **settings: object) -> None:
        self.socket = Recorder()
        self.loop = EngineLoop(start_core(shallow_model(), **settings), self.socket)  # type: ignore[arg-type]

    def submit(
        self, local_id: int, max_tokens: int, prompt_tokens: int = 8, share_with: int = 0, **more: Any
    ) -> None:
        """more: priority, timeout_us; parameters of sampling beside."""
        place = [more.pop(name, 0) for name in ("priority", "timeout_us")]
        prompt = np.full(prompt_tokens, 64 + (share_with or local_id) % 1900, "<i4").tobytes()
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **more)
        share = protocol.make_handle(STUB, share_with) if share_with else 0
        handle = protocol.make_handle(STUB, local_id)
        self.socket.inbox.append(protocol.Submit(handle, prompt, params, share, *place))

    def cancel(self, local_id: int) -> None:
        self.socket.inbox.append(protocol.Cancel(protocol.make_handle(STUB, local_id)))

    @property
    def running(self) -> list[int]:
        """In order of admission."""
        return [protocol.split_handle(handle)[1] for handle in self.loop.scheduler.running]

    @property
    def waiting(self) -> list[int]:
        return [protocol.split_handle(request.handle)[1] for request in self.loop.scheduler.queue]

    def step(self) -> None:
        assert self.loop.step()

    def run(self) -> None:
        scheduler = self.loop.scheduler
        while self.socket.inbox or scheduler.requests or self.loop.in_flight:
            self.step()
        assert not scheduler.queue and not scheduler.running
        assert scheduler.table.free == self.loop.config.max_num_seqs
        assert all(pool.available == pool.num_blocks for pool in scheduler.kv_manager.pools)


@pytest.mark.parametrize(
    ("settings", "order"),
    [
        ({}, [1, 2, 3, 4, 5, 6]),
        ({"schedule_policy": "fcfs"}, [1, 2, 3, 4, 5, 6]),
        ({"schedule_policy": "lof"}, [4, 2, 3, 6, 5, 1]),
    ],
    ids=["default", "fcfs", "lof"],
)
def test_order_of_first_tokens(settings, order):
    """The fifth has room for 4 tokens only, whatever it asks for."""
    engine = Engine(max_num_seqs=1, max_seq_len=64, **settings)
    for local_id, (max_tokens, prompt_tokens) in enumerate(
        [(3, 8), (9, 8), (9, 20), (12, 8), (40, 60), (6, 8)], 1
    ):
        engine.submit(local_id, max_tokens, prompt_tokens)
    engine.run()
    assert list(engine.socket.tokens) == order


def test_lists_of_requests_have_room_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest take 7 MB each, of which thousands could wait. One alone always has room."""
    monkeypatch.setattr(admission, "MOST_LISTED_IDS", 10)
    engine = Engine(max_num_seqs=1)
    tokens, failures = engine.socket.tokens, engine.socket.failures
    engine.submit(1, 2, bias_ids=[*range(11)], bias_values=[0.0] * 11)
    engine.submit(2, 2)
    engine.submit(3, 2, bad_words=[[5, 6]])
    engine.run()
    gc.collect()
    assert [*tokens] == [1, 2] and failures.pop(3).message.startswith("Maximum queue size of 10 token ids")
    engine.submit(4, 2, stop_sequences=[[1] * 3, [2] * 2])
    engine.submit(5, 2, allowed_ids=[5] * 5)
    engine.submit(6, 2, min_tokens=1, late_ids=[5])
    engine.run()
    assert [*tokens] == [1, 2, 4, 5] and [*failures] == [6]
    gc.collect()
    for local_id in (7, 8):  # ids of bad words take more room in each step
        engine.submit(local_id, 2, bad_words=[[5]])
    engine.run()
    assert [*tokens][4:] == [7] and [*failures] == [6, 8]


@pytest.mark.parametrize(("settings", "bound"), [({}, 4096), ({"max_queue_size": 0}, None)])
def test_how_many_may_wait_unless_it_is_said(settings, bound):
    """Beyond the slots; two more than that come."""
    engine = Engine(max_num_seqs=4, **settings)
    for local_id in range(1, 4 + 4096 + 2 + 1):
        engine.submit(local_id, 2, prompt_tokens=1)
    engine.step()
    refused = [] if bound is None else [4 + bound + 1, 4 + bound + 2]
    assert list(engine.socket.failures) == refused
    for failure in engine.socket.failures.values():
        text = "Maximum queue size of 4096 has been reached, please try again later"
        assert (failure.message, failure.refused) == (text, True)
    for local_id in range(1, 4 + 4096 + 2 + 1):
        engine.cancel(local_id)
    engine.run()


@pytest.mark.parametrize(
    ("settings", "order"), [({}, [1, 4, 3, 5, 2]), ({"schedule_policy": "lof"}, [1, 4, 5, 3, 2])]
)
def test_order_of_first_tokens_with_priorities(settings, order):
    """The first runs already: nobody takes its slot away."""
    engine = Engine(max_num_seqs=1, **settings)
    engine.submit(1, 20, priority=9)
    engine.step()
    for local_id, (max_tokens, priority) in enumerate([(9, 4), (3, 0), (2, -1), (6, 0)], 2):
        engine.submit(local_id, max_tokens, priority=priority)
    engine.run()
    assert list(engine.socket.tokens) == order


def test_who_waits_too_long_is_refused_and_the_others_go_on():
    engine = Engine(max_num_seqs=1)
    minute = 60_000_000
    engine.submit(1, 20, timeout_us=minute)
    engine.submit(2, 5, timeout_us=1)
    engine.submit(3, 5, timeout_us=minute)
    engine.submit(4, 5, grammar_type="regex", grammar="[ab]{5}", timeout_us=1)
    engine.step()
    assert sorted(engine.socket.failures) == [2, 4] and engine.running == [1] and engine.waiting == [3]
    for failure in engine.socket.failures.values():
        said = r"Request timeout expired: it waited in the queue for [0-9.e-]+ s and never ran. Send it again"
        assert failure.refused and re.match(said, failure.message)
    engine.run()
    assert list(engine.socket.tokens) == [1, 3]
    assert [len(tokens) for tokens in engine.socket.tokens.values()] == [20, 5]


@pytest.mark.parametrize("policy", ["fcfs", "lof"])
def test_preempted_sequences_stay_ahead_of_what_waits(policy):
    """The newest is sent back first and resumed last; a longer one that came later overtakes neither."""
    lengths = {1: 160, 2: 150, 3: 140, 4: 200}
    settings: dict[str, Any] = {"enable_kv_cache_reuse": False, "schedule_policy": policy}
    calm = Engine(**settings)
    engine = Engine(max_tokens_in_paged_kv_cache=256, max_num_seqs=3, **settings)
    for local_id, max_tokens in lengths.items():
        calm.submit(local_id, max_tokens)
        if local_id < 4:
            engine.submit(local_id, max_tokens)
    calm.run()
    engine.step()
    assert engine.running == [1, 2, 3]
    engine.submit(4, lengths[4])
    while engine.waiting != [2, 3, 4]:
        engine.step()
        assert engine.running + engine.waiting == [1, 2, 3, 4]
    engine.cancel(3)  # one that has generated already
    while engine.waiting:
        engine.step()
        assert 4 not in engine.running or 2 not in engine.waiting, "the fourth overtook the second"
    engine.run()
    assert engine.loop.scheduler.preemptions >= 2
    assert list(engine.socket.codes) == [3, 1, 2, 4]
    cut = engine.socket.tokens.pop(3)
    assert 0 < len(cut) < 140 and cut == calm.socket.tokens.pop(3)[: len(cut)]
    assert engine.socket.tokens == calm.socket.tokens


def test_sequences_of_one_request_share_its_prompt_under_lof():
    engine = Engine(max_num_seqs=2, schedule_policy="lof", enable_kv_cache_reuse=False)
    engine.submit(1, 3)
    for local_id in (2, 3, 4):
        engine.submit(local_id, 9, prompt_tokens=40, share_with=2)
    engine.run()
    scheduler = engine.loop.scheduler
    assert list(engine.socket.tokens) == [2, 3, 4, 1]
    assert scheduler.prompt_tokens_reused == 2 * 32
