# SPDX-License-Identifier: Apache-2.0
"""Layers that keep states through the whole engine, against transformers: what sequences begin from."""

from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import make_checkpoint
from engine.graphed import replayed
from engine.harness import serve, start_core
from engine.test_drafts import Replay
from engine.test_generate import reference
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.engine.start import Core

BLOCK, APART = 16, 64  # tokens of a block, and between two snapshots
LONG = 20  # tokens of an answer: more than a block has
GREEDY = SamplingParams(max_tokens=LONG, temperature=0.0)
SETTINGS = {"max_num_seqs": 4, "check_invariants": True, "tokens_per_block": BLOCK}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3.5", tmp_path_factory.mktemp("states"))


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, 250, (count,), generator=torch.manual_seed(seed)).tolist()


def start(folder: Path, **settings: Any) -> Core:
    return start_core(folder, **SETTINGS | settings)


def reused(core: Core, before: int = 0) -> int:
    return core.scheduler.prompt_tokens_reused - before


def test_a_chat_goes_on_from_its_last_turn(folder: Path, tmp_path: Path) -> None:
    """The state was kept behind the prompt, and each 64 tokens of the answer."""
    core, prompt = start(folder), tokens(75, seed=1)
    longer = SamplingParams(max_tokens=60, temperature=0.0)
    with serve(core, tmp_path) as client:
        (answer,) = client.generate([prompt], longer)
        assert [answer[:LONG]] == reference(folder, [prompt], [answer], LONG)
        status = client.loop.status()
        assert (status.snapshots, status.snapshots_cached) == (8, 2)
        (again,) = client.generate([prompt], longer)
        assert again == answer and reused(core) == 64
        turn = prompt + answer + [9, 8]
        answers = client.generate([turn], GREEDY)
        assert answers == reference(folder, [turn], answers, LONG)
        assert reused(core, 64) == 128
        without = prompt + [7] + answer[:30]  # an answer that the client has changed
        answers = client.generate([without], GREEDY)
        assert answers == reference(folder, [without], answers, LONG)
        assert reused(core, 64 + 128) == 64


@pytest.mark.parametrize(
    ("limit", "chunked", "steps"),
    [(512, True, [1, 1, 1]), (96, True, [1, 2, 2]), (60, True, [3, 2, 4]), (512, False, [1, 1, 1])],
)
def test_a_state_is_kept_within_a_step(
    folder: Path, tmp_path: Path, limit: int, chunked: bool, steps: list[int]
) -> None:
    """Fewer than 16 tokens before it have a step of their own."""
    limits = {"max_num_tokens": limit, "max_num_tokens_while_decoding": limit, "max_seq_len": 256}
    core = start(folder, enable_chunked_context=chunked, **limits)
    prompts = [tokens(count, seed=count) for count in (75, 100, 143)]
    once = SamplingParams(max_tokens=1, temperature=0.0)
    with serve(core, tmp_path) as client:
        found = []
        for prompt in prompts:
            before = client.loop.iteration
            answers = client.generate([prompt], once)
            found.append(client.loop.iteration - before)
            assert answers == [each[:1] for each in reference(folder, [prompt], answers)]
        assert found == steps
        turns = [[*prompt, 7, 8] for prompt in prompts]
        answers = client.generate(turns, GREEDY)
        assert answers == reference(folder, turns, answers, LONG)
        assert reused(core) == 64 + 96 + 128


def test_prompts_that_part_within_another_keep_a_state_there(folder: Path, tmp_path: Path) -> None:
    """The first has one behind its end alone. The second finds its blocks, but no state, and keeps one; the
    third begins there."""
    core, system = start(folder), tokens(100, seed=2)
    prompts = [system + tokens(40, seed=seed) for seed in (3, 4, 5)]
    answers, found = [], []
    with serve(core, tmp_path) as client:
        for prompt in prompts:
            before = reused(core)
            answers += client.generate([prompt], GREEDY)
            found.append(reused(core, before))
    assert found == [0, 0, 96]
    assert answers == reference(folder, prompts, answers, LONG)


def test_the_least_recently_used_snapshots_go(folder: Path, tmp_path: Path) -> None:
    """There are twice as many as slots."""
    core = start(folder)
    pool = core.scheduler.kv_manager.snapshots
    assert pool is not None and pool.num_blocks == core.runner.state.snapshots == 8
    prompts = [tokens(70, seed=seed) for seed in range(10)]
    once = SamplingParams(max_tokens=1, temperature=0.0)
    with serve(core, tmp_path) as client:
        for prompt in prompts:
            client.generate([prompt], once)
        for prompt, tokens_found in zip(reversed(prompts), [64] * 8 + [0, 0], strict=True):
            before = reused(core)
            client.generate([prompt], once)
            assert reused(core, before) == tokens_found
        answers = client.generate(prompts[:4], GREEDY)
    assert answers == reference(folder, prompts[:4], answers, LONG)


def test_answers_that_are_written_leave_half_of_the_snapshots(folder: Path, tmp_path: Path) -> None:
    core = start(folder, max_num_seqs=8, check_invariants=False)
    pool = core.scheduler.kv_manager.snapshots
    assert pool is not None and pool.num_blocks == 16
    held = []
    save = core.scheduler._save_generated

    def noting(slot: int, count: int) -> None:
        save(slot, count)
        held.append(pool.num_blocks - pool.available)

    core.scheduler._save_generated = noting  # type: ignore[method-assign]
    pool.allocate(5)  # as if they were held
    with serve(core, tmp_path) as client:
        client.generate([tokens(10 + seed, seed) for seed in range(8)], SamplingParams(max_tokens=90))
    assert max(held) == 8


def test_sequences_of_one_request_begin_with_the_first_ones_state(folder: Path, tmp_path: Path) -> None:
    """Without reuse as well; no other request finds it then."""
    core, prompt = start(folder, enable_kv_cache_reuse=False, max_num_seqs=8), tokens(90, seed=6)
    with serve(core, tmp_path) as client:
        first = client.submit(prompt, GREEDY)
        ids = [first, *(client.submit(prompt, GREEDY, share_with=first) for _ in range(2))]
        client.wait(ids)
        before = reused(core)
        answers = [*(client.tokens[i] for i in ids), *client.generate([prompt], GREEDY)]
        assert reused(core, before) == 0
    assert answers == reference(folder, [prompt], answers[:1], LONG) * 4


def test_a_preempted_sequence_goes_on_from_a_snapshot(folder: Path, tmp_path: Path) -> None:
    """Of its answer: its prompt is shorter than what lies between two."""
    few = {"max_tokens_in_paged_kv_cache": 256, "max_seq_len": 160}
    core, prompts = start(folder, **few), [tokens(40, seed=seed) for seed in range(8, 12)]
    long = SamplingParams(max_tokens=100, temperature=0.0)
    with serve(start(folder), tmp_path / "room") as client:
        expected = client.generate(prompts, long)
    blocks = core.scheduler.blocks_reused
    with serve(core, tmp_path / "few") as client:
        assert client.generate(prompts, long) == expected
    assert core.scheduler.preemptions and core.scheduler.blocks_reused > blocks
    assert [each[:LONG] for each in expected] == reference(folder, prompts, expected, LONG)


@pytest.mark.parametrize(("spoilt", "graphs"), [(0.3, False), (0.5, True)])
def test_accepted_drafts_enter_the_state_and_rejected_ones_do_not(
    folder: Path, tmp_path: Path, spoilt: float, graphs: bool
) -> None:
    """Next to prompts in chunks, preempted, and from prefixes, which end behind a prompt then."""
    limits = {"max_num_tokens": 33, "max_num_tokens_while_decoding": 33}
    prompts = [tokens(30 + 15 * seed, seed=seed) for seed in range(6)]
    with serve(start(folder), tmp_path / "plain") as client:
        expected = client.generate(prompts, GREEDY)
    assert expected == reference(folder, prompts, expected, LONG)
    sequences = [prompt + answer for prompt, answer in zip(prompts, expected, strict=True)]
    proposer = Replay(3, spoilt, sequences)
    few = {"max_tokens_in_paged_kv_cache": 288, "max_seq_len": 192}
    core = start(folder, proposer=proposer, **limits, **few)
    capture = replayed(core.runner) if graphs else None
    with serve(core, tmp_path / "drafts") as client:
        assert client.generate(prompts, GREEDY) == expected
        before = reused(core)
        assert client.generate(prompts[-2:], GREEDY) == expected[-2:]
        assert reused(core, before) >= 64
    scheduler = core.scheduler
    assert 0 < scheduler.accepted_tokens < scheduler.drafted_tokens and scheduler.preemptions
    assert capture is None or capture.replays > 20
