# SPDX-License-Identifier: Apache-2.0
"""What an attention backend has to be: CONTRIBUTING.md says how to add one."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.harness import serve, start_core
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
