# SPDX-License-Identifier: Apache-2.0
"""What an attention backend has to be: CONTRIBUTING.md says how to add one."""

from __future__ import annotations

import ast
from pathlib import Path

import torch

from engine.harness import serve, start_core
from flashinfer_backend import attention
from flashinfer_backend.attention.batch import AttentionBatch
from flashinfer_backend.attention.torch_paged import TorchPagedAttention
from flashinfer_backend.core.sampling_params import SamplingParams

PROMPTS = [[1, *range(10, 10 + n)] for n in (3, 40, 17)]


class OnlyPlanAndRun:
    """All that a step which is launched operation by operation asks of attention."""

    def __init__(self, inner: TorchPagedAttention) -> None:
        self._inner, self.planned = inner, 0

    def plan(self, batch: AttentionBatch) -> None:
        assert (batch.q_lens[: batch.num_single] == 1).all() and (batch.kv_lens >= batch.q_lens).all()
        self.planned += 1
        self._inner.plan(batch)

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        self._inner.run(layer, q, out)


def test_steps_without_graphs_need_plan_and_run_alone(tmp_path: Path) -> None:
    params, produced = SamplingParams(max_tokens=8, temperature=0.0), []
    for name in ("torch", "own"):
        core = start_core(Path("bundled"), max_num_seqs=4, max_seq_len=128)
        if name == "own":
            core.runner.state.attention = OnlyPlanAndRun(core.runner.state.attention)
        with serve(core, tmp_path / name) as client:
            produced.append(client.generate(PROMPTS, params))
    assert core.runner.state.attention.planned >= 8 and produced[0] == produced[1]


def signatures(file: str, name: str) -> dict[str, str]:
    """Of a class's methods. Read from its source: FlashInfer's imports Triton."""
    source = (Path(attention.__file__).parent / file).read_text(encoding="utf-8")
    (made,) = [n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == name]
    methods = [n for n in made.body if isinstance(n, ast.FunctionDef)]
    return {n.name: f"{ast.unparse(n.args)} -> {n.returns and ast.unparse(n.returns)}" for n in methods}


def test_backends_agree_on_the_interface() -> None:
    plain = signatures("torch_paged.py", "TorchPagedAttention")
    flashinfer = signatures("flashinfer_paged.py", "FlashInferAttention")
    assert all(plain[name] == flashinfer[name] for name in ("plan", "run"))
    assert {"graph_words", "graph_state", "step_graph_state"} <= set(flashinfer)  # what graphs ask for
