# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' drafter has the accepted length that it is given, and the benchmark of it shows that."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoints import make_checkpoint
from engine.harness import serve, start_core
from flashinfer_backend.core.sampling_params import SamplingParams
from perf_configs import bench_speculation
from perf_configs.engine_start import engine_parameters
from perf_configs.replaying import make_replaying, share_kept


@pytest.mark.parametrize("accepted", [1.0, 2.5, 4.0])
def test_steps_keep_as_many_tokens_as_asked_for(accepted: float, tmp_path: Path):
    checkpoint = make_checkpoint("llama", tmp_path / "target", initializer_range=0.02)
    core = start_core(checkpoint, load_format="dummy", make_proposer=make_replaying(3, accepted))
    length = 200
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
    monkeypatch.setattr(bench_speculation, "TOKENS", 40)
    options = {"num_hidden_layers": 3, "vocab_size": 2000, "max_position_embeddings": 512}
    checkpoint = make_checkpoint("llama", tmp_path / "target", **options)
    own = {"device": "cpu", "max_num_seqs": "2", "max_seq_len": "512"}
    rows = bench_speculation.measure("a", engine_parameters(str(checkpoint), "dummy", own), [1, 2], 1)
    assert [(row.batch, row.accepted) for row in rows] == [(1, 1.0), (1, 2.0), (2, 1.0), (2, 2.0)]
    assert [round(row.tokens_a_step) for row in rows] == [1, 2, 1, 2]
    assert {row.plain for row in rows if row.batch == 1} != {row.plain for row in rows if row.batch == 2}
    *lines, missed = bench_speculation.table(
        [row._replace(tokens_per_s=2 * row.plain) for row in rows]
    ).split("\n")
    assert len(lines) == 4 and "2.000" in lines[2] and missed == "no row misses what is required"
    slow = rows[1]._replace(accepted=2.5, tokens_per_s=1.89 * rows[1].plain)
    assert bench_speculation.table([slow]).endswith("a, 1 at 2.5: 1.890, required 1.9")
