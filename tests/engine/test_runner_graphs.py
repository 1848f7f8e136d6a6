# SPDX-License-Identifier: Apache-2.0
"""A runner with all of its graphs, on a CPU: decode steps, steps with prompts as one graph and in pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.harness import serve, start_core
from engine.test_graph_steps import PROMPTS, ItemAttention
from flashinfer_backend.attention import split
from flashinfer_backend.attention.batch import AttentionBatch
from flashinfer_backend.attention.contract import Captured, Prepared, StepShape
from flashinfer_backend.attention.torch_paged import TorchPagedAttention
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.worker import graphs, runner
from flashinfer_backend.worker.device_state import DeviceState
from replayed import ReplayedCapture


class PlannedAttention:
    """Of steps with one prompt; those with more run in pieces."""

    reads_block_table = False

    def __init__(self, state: DeviceState) -> None:
        self._attention = TorchPagedAttention(state.kv_cache, state.model.spec.attention.heads)
        self.taken = self.refused = 0

    def plan(self, batch: AttentionBatch, host: np.ndarray) -> bool:
        takes = len(batch.slots) - batch.num_single == 1
        self.taken, self.refused = self.taken + takes, self.refused + (not takes)
        if takes:
            self._attention.step(batch)
        return takes

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        self._attention.run(layer, q, out)


class GraphedAttention:
    """Plain torch where a step is launched layer by layer."""

    def __init__(self, state: DeviceState) -> None:
        self._state, self._plain = state, state.attention
        self.planned: list[PlannedAttention] = []

    def step(self, batch: AttentionBatch) -> Prepared:
        return self._plain.step(batch)

    def graph_words(self, shape: StepShape) -> int:
        heads = self._state.model.spec.attention.kv_heads
        return split.max_items(shape.rows, heads, False) * split.ITEM_WORDS

    def captured(self, shape: StepShape, block_table: torch.Tensor, words: torch.Tensor) -> Captured:
        if shape.feeds_per_row is not None:
            return ItemAttention(self._state, shape.rows, words)
        self.planned.append(PlannedAttention(self._state))
        return self.planned[-1]


def test_a_runner_with_graphs_gives_the_tokens_of_one_without(tmp_path: Path, monkeypatch: Any) -> None:
    captures: list[ReplayedCapture] = []

    def capture() -> ReplayedCapture:
        captures.append(ReplayedCapture())
        return captures[-1]

    monkeypatch.setattr(runner, "GraphCapture", capture)
    for module in (runner, graphs):
        monkeypatch.setattr(module, "MIXED_SIZES", [8, 16, 32, 48])  # of up to 64 tokens of a step
    monkeypatch.setattr(graphs.MixedGraphs, "_layer_seconds", lambda _, size: float(size))
    params = [SamplingParams(max_tokens=20 + 4 * i, temperature=0.7 * (i % 2), seed=i) for i in range(12)]
    produced = []
    for name in ("without", "graphs"):
        core = start_core(Path("bundled"), tokens_per_block=16, max_num_seqs=8)
        if name == "graphs":
            attention = core.runner.state.attention = GraphedAttention(core.runner.state)
            core.runner.capture_graphs([2, 4, 8])
        with serve(core, tmp_path / name) as client:
            produced.append(client.generate(PROMPTS, params))
    assert captures[0].replays > 50
    assert sum(each.taken for each in attention.planned) and sum(each.refused for each in attention.planned)
    assert produced[0] == produced[1]
