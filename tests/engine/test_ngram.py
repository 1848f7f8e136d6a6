# SPDX-License-Identifier: Apache-2.0
"""Drafts from a sequence's own tokens, in a real engine: which ones, and that answers stay the same."""

from pathlib import Path
from typing import Any

import pytest

from engine.harness import Client, serve, shallow_model, start_core
from engine.ranks_in_threads import start_ranks
from flashinfer_backend.core.sampling_params import SamplingParams

REPEATS = [5 + i % 7 for i in range(24)]
PROMPTS = [[0, *range(40 + 5 * i, 64 + 5 * i), *REPEATS, 40 + 5 * i, 41 + 5 * i] for i in range(8)]
NGRAM = {"speculative_method": "ngram", "max_draft_len": 3}


def parameters(every_other: bool = False) -> list[SamplingParams]:
    """every_other: of the requests takes drafts, the others switch them off."""
    params = [
        SamplingParams(max_tokens=24 + i, temperature=0.3 * (i % 2), seed=i, end_id=-1) for i in range(8)
    ]
    params[2].repetition_penalty, params[5].log_probs = 1.2, True
    for each in params:
        each.perf_metrics = True
    for each in params[1::2] if every_other else ():
        each.speculative_decoding = False
    return params


def ends(client: Client) -> list[Any]:
    """The last metrics of each sequence, which have all of its drafts."""
    return [[r.perf for r in each if r.perf is not None][-1] for each in client.reports.values()]


def run(core: Any, tmp_path: Path) -> tuple[list[list[int]], Any]:
    with serve(core, tmp_path) as client:
        tokens = client.generate(PROMPTS, parameters())
        # What the prefix cache has of these is not fed, and looked up all the same.
        again = [prompt + found[:24] for prompt, found in zip(PROMPTS, tokens, strict=True)]
        tokens += client.generate(again, parameters())
        assert core.scheduler.prompt_tokens_reused or core.scheduler.preemptions
        status = client.loop.status()
        assert sum(perf.drafted_tokens for perf in ends(client)) == status.drafted_tokens
        assert sum(perf.accepted_tokens for perf in ends(client)) == status.accepted_tokens
    core.close()
    return tokens, core.scheduler


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The answers without drafts, which neither preemption nor chunks change."""
    tokens, scheduler = run(start_core(shallow_model(), max_num_seqs=4), tmp_path_factory.mktemp("without"))
    assert scheduler.drafted_tokens == 0
    return tokens


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_tokens_in_paged_kv_cache": 192, "max_num_tokens": 32, "max_num_tokens_while_decoding": 32},
        {"kv_cache_dtype": "fp8_e4m3", "quantization": "fp8"},
    ],
    ids=["plain", "preemption and chunks", "FP8"],
)
def test_answers_stay_the_same(settings: dict[str, Any], without: list[list[int]], tmp_path: Path) -> None:
    options = {"max_num_seqs": 4, "check_invariants": True, "max_seq_len": 192, **settings}
    expected = without
    if "quantization" in settings:
        expected, _ = run(start_core(shallow_model(), **options), tmp_path / "without")
    found, drafted = run(start_core(shallow_model(), **options, **NGRAM), tmp_path / "with")
    assert found == expected
    assert 0 < drafted.accepted_tokens < drafted.drafted_tokens
    assert "max_num_tokens" not in settings or drafted.preemptions


def test_requests_can_switch_drafts_off(without: list[list[int]], tmp_path: Path) -> None:
    off = [params.speculative_decoding for params in parameters(every_other=True)]
    core = start_core(shallow_model(), max_num_seqs=4, check_invariants=True, **NGRAM)
    with serve(core, tmp_path / "with") as client:
        assert client.generate(PROMPTS, parameters(every_other=True)) == without[: len(PROMPTS)]
        assert [bool(perf.drafted_tokens) for perf in ends(client)] == off
    core.close()


def test_a_least_length_keeps_no_drafts_away(tmp_path: Path) -> None:
    """As `client bench` asks for a number of tokens: by an end id that no token has; and with one that is a
    token's."""
    core = start_core(shallow_model(), max_num_seqs=4, check_invariants=True, **NGRAM)
    asked = {"max_tokens": 60, "min_tokens": 60, "perf_metrics": True}
    params = [SamplingParams(**asked, end_id=end_id) for end_id in (1 << 20, 1)]
    with serve(core, tmp_path) as client:
        assert [len(tokens) for tokens in client.generate(PROMPTS[:2], params)] == [60, 60]
        assert all(perf.drafted_tokens for perf in ends(client))
    core.close()


def test_ranks_draft_the_same(without: list[list[int]], tmp_path: Path, monkeypatch: Any) -> None:
    core = start_ranks(shallow_model(), 2, monkeypatch, max_num_seqs=4, **NGRAM)
    found, drafted = run(core, tmp_path / "with")
    assert found == without
    assert drafted.accepted_tokens
