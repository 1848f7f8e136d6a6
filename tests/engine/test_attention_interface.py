# SPDX-License-Identifier: Apache-2.0
"""What an attention backend has to be, and how it is compared with plain torch while the engine runs:
CONTRIBUTING.md says how to add one."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import make_checkpoint
from engine.harness import make_prompts, serve, start_core
from flashinfer_backend.attention.batch import AttentionBatch
from flashinfer_backend.attention.contract import Prepared
from flashinfer_backend.attention.torch_paged import TorchPagedAttention
from flashinfer_backend.core.sampling_params import SamplingParams

PROMPTS = [[1, *range(10, 10 + n)] for n in (3, 40, 17)]


class OnlyStepAndRun:
    """All that a step which is launched operation by operation asks of attention."""

    def __init__(self, inner: TorchPagedAttention) -> None:
        self._inner, self.planned = inner, 0

    def step(self, batch: AttentionBatch) -> Prepared:
        assert (batch.q_lens[: batch.num_single] == 1).all() and (batch.kv_lens >= batch.q_lens).all()
        self.planned += 1
        self._inner.step(batch)
        return self

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        self._inner.run(layer, q, out)


def test_steps_without_graphs_need_step_and_run_alone(tmp_path: Path) -> None:
    params, produced = SamplingParams(max_tokens=8, temperature=0.0), []
    for name in ("torch", "own"):
        core = start_core(Path("bundled"), max_num_seqs=4, max_seq_len=128)
        if name == "own":
            core.runner.state.attention = OnlyStepAndRun(core.runner.state.attention)
        with serve(core, tmp_path / name) as client:
            produced.append(client.generate(PROMPTS, params))
    assert core.runner.state.attention.planned >= 8 and produced[0] == produced[1]


@pytest.mark.parametrize("wrong", [None, 1])
def test_errors_are_logged_by_layer(wrong: int | None, tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    """Of layers with and without a window; the second one's is wrong, or none's."""
    options = {"sliding_window": 21, "layer_types": ["sliding_attention", "full_attention"]}
    folder = make_checkpoint("qwen3", tmp_path / "model", use_sliding_window=True, **options)
    prompts, params = make_prompts(5), SamplingParams(max_tokens=4, temperature=0.0)
    plain = start_core(folder)
    with serve(plain, tmp_path / "plain") as client:
        expected = client.generate(prompts, params)
    core = start_core(folder, compare_attention=True)
    chosen = core.runner.state.attention._mixer

    class Broken:
        def __init__(self, prepared: Prepared) -> None:
            self._prepared = prepared

        def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
            self._prepared.run(layer, q, out)
            if layer == wrong:
                out.mul_(1.5)

    step = chosen.step
    monkeypatch.setattr(chosen, "step", lambda batch: Broken(step(batch)))
    with caplog.at_level(logging.INFO), serve(core, tmp_path / "compared") as client:
        found = client.generate(prompts, params)
    lines = [re.findall(r"by layer: (\S+) (\S+)", record.getMessage()) for record in caplog.records]
    errors = torch.tensor([[float(each) for each in line[0]] for line in lines if line])
    assert len(errors) and errors[:, 0].max() < 1e-6
    if wrong is None:
        assert errors.max() < 1e-6 and found == expected
    else:
        assert errors[:, 1].min() > 0.1
