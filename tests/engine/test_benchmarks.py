# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of engines, on a CPU: adapters, drafts from texts that repeat, and a drafter with the
accepted length that it is given."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from checkpoints import make_checkpoint
from engine.harness import fewer, serve, start_core
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.ops import torch_ops
from perf_configs import bench_adapters, bench_ngram, bench_speculation, repeating
from perf_configs.engine_start import engine_parameters
from perf_configs.replaying import make_replaying, share_kept


def test_adapters_are_measured_next_to_the_model_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_adapters, "PROMPT", 32)
    monkeypatch.setattr(bench_adapters, "WARM", 3)
    model, out = make_checkpoint("llama", tmp_path / "model"), tmp_path / "out.json"
    small = ["--adapters", "2", "--rank", "4", "--batches", "1,3", "--rounds", "1", "--steps", "2"]
    bench_adapters.main(["--model", str(model), "--set", "device=cpu", "--out", str(out), *small])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["batch"], row["case"]) for row in rows] == [
        (batch, case)
        for batch in (1, 3)
        for case in ("no room for adapters", "none asked for", "up to 2 adapters")
    ]
    assert all(row["step_ms"] > 0 for row in rows) and "| 3 | up to 2 adapters |" in capsys.readouterr().out


def test_answers_are_those_of_the_texts_and_drafts_repeat_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_ngram, "TEXTS", 2)
    sizes = {"num_hidden_layers": 1, "vocab_size": 2000, "max_position_embeddings": 2048}
    checkpoint = make_checkpoint("llama", tmp_path / "model", **sizes)
    settings = {"load_format": "dummy", "max_seq_len": 2048}
    settings |= {"max_draft_len": 4, "speculative_method": "ngram"}
    script, pieces = bench_ngram.Script(2, 2049, "cpu"), repeating.Pieces(2000)
    chosen = list(itertools.islice(repeating.texts("quotes"), 2))
    prompts, said = ([pieces.ids(text[part]) for text in chosen] for part in (0, 1))
    script.write([np.concatenate(pair) for pair in zip(prompts, said, strict=True)])
    params = [SamplingParams(max_tokens=len(said[seed]), temperature=0.0, seed=seed) for seed in range(2)]
    with script.replaces(torch_ops):
        core = start_core(checkpoint, max_num_seqs=2, **settings)
        with serve(core, tmp_path / "run") as client:
            found = client.generate([prompt.tolist() for prompt in prompts], params)
        assert found == [answer.tolist() for answer in said]
        core = start_core(checkpoint, max_num_seqs=2, **settings)
        edits, quotes, chats = (bench_ngram.measure(core, kind, 2, script) for kind in repeating.KINDS)
        core.close()
    assert edits["tokens_per_step"] > 2.5 and quotes["tokens_per_step"] > 1.5
    assert chats["accepted"] < 0.5 * chats["drafted"], chats


@pytest.mark.parametrize(
    ("kind", "head", "accepted"),
    [("llama", "eagle3", 1.0), ("llama", "eagle3", 2.5), ("llama", "none", 4.0), ("qwen3.5", "mtp", 2.5)],
)
def test_steps_keep_as_many_tokens_as_asked_for(kind: str, head: str, accepted: float, tmp_path: Path):
    checkpoint = make_checkpoint(kind, tmp_path / "target", initializer_range=0.02, **fewer(kind))
    core = start_core(checkpoint, load_format="dummy", make_proposer=make_replaying(3, accepted, head))
    length = 100
    with serve(core, tmp_path) as client:
        params = SamplingParams(max_tokens=length, temperature=0.0, end_id=-1)
        (found,) = client.generate([[5, 6, 7]], params)
        steps = client.loop.iteration
    assert len(set(found)) == length  # once round the vocabulary
    assert abs(length / steps - accepted) < 0.3


def test_a_share_of_right_drafts_gives_the_accepted_length():
    share = share_kept(3, 2.5)
    assert abs(1 + share + share**2 + share**3 - 2.5) < 1e-9
    with pytest.raises(ValueError, match="with 3 drafts, not"):
        share_kept(3, 4.5)


def test_the_benchmark_has_a_row_for_each_batch_and_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_speculation, "WARM", 2)
    monkeypatch.setattr(bench_speculation, "TOKENS", 24)
    options = {"num_hidden_layers": 2, "vocab_size": 2000, "max_position_embeddings": 512}
    checkpoint = make_checkpoint("llama", tmp_path / "target", **options)
    own = {"device": "cpu", "max_num_seqs": "2", "max_seq_len": "512"}
    parameters = engine_parameters(str(checkpoint), "dummy", own)
    rows = bench_speculation.measure("a", parameters, [1, 2], 1, lengths=[1.0, 2.0], rounds=1)
    assert [(row.batch, row.accepted) for row in rows] == [(1, 1.0), (1, 2.0), (2, 1.0), (2, 2.0)]
    assert [round(row.tokens_a_step) for row in rows] == [1, 2, 1, 2]
    assert {row.plain for row in rows if row.batch == 1} != {row.plain for row in rows if row.batch == 2}
    *lines, missed = bench_speculation.table(
        [row._replace(tokens_per_s=2 * row.plain) for row in rows]
    ).split("\n")
    assert len(lines) == 4 and "2.000" in lines[2] and missed == "no row misses what is required"
    slow = rows[1]._replace(accepted=2.5, tokens_per_s=1.89 * rows[1].plain)
    assert bench_speculation.table([slow]).endswith("a, 1 at 2.5: 1.890, required 1.9")
