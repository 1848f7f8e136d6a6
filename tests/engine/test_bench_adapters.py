# SPDX-License-Identifier: Apache-2.0
"""The benchmark of adapters, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from checkpoints import make_checkpoint
from perf_configs import bench_adapters


def test_adapters_are_measured_next_to_the_model_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
