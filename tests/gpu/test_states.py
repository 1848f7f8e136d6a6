# SPDX-License-Identifier: Apache-2.0
"""States of delta nets in an engine on a GPU, with its graphs: from snapshots, preempted, with drafts. Each
token is judged as in test_engine."""

from pathlib import Path

import pytest
from test_engine import SETTINGS, SIZES, make_prompts, shortfalls
from test_families import DELTA_NETS, LIMIT

from checkpoints import make_checkpoint
from engine.harness import serve, start_core
from engine.test_drafts import Replay
from flashinfer_backend.core.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(max_tokens=70, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3.5", tmp_path_factory.mktemp("states"), **(SIZES | DELTA_NETS))


def judge(folder: Path, produced: list[list[int]], prompts: list[list[int]]) -> None:
    short = shortfalls(folder, produced, prompts)
    assert (short == 0).float().mean() > 0.9, f"{(short > 0).sum()} of {len(short)} tokens are not the best"
    assert short.max() < LIMIT, f"a token is {short.max():.2f} below the best logit"


@pytest.mark.parametrize("blocks", [0, 1024])
def test_sequences_go_on_from_snapshots(folder: Path, tmp_path: Path, blocks: int) -> None:
    """A second turn of each. With few tokens in the cache some sequences are preempted."""
    core = start_core(folder, **SETTINGS, max_seq_len=512, max_tokens_in_paged_kv_cache=blocks)
    prompts = make_prompts(12)
    with serve(core, tmp_path) as client:
        first = client.generate(prompts, GREEDY)
        turns = [[*prompt, *answer, 9, 8] for prompt, answer in zip(prompts, first, strict=True)]
        before = core.scheduler.prompt_tokens_reused
        second = client.generate(turns, GREEDY)
    if not blocks:  # few blocks leave no snapshot of the first turn
        assert core.scheduler.prompt_tokens_reused > before
    assert bool(core.scheduler.preemptions) == bool(blocks)
    judge(folder, first, prompts)
    judge(folder, second, turns)


def test_drafts_enter_states_if_they_are_accepted(folder: Path, tmp_path: Path) -> None:
    prompts = make_prompts(12)
    with serve(start_core(folder, **SETTINGS), tmp_path / "plain") as client:
        plain = client.generate(prompts, GREEDY)
    proposer = Replay(3, 0.3)
    proposer.sequences = [prompt + answer for prompt, answer in zip(prompts, plain, strict=True)]
    # The proposer looks at tokens on the host, which no graph can hold.
    core = start_core(folder, **SETTINGS, proposer=proposer, cuda_graph_batch_sizes="none")
    with serve(core, tmp_path / "drafts") as client:
        judge(folder, client.generate(prompts, GREEDY), prompts)
    assert 0 < core.scheduler.accepted_tokens < core.scheduler.drafted_tokens


def test_n_gram_drafts_in_graphs(folder: Path, tmp_path: Path) -> None:
    prompts = [3 * prompt[:40] for prompt in make_prompts(12)]
    drafting = {"speculative_method": "ngram", "max_draft_len": 3, "min_matching_ngram_size": 1}
    core = start_core(folder, **SETTINGS, **drafting)
    with serve(core, tmp_path) as client:
        judge(folder, client.generate(prompts, GREEDY), prompts)
    assert core.scheduler.drafted_tokens
