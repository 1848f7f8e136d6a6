# SPDX-License-Identifier: Apache-2.0
"""What shares a step."""

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashinfer_backend.cache.groups import decoding_blocks, tail_blocks
from flashinfer_backend.cache.pool import BlockPool
from flashinfer_backend.core import tuned
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.request import Request, backwards
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.core.step import NewSequence, StepPlan
from flashinfer_backend.engine import outputs
from flashinfer_backend.engine.outputs import accept
from flashinfer_backend.scheduler import budget
from flashinfer_backend.scheduler.kv_cache_manager import KVCacheManager
from flashinfer_backend.scheduler.scheduler import Scheduler
from flashinfer_backend.transport.protocol import FINISHED_STOP_WORDS, RUNNING
from thinned import examples


def scheduler(*lengths: int, reuse: bool = False, **numbers: int) -> Scheduler:
    """numbers: fields of Scheduling."""
    config = EngineConfig(model_dir="", max_seq_len=4096, max_input_len=4095, max_num_seqs=64)
    scheduling = msgspec.structs.replace(tuned.fallback().scheduling, **numbers)
    result = Scheduler(config, KVCacheManager([BlockPool(4096)], 16, reuse), numbers=scheduling)
    for handle, length in enumerate(lengths, 1):
        result.submit(of_length(length, handle))
    return result


def of_length(length: int, handle: int, max_new: int = 8) -> Request:
    params = SamplingParams(max_tokens=max_new)
    return Request(handle=handle, prompt=np.zeros(length, np.int32), params=params, max_new=max_new)


def enter_blocks(block_table: np.ndarray, plan: StepPlan, running: dict[int, Request]) -> None:
    """What the device does with a plan's blocks: then every running sequence's are in its slot's row."""
    _, slot, column, block = plan.block_updates.T
    block_table[slot, column] = block
    assert (block_table[plan.slots, (plan.starts + plan.lengths - 1) // 16] > 0).all()
    for request in running.values():
        blocks = request.held[0].blocks
        assert block_table[request.slot, : len(blocks)].tolist() == blocks


def finish(scheduler: Scheduler, plan: StepPlan, token: int = 0) -> int:
    """Every row of a step gets this token; those that have ended leave. How many there are."""
    outcome = accept(scheduler.table, plan, np.full(len(plan.sample_slots), token, np.int32))
    ended = outcome.slots[outcome.codes != RUNNING].tolist()
    for slot in ended:
        request = scheduler.table.requests[slot]
        assert request is not None
        scheduler.release(request)
    return len(ended)


def prompt_lengths(plan: StepPlan) -> list[int]:
    return plan.lengths[plan.num_decodes :].tolist()


def prompts_of_steps(scheduler: Scheduler, decode_s: float | None = None) -> list[list[int]]:
    """Prompt tokens a row, of each step until all prompts are done."""
    steps = []
    while scheduler.queue or scheduler.prefilling:
        plan = scheduler.schedule(in_flight=False, decode_s=decode_s)
        assert plan is not None
        steps.append(prompt_lengths(plan))
    return steps


@pytest.mark.parametrize(
    ("lengths", "steps"),
    [
        ([300, 300, 300], [[300, 300, 300]]),
        ([1000, 100, 200, 900], [[1000], [100, 200], [900]]),
        ([2000, 2000], [[2000], [2000]]),
        ([10, 2000, 10], [[10], [2000], [10]]),
    ],
)
def test_a_prompt_does_not_wait_for_those_behind_it(lengths, steps):
    """Together they would take longer than the first alone, and hardly less than one after the other."""
    assert prompts_of_steps(scheduler(*lengths)) == steps


def test_a_backlog_of_more_than_a_step_is_worked_off_in_full_steps():
    steps = prompts_of_steps(scheduler(*[2000] * 9))
    assert steps == [[2000, 2000, 2000, 2000, 192], [1808], [2000], [2000], [2000], [2000]]


def of_short_steps(
    *lengths: int,
    reuse: bool = False,
    pools: list[BlockPool] | None = None,
    snapshots: BlockPool | None = None,
    logits_tokens: int | None = None,
) -> Scheduler:
    """Of 1000 tokens a step."""
    tokens = {"max_num_tokens": 1000, "max_num_tokens_while_decoding": 1000}
    config = EngineConfig(model_dir="", max_seq_len=4096, max_input_len=4095, max_num_seqs=64, **tokens)
    manager = KVCacheManager(pools or [BlockPool(4096)], 16, reuse, snapshots)
    result = Scheduler(config, manager, logits_tokens=logits_tokens)
    for handle, length in enumerate(lengths, 1):
        result.submit(of_length(length, handle))
    return result


@pytest.mark.parametrize(
    ("lengths", "steps"),
    [
        ([2500], [[1000], [1000], [500]]),
        ([2500, 100, 300], [[100, 300, 600], [998], [902]]),
        ([2500, 400, 400, 400], [[400, 600], [400, 599], [400, 598], [703]]),
        ([2500, 501], [[1000], [1000], [500, 500], [1]]),
        ([2500, 2500, 200], [[200, 800], [999], [701, 298], [998], [998], [206]]),
        ([1000, 2500, 100], [[1000], [100, 899], [998], [603]]),
    ],
    ids=str,
)
def test_a_prompt_of_several_steps_leaves_half_of_each_to_those_that_this_ends(lengths, steps):
    """Others of several steps wait for it, whatever their place in the queue."""
    assert prompts_of_steps(of_short_steps(*lengths)) == steps


def test_who_comes_while_a_long_prompt_is_computed_does_not_wait_for_it():
    running = of_short_steps(4000)
    assert [prompt_lengths(running.schedule(in_flight=False)) for _ in range(2)] == [[1000], [1000]]
    running.submit(of_length(3000, 2))
    running.submit(of_length(200, 3))
    assert prompts_of_steps(running)[:2] == [[200, 800], [999]]
    assert [request.handle for request in running.running.values()] == [1, 3, 2]


def test_a_long_prompt_is_not_slowed_down_by_requests_of_a_lower_priority():
    running = of_short_steps(4000)
    running.schedule(in_flight=False)
    for handle, priority in ((2, 1), (3, 0), (4, -1)):
        request = of_length(100, handle)
        request.priority = priority
        running.submit(request)
    assert prompts_of_steps(running) == [[100, 100, 800], [998], [998], [204, 100]]
    assert list(running.running) == [1, 4, 3, 2]


def test_who_waits_with_a_higher_priority_is_not_overtaken():
    """It would find no slot and no blocks later."""
    running = of_short_steps(4000)
    running.schedule(in_flight=False)
    for handle, length, priority in ((2, 3000, -5), (3, 100, 0), (4, 100, -5)):
        request = of_length(length, handle)
        request.priority = priority
        running.submit(request)
    assert prompts_of_steps(running)[:3] == [[100, 900], [999], [999]]
    assert list(running.running) == [1, 4, 2, 3]


def test_many_long_prompts_that_wait_are_overtaken():
    """With or without prefix reuse: what does not fit is hashed only where it may be cached."""
    for reuse in (False, True):
        running = of_short_steps(4000, *[3000] * 20, reuse=reuse)
        running.submit(Request(99, np.ones(100, np.int32), SamplingParams(max_tokens=8), 8))
        assert prompt_lengths(running.schedule(in_flight=False)) == [100, 900]


def test_a_long_prompt_is_overtaken_by_what_the_prefix_cache_has_nearly_all_of():
    running = of_short_steps(1000, reuse=True)
    assert prompts_of_steps(running) == [[1000]]
    running.submit(Request(2, np.ones(3000, np.int32), SamplingParams(max_tokens=8), 8))
    running.submit(of_length(1200, 3))
    assert prompt_lengths(running.schedule(in_flight=False)) == [1200 - 992, 999 - 208]


def test_who_begins_like_a_long_prompt_of_a_model_with_states_does_not_wait_for_its_end():
    """Only its end's states are kept, of which the other has no use."""
    running = of_short_steps(4000, reuse=True, snapshots=BlockPool(50))
    running.schedule(in_flight=False)
    prompt = np.concatenate([np.zeros(320, np.int32), np.ones(100, np.int32)])
    running.submit(Request(2, prompt, SamplingParams(max_tokens=8), 8))
    assert prompt_lengths(running.schedule(in_flight=False)) == [320, 680]
    assert prompt_lengths(running.schedule(in_flight=False)) == [100, 900]


def test_a_long_prompt_keeps_its_half_where_windows_have_few_blocks():
    """Those that overtake it become streams, whose windows could take all blocks that it wants."""
    tail = tail_blocks(512, 16)
    pools = [BlockPool(4096), BlockPool(2 * decoding_blocks(tail, 16, 0) + 1000 // 16 + 1, tail)]
    running = of_short_steps(4000, pools=pools)
    for handle in range(2, 40):
        running.submit(of_length(450, handle, max_new=60))
    running.schedule(in_flight=False)
    steps = 1
    while running.requests[1] in running.prefilling:
        plan = running.schedule(in_flight=False)
        assert plan is not None
        finish(running, plan)
        steps += 1
    assert steps < 12


def test_a_long_prompt_whose_logits_are_wanted_leaves_what_it_does_not_take():
    running = of_short_steps(logits_tokens=100)
    params = SamplingParams(max_tokens=8, context_logits=True)
    running.submit(Request(handle=1, prompt=np.zeros(2000, np.int32), params=params, max_new=8))
    running.submit(of_length(900, 2))
    assert prompt_lengths(running.schedule(in_flight=False)) == [900, 100]
    running.submit(of_length(2500, 3))
    assert prompt_lengths(running.schedule(in_flight=False)) == [100, 899]


def test_tokens_that_the_prefix_cache_has_do_not_count():
    chunked = scheduler(*[2000] * 4, reuse=True)
    assert prompts_of_steps(chunked) == [[2000], [16, 16, 16]]
    assert chunked.blocks_reused == 3 * (2000 - 16) // 16


def test_without_chunked_context_a_preempted_sequence_larger_than_a_step_is_resumed():
    config = EngineConfig(
        model_dir="",
        max_seq_len=256,
        max_input_len=64,
        max_num_seqs=4,
        max_num_tokens=64,
        max_num_tokens_while_decoding=64,
        enable_chunked_context=False,
    )
    running = Scheduler(config, KVCacheManager([BlockPool(17)], 16, reuse=False))
    for handle in (1, 2):
        running.submit(of_length(30, handle, max_new=200))
    largest = 0
    block_table = np.zeros((4, 16), np.int32)
    for _ in range(500):
        plan = running.schedule(in_flight=False)
        assert plan is not None, "nothing runs, and nothing is admitted"
        largest = max(largest, plan.num_tokens)
        enter_blocks(block_table, plan, running.running)
        finish(running, plan)
        if not running.requests:
            break
    assert not running.requests and running.preemptions and largest <= 64


def tokens_of_steps(lengths: list[tuple[int, int]], **settings: Any) -> list[int]:
    """Tokens of each step, decode rows and prompts, until all is done. lengths: of prompt and answer."""
    config = EngineConfig(model_dir="", max_seq_len=4096, max_input_len=4095, **settings)
    result = Scheduler(config, KVCacheManager([BlockPool(8192)], 16, reuse=False))
    for handle, (prompt, output) in enumerate(lengths, 1):
        result.submit(of_length(prompt, handle, output))
    steps = []
    while (plan := result.schedule(in_flight=False)) is not None:
        steps.append(plan.num_tokens)
        finish(result, plan)
    assert not result.requests
    return steps


def test_longest_first_spreads_a_backlog_over_the_steps_of_its_longest_answer():
    lengths = [(100, 400)] + [(200, 20 + n % 60) for n in range(600)]
    work = sum(prompt + output - 1 for prompt, output in lengths)
    spread = tokens_of_steps(lengths, max_num_seqs=160, schedule_policy="lof")
    assert sum(spread) == work
    assert 400 <= len(spread) < 410
    mean = work / 400
    assert 0.9 * mean < np.median(spread) < 1.1 * mean
    assert max(spread) < 1.2 * mean
    # In order of arrival prompts are worked off as fast as they can be.
    assert max(tokens_of_steps(lengths, max_num_seqs=160)) > 10 * mean


def test_a_spread_backlog_has_no_step_with_less_than_fills_the_device():
    lengths = [(10, 1000)] + [(100, 10)] * 300
    steps = tokens_of_steps(lengths, max_num_seqs=64, schedule_policy="lof")
    assert len(steps) == 1000
    assert set(steps[:60]) == {256}
    # Nothing is spread where every request has a slot.
    steps = tokens_of_steps(lengths, max_num_seqs=512, max_num_tokens=4096, schedule_policy="lof")
    assert steps[0] == 4096


def test_steady_arrivals_are_not_spread_but_take_every_slot():
    slots, clients = 320, 330
    config = EngineConfig(model_dir="", max_seq_len=4096, max_num_seqs=slots, schedule_policy="lof")
    result = Scheduler(config, KVCacheManager([BlockPool(65536)], 16, reuse=False))
    random = np.random.default_rng(0)
    sent = 0

    def submit() -> None:
        nonlocal sent
        sent += 1
        result.submit(of_length(int(random.integers(100, 300)), sent, int(random.integers(100, 800))))

    for _ in range(clients):
        submit()
    rows = []
    for _ in range(budget.BATCH_ARRIVAL_STEPS + 1500):
        plan = result.schedule(in_flight=False)
        rows.append(plan.num_decodes)
        for _ in range(finish(result, plan)):
            submit()
    assert np.mean(rows[-1000:]) > 0.97 * slots
    for request in list(result.requests.values()):
        result.release(request)
    assert result.schedule(in_flight=False) is None
    for _ in range(3 * slots):  # a batch that comes when all is done is spread again
        submit()
    result.schedule(in_flight=False)
    limit = config.max_num_tokens_while_decoding
    assert all(result.schedule(in_flight=False).num_tokens < limit / 2 for _ in range(3))


@pytest.mark.parametrize(
    ("streams", "decode_s", "lengths", "steps"),
    [
        (40, 0.02, [200], [[200]]),
        (40, 0.02, [300], [[216], [84]]),  # no fewer than fill the device, with the streams
        (40, 0.02, [2000], [[1000], [500], [250], [216], [34]]),
        (40, 0.02, [300, 900], [[300], [450], [225], [215], [10]]),  # the first one streams by then
        (1, 0.01, [1000], [[500], [255], [245]]),
        (40, 0.0099, [2000], [[2000]]),
        (40, None, [2000], [[2000]]),
        (0, 0.02, [2000], [[2000]]),
    ],
)
def test_half_of_what_waits_is_computed_beside_slow_steps(
    streams: int, decode_s: float | None, lengths: list[int], steps: list[list[int]]
):
    result = scheduler(*[10] * streams, slow_step_ms=10)
    if streams:
        result.schedule(in_flight=False)
    for handle, length in enumerate(lengths, 1000):
        result.submit(of_length(length, handle))
    assert prompts_of_steps(result, decode_s) == steps


@pytest.mark.parametrize(
    ("count", "per_token", "captured", "together"),
    [
        (128, 8, 8192, 2048),
        (128, 8, 1024, 1024),
        (512, 10, 8192, 6553),
        (8, 2, 2048, 1024),
    ],
)
def test_more_prompts_share_a_step_where_an_expert_has_few_of_their_tokens(
    count: int, per_token: int, captured: int, together: int
):
    numbers = budget.for_experts(tuned.fallback().scheduling, count, per_token, captured)
    assert numbers.prompts_together == together


@pytest.mark.parametrize(
    ("streams", "prompts"),
    [(0, [8, 2]), (3, [7, 3]), (32, [4, 6]), (33, [8, 2])],
)
def test_a_step_that_prompts_share_is_no_larger_than_a_graph(streams: int, prompts: list[int]):
    """Of 8 tokens. Streams that take more than half of a graph leave prompts what they had without."""
    result = scheduler(prompts_together=64)
    for handle in range(1, streams + 1):
        result.submit(of_length(1, handle, max_new=100))
    prompts_of_steps(result)
    for handle in range(100, 110):
        result.submit(of_length(8, handle, max_new=100))
    assert [len(step) for step in prompts_of_steps(result)] == prompts


def test_streams_do_not_count_in_a_step_that_is_larger_than_a_graph_in_any_case():
    result = scheduler(prompts_together=64)
    for handle in range(1, 9):
        result.submit(of_length(1, handle, max_new=100))
    prompts_of_steps(result)
    for handle, length in ((20, 58), (21, 4), (22, 4)):
        result.submit(of_length(length, handle, max_new=100))
    assert prompts_of_steps(result) == [[58, 4], [4]]


def prompt_of(prefix: int, own: int, handle: int) -> Request:
    """A prompt of `prefix` zeros and `own` tokens that no other one has."""
    result = of_length(prefix + own, handle)
    result.prompt[prefix:] = handle
    return result


def test_what_the_prefix_cache_has_of_prompts_does_not_count_beside_slow_steps():
    result = scheduler(*[10] * 40, reuse=True, slow_step_ms=10)
    result.submit(of_length(1600, 99, max_new=1))
    while result.queue or result.prefilling:
        result.schedule(in_flight=False)
    for handle, length in enumerate((500, 700), 1000):
        result.submit(prompt_of(1600, length, handle))
    assert prompts_of_steps(result, 0.02) == [[500], [350], [215], [135]]


def test_a_prompt_whose_logits_are_wanted_is_computed_whole_and_serves_others():
    result = scheduler(reuse=True)
    params = SamplingParams(max_tokens=8, context_logits=True)
    for handle in (1, 2):
        result.submit(Request(handle=handle, prompt=np.zeros(100, np.int32), params=params, max_new=8))
        assert prompts_of_steps(result) == [[100]]
    result.submit(of_length(100, 3))
    assert prompts_of_steps(result) == [[4]]


def test_of_many_that_wait_only_the_first_are_looked_up(monkeypatch: pytest.MonkeyPatch):
    looked_up = []
    count = KVCacheManager.count
    monkeypatch.setattr(
        KVCacheManager, "count", lambda self, keys: looked_up.append(len(keys)) or count(self, keys)
    )

    def lookups(streams: int, waiting: int, length: int) -> list[int]:
        result = scheduler(*[10] * streams, reuse=True)
        result.schedule(in_flight=False)
        looked_up.clear()
        for handle in range(1000, 1000 + waiting):
            result.submit(of_length(length, handle))
        result.schedule(in_flight=False)
        return looked_up

    # Of 64 slots one is free. The head is looked up once more when it is admitted.
    assert lookups(63, 1000, 40) == [2] * 16 + [2]
    assert lookups(63, 10, 4000) == [249] * 2 + [249]
    assert lookups(64, 1000, 40) == []


def test_a_prompt_that_waits_is_hashed_once(monkeypatch: pytest.MonkeyPatch):
    result = scheduler(reuse=True)
    running = of_length(4000, 1, max_new=90)
    running.prompt = np.arange(4000, dtype=np.int32)
    result.submit(running)
    result.schedule(in_flight=False)
    pool = result.kv_manager.pools[0]
    pool.allocate(pool.available - 10)  # none are left for the next one
    hashed = []
    keys = KVCacheManager.prefix_keys
    monkeypatch.setattr(
        KVCacheManager, "prefix_keys", lambda self, *args: hashed.append(args) or keys(self, *args)
    )
    result.submit(of_length(2000, 2))
    for _ in range(5):
        result.schedule(in_flight=False)
    assert len(result.queue) == 1
    assert len(hashed) == 1


def test_prompts_that_share_a_step_are_chosen_without_a_look_at_those_behind_them():
    looks = set()

    class Seen(Request):
        def __getattribute__(self, name: str) -> Any:
            if name == "prompt":
                looks.add(object.__getattribute__(self, "handle"))
            return super().__getattribute__(name)

    result = scheduler(prompts_together=8)
    for handle in range(1, 10_000):
        result.submit(Seen(handle, np.zeros(1, np.int32), SamplingParams(max_tokens=8), 8))
    looks.clear()
    plan = result.schedule(in_flight=False)
    assert plan is not None and plan.num_rows == 64
    assert len(looks) == 64


def test_who_waits_for_blocks_holds_none_and_keeps_the_cached_ones(monkeypatch: pytest.MonkeyPatch):
    config = EngineConfig(model_dir="", max_seq_len=4096, max_input_len=4095, max_num_seqs=64)
    result = Scheduler(config, KVCacheManager([BlockPool(101)], 16, reuse=True))
    manager, pool = result.kv_manager, result.kv_manager.pools[0]

    def submit(handle: int, first: int, tokens: int, max_new: int) -> Request:
        request = of_length(tokens, handle, max_new)
        request.prompt = np.arange(first, first + tokens, dtype=np.int32)
        result.submit(request)
        return request

    def step() -> None:
        plan = result.schedule(in_flight=False)
        assert plan is not None
        finish(result, plan, 9)

    wanted = submit(1, 0, 160, max_new=1).prompt  # 10 blocks, the oldest in the cache
    step()
    other = submit(2, 10_000, 480, max_new=1).prompt  # 30 blocks
    step()
    stream = submit(3, 20_000, 1, max_new=2000)
    step()
    submit(4, 0, 100 * 16, max_new=1)
    monkeypatch.setattr(pool, "match", lambda keys: pytest.fail("blocks are held without a place"))
    while len(pool._free):
        step()
    evicted = 0
    while evicted < 25:
        step()
        evicted = 30 - manager.count(manager.prefix_keys(other))[0]
        assert manager.count(manager.prefix_keys(wanted)) == (10, 10)
    assert stream.slot >= 0 and len(result.queue) == 1


def test_equal_prompts_are_computed_once():
    """The second waits for the step that computes the first, and shares its blocks."""
    result = scheduler(100, 100, 100, reuse=True)
    steps = prompts_of_steps(result)
    assert steps == [[100], [4, 4]]
    other = [np.arange(100, dtype=np.int32) + 1000 * i for i in range(2)]
    for handle, prompt in enumerate(other, 10):
        request = of_length(100, handle)
        request.prompt = prompt
        result.submit(request)
    assert prompts_of_steps(result) == [[100, 100]], "different prompts share a step"


def test_of_what_two_prompts_share_what_is_cached_is_not_waited_for():
    result = scheduler(reuse=True)
    shared = np.arange(400, dtype=np.int32)
    for handle, (known, own) in enumerate([(400, 0), (300, 7), (300, 9)], 1):
        request = of_length(known + 100 * (own > 0), handle)
        request.prompt = np.concatenate([shared[:known], np.full(100 * (own > 0), own, np.int32)])
        result.submit(request)
    assert prompts_of_steps(result) == [[400], [112, 112]]


def test_a_short_common_prefix_is_not_waited_for():
    result = scheduler(reuse=True)
    for handle in (1, 2):
        result.submit(prompt_of(100, 200, handle))
    assert prompts_of_steps(result) == [[300, 300]]


def test_a_step_that_was_not_launched_is_undone():
    """Its prompts fail, its blocks are forgotten, its streams go on from where they were."""
    result = scheduler(40, 40, reuse=True)
    stream = result.requests[1]
    for _ in range(3):
        plan = result.schedule(in_flight=False)
        assert plan is not None
        accept(result.table, plan, np.full(len(plan.sample_slots), 5, np.int32))
    failing = of_length(200, 9)
    failing.prompt = np.arange(200, dtype=np.int32)
    result.submit(failing)
    plan = result.schedule(in_flight=False)
    assert plan is not None and plan.num_rows == 3
    assert result.abandon(plan, [failing.slot]) == [failing]
    assert list(result.requests) == [1, 2] and [r.handle for r in result.queue] == [1, 2]
    assert (
        not result.running and result.kv_manager.pools[0].available == result.kv_manager.pools[0].num_blocks
    )
    assert not any(result.kv_manager.count(result.kv_manager.prefix_keys(failing.prompt)))
    assert stream.generated.tolist() == [5, 5, 5]
    plan = result.schedule(in_flight=False)
    assert plan is not None
    assert (plan.starts[0], plan.lengths[0]) == (32, 11), "two blocks of its prompt are cached"
    assert plan.tokens[:11].tolist() == [0] * 8 + [5] * 3


def test_a_plan_says_how_its_rows_are_sampled():
    result = scheduler()
    plain = SamplingParams(max_tokens=8, temperature=0.5, seed=7, min_tokens=2, end_id=9)
    penalised = SamplingParams(max_tokens=8, temperature=0.0, seed=8, frequency_penalty=0.5)
    prompt = np.arange(5, dtype=np.int32)
    asked = [Request(handle, prompt, params, max_new=8) for handle, params in ((1, plain), (2, penalised))]
    for request in asked:
        result.submit(request)
    plans = []
    for _ in range(3):
        plans.append(result.schedule(in_flight=False))
        accept(result.table, plans[-1], np.array([5, 6], np.int32))
    for plan, held_back in zip(plans, (9, 9, -1), strict=True):
        assert (plan.temperature.tolist(), plan.seed.tolist()) == ([0.5, 0.0], [7, 8])
        assert (plan.suppressed.tolist(), plan.stateful.tolist()) == ([held_back, -1], [1])
    slot, epoch = asked[1].slot, int(result.table.epoch[asked[1].slot])
    new = NewSequence(2, slot, epoch, penalised, prompt_len=5, tokens=prompt.astype("<i4").tobytes())
    assert [plan.new for plan in plans] == [[new], [], []]
    assert not any(len(plan.following) for plan in plans), "nothing drafts"
    result._preempt_newest()
    plan = result.schedule(in_flight=False)
    again = msgspec.structs.replace(
        new, epoch=epoch + 1, tokens=np.array([*range(5), 6, 6, 6], "<i4").tobytes()
    )
    assert plan is not None and (plan.new, plan.freed) == ([again], [])
    for request in asked:
        result.release(request)
    result.submit(of_length(5, 3))
    plan = result.schedule(in_flight=False)
    assert plan is not None and (plan.new, plan.freed) == ([], [2])


def test_what_was_found_in_the_prefix_cache_is_counted_each_time_that_a_sequence_comes_to_a_slot():
    """Its prompt once."""
    config = EngineConfig(model_dir="", max_seq_len=4096, max_input_len=4095, max_num_seqs=64)
    result = Scheduler(config, KVCacheManager([BlockPool(21)], 16, reuse=True), history=True)
    first, second = prompt_of(100, 0, 1), prompt_of(64, 36, 2)
    plans = []
    for request in (first, second):
        result.submit(request)
        plans.append(result.schedule(in_flight=False))
    counts = [(r.cached_tokens, r.reused_blocks, r.allocated_blocks, r.new_blocks) for r in (first, second)]
    assert counts == [(0, 0, 7, 7), (64, 4, 3, 3)]
    assert (result.prompt_tokens, result.prompt_tokens_reused, result.blocks_reused) == (200, 64, 4)
    assert [plan.recalled for plan in plans] == [[], [(second.slot, bytes(4 * 64))]]
    finish(result, plans[1])
    result._preempt_newest()
    stamp = second.first_scheduled_ns
    result.schedule(in_flight=False)
    assert (second.cached_tokens, second.reused_blocks, second.allocated_blocks) == (64, 10, 4)
    assert (result.prompt_tokens, result.blocks_reused, result.preemptions) == (200, 10, 1)
    assert second.first_scheduled_ns == stamp


def test_what_a_sequence_that_has_ended_should_have_written_in_a_step_that_was_not_launched_is_forgotten():
    """Its last token was read after the step was planned, and with it the block was full."""
    result = scheduler(15, reuse=True)
    ending = result.requests[1]
    first = result.schedule(in_flight=False)
    second = result.schedule(in_flight=True)
    assert first is not None and second is not None and (second.starts, second.lengths) == (15, 1)
    accept(result.table, first, np.array([5], np.int32))
    result.release(ending)
    assert result.abandon(second, []) == []
    assert result.kv_manager.pools[0].cached == 0, "position 15 was never written"
    assert result.kv_manager.pools[0].available == result.kv_manager.pools[0].num_blocks


def test_without_reuse_nothing_that_a_sequence_leaves_is_hashed():
    result = scheduler(40)
    ending = result.requests[1]
    assert result.schedule(in_flight=False) is not None
    result.release(ending)
    assert not ending.block_keys and result.kv_manager.pools[0].cached == 0


def test_a_sequence_that_leaves_gives_back_what_was_promised_to_it():
    config = EngineConfig(
        model_dir="", max_seq_len=256, max_input_len=255, batch_scheduler_policy="guaranteed_no_evict"
    )
    result = Scheduler(config, KVCacheManager([BlockPool(20)], 16, reuse=False))
    for handle in range(1, 4):
        result.submit(of_length(20, handle, max_new=100))
        assert result.schedule(in_flight=False) is not None
    assert (result.reserved_blocks, len(result.running)) == (12, 2)
    result.release(result.requests[1])
    assert result.reserved_blocks == 6
    assert result.schedule(in_flight=False) is not None and list(result.running) == [2, 3]


def test_stop_sequences_end_with_the_token_that_completes_them_and_none_before_the_prompts_end() -> None:
    """Of thousands one is looked at: the ones of all lengths that end with a token took 0.8 ms a token."""
    stops = [[], [3], [8, 9], [8, 9], [7, 8, 9], [5, 5, 5, 9], *([100 + n, n % 50, 11] for n in range(4000))]
    request = Request(1, np.array([7, 8], np.int32), SamplingParams(max_tokens=8, stop_sequences=stops), 8)
    found, longest = request.stops_backwards
    assert longest == 4 and len(found) == 4003 and found[0] == backwards(np.array([3]))
    assert backwards(np.array([7, 8, 9])) not in found, "8 9 has ended the sequence before"
    several = scheduler()
    several.submit(request)
    codes = []
    for token in (9, 104, 4, 11):  # 7 8 9 begins in the prompt, 104 4 11 is the answer's own
        plan = several.schedule(in_flight=False)
        assert plan is not None
        codes.append(accept(several.table, plan, np.array([token], np.int32)).codes.tolist())
    assert codes == [[RUNNING]] * 3 + [[FINISHED_STOP_WORDS]]


@settings(max_examples=examples(800), deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.sampled_from([1, 2, 300, 70_000]), max_size=4), max_size=6),
    st.lists(st.sampled_from([1, 2, 300, 70_000]), min_size=1, max_size=12),
    st.integers(0, 3),
)
def test_a_sequence_ends_with_any_stop_sequence(stops: list[list[int]], ids: list[int], start: int) -> None:
    request = Request(1, np.array([1], np.int32), SamplingParams(max_tokens=8, stop_sequences=stops), 8)
    counts = {"known": np.array([len(ids)]), "prompt_len": np.array([start])}
    table: Any = SimpleNamespace(requests=[request], tokens=np.array([ids], np.int32), **counts)
    said = ids[start:]
    expected = any(stop and said[-len(stop) :] == stop for stop in stops)
    assert outputs._ends_with_stop_sequence(table, 0) == expected
