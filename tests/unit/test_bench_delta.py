# SPDX-License-Identifier: Apache-2.0
"""The benchmark of delta nets, whose kernels are called and not launched."""

from pathlib import Path
from typing import Any

import pytest
from hopper_driver import use_hopper

from flashinfer_backend.worker import prebuild_triton


def test_each_step_has_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("triton")
    use_hopper(monkeypatch, tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "perf_configs" / "kernels")
    import bench_delta

    called = []

    def timed(call: Any, *_: Any) -> tuple[float, float]:
        called.append({kernel.__name__ for kernel, _ in prebuild_triton.collect(call)})
        return 100.0, 0.0

    monkeypatch.setattr(bench_delta, "DEVICE", "meta")
    monkeypatch.setattr(bench_delta, "timed", timed)
    monkeypatch.setattr(bench_delta, "require_cuda", lambda _: None)
    bench_delta.main(["--rows", "3", "--drafts", "2", "--prompts", "2x90", "--heads", "2/4"])
    lines = capsys.readouterr().out.splitlines()[4:]
    titles = [line.split(" | ")[1] for line in lines]
    assert titles == ["3 decode rows", "3 rows with 2 drafts", "2 prompts of 90"]
    copy, decodes, drafts, prompts = called
    assert not copy and decodes == drafts == {"_decode_rows"} and "_chunk_states" in prompts
    with pytest.raises(SystemExit):
        bench_delta.main(["--prompts", "2x0"])
