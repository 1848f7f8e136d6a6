# SPDX-License-Identifier: Apache-2.0
"""What decode graphs are given, without a GPU: what rows share, context of timed steps, and ranks."""

from pathlib import Path
from typing import Any

import pytest

from engine.graphed import PROMPTS, replayed
from engine.harness import serve, shallow_model, start_core
from engine.ranks_in_threads import start_ranks
from flashinfer_backend.attention import prefixes as attention_prefixes
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.worker import graphs, prefixes
from replayed import ReplayedCapture


def test_steps_are_timed_behind_a_context(monkeypatch: Any) -> None:
    options = {"speculative_method": "ngram", "max_draft_len": 3, "max_seq_len": 1024, "tokens_per_block": 16}
    core = start_core(shallow_model(), **options)
    replayed(core.runner)
    lengths, seen = core.runner.state.lengths, []

    def timed(replay: Any) -> float:
        replay()
        seen.append(int(lengths[0]) - graphs.TIMED_CONTEXT)
        return 1.0

    monkeypatch.setattr(graphs, "replay_seconds", timed)
    costs = core.runner.graphs.step_seconds()
    assert all(1 <= kept <= 1 + count for kept, (_, count) in zip(seen, costs, strict=True))
    assert (8, 3) in costs and (2, 0) in costs and not lengths.any()


DOCUMENTS = [[0, *range(40 + 500 * i, 40 + 500 * i + 150 + 70 * i)] for i in range(3)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_that_share_prefixes_read_them_once(ranks: int, tmp_path: Path, monkeypatch: Any) -> None:
    """Sequences over three documents and over none come and go, some as several answers to one prompt."""
    monkeypatch.setattr(prefixes, "LEAST_SAVED", 1 << 18)
    monkeypatch.setattr(attention_prefixes, "_LEAST_PART", 64)
    prompts = [[*([*DOCUMENTS, [0]][i % 4]), *range(1600 + 9 * i, 1607 + 9 * i + i)] for i in range(26)]
    params = [
        SamplingParams(max_tokens=8 + 3 * (i % 5), temperature=0.7 * (i % 2), seed=2**40 + i)
        for i in range(len(prompts))
    ]
    settings = {"tokens_per_block": 16, "max_num_seqs": 16, "max_seq_len": 512, "max_num_tokens": 512}
    settings["read_shared_prefixes_once"] = True
    produced, runners = [], []

    def replace(runner: Any) -> None:
        runners.append((runner, replayed(runner, [4, 16])))

    for once in (False, True):
        if not once:
            core = start_core(shallow_model(), **settings)
        elif ranks == 1:
            replace((core := start_core(shallow_model(), **settings)).runner)
        else:
            core = start_ranks(shallow_model(), ranks, monkeypatch, replace, **settings)
        with serve(core, tmp_path / str(once)) as client:
            produced.append(client.generate(prompts, params))
            shared = [client.submit(prompts[0], each) for each in params[:1]]
            shared += [client.submit(prompts[0], each, shared[0]) for each in params[1:6]]
            client.wait(shared)
            produced[-1] += [client.tokens[i] for i in shared]
        core.close()
    assert produced[0] == produced[1]
    saved = [sum(own.saved for own in runner.state.attention.sharing_decodes) for runner, _ in runners]
    assert len(saved) == ranks and saved[0] == saved[-1] > 5000


def test_ranks_replay_the_same_and_one_of_them_keeps_logits(tmp_path: Path, monkeypatch: Any) -> None:
    prompts, params = PROMPTS[:6], [SamplingParams(max_tokens=8, temperature=0.7 * (i % 2)) for i in range(6)]
    params[2].frequency_penalty = 1.5
    graphs: dict[int, tuple[ReplayedCapture, Any]] = {}

    def replace(runner: Any) -> None:
        graphs[runner.state.model.spec.shard.rank] = replayed(runner), runner.graphs

    produced = []
    for core in (start_core(shallow_model()), start_ranks(shallow_model(), 2, monkeypatch, replace)):
        with serve(core, tmp_path / str(len(produced))) as client:
            produced.append(client.generate(prompts, params))
        core.close()
    assert produced[0] == produced[1]
    assert graphs[0][0].replays == graphs[1][0].replays > 5
    assert [len(graphs[rank][1]._logits) for rank in (0, 1)] == [8, 0]
