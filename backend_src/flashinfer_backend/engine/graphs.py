# SPDX-License-Identifier: Apache-2.0
"""Whole decode steps as CUDA graphs, one per number of rows.

A graph holds everything from the last tokens to the next ones, so that a step costs the host one
upload, the block-table update, one attention plan (which reads the block table) and one launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from flashinfer_backend.engine.staging import StagingRing
from flashinfer_backend.engine.step import AttentionBatch, StepPlan

if TYPE_CHECKING:
    from flashinfer_backend.engine.runner import Runner

COLUMNS = 6  # int32 values per row of a graph's input


def default_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of rows to capture: dense where steps are short, so that little is padded."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, 1025, 32)]
    return [size for size in sizes if size < max_num_seqs] + [min(max_num_seqs, 1024)]


class DecodeGraphs:
    """Captured decode steps; `replay` runs the smallest that fits."""

    def __init__(self, runner: Runner, staging: StagingRing, sizes: list[int]) -> None:
        self._runner = runner
        self._staging = staging
        self._sizes = sorted(set(sizes))
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._inputs: dict[int, torch.Tensor] = {}
        self._outputs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._attention: dict[int, Any] = {}
        pool = None
        for size in reversed(self._sizes):  # the largest first, so that the others fit its pool
            pool = self._capture(size, pool)

    @property
    def largest(self) -> int:
        return self._sizes[-1]

    def replay(self, plan: StepPlan, progress: Callable[[], None]) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch the step: (tokens int32 [rows], logits [rows, V]), valid until the next replay.
        `progress` is called once, when the device has it."""
        rows = plan.num_decode
        size = self._size(rows)
        self._staging.upload(self._columns(plan, size), self._inputs[size])
        self._runner.update_block_table(plan.table_updates)
        self._attention[size].plan(self._batch(plan.decode_slots, plan.decode_positions))
        self._graphs[size].replay()
        progress()  # the device begins when all of the graph is there
        tokens, logits = self._outputs[size]
        return tokens[:rows], logits[:rows]

    def graph(self, rows: int) -> torch.cuda.CUDAGraph:
        """The graph that runs steps of so many rows."""
        return self._graphs[self._size(rows)]

    def _size(self, rows: int) -> int:
        return self._sizes[int(np.searchsorted(self._sizes, rows))]

    def _columns(self, plan: StepPlan, size: int) -> list[np.ndarray]:
        """The graph's input: seeds [2 size], then four columns [size]; padding rows are inert."""
        padding = size - plan.num_decode

        def padded(column: np.ndarray, value: int, count: int = padding) -> list[np.ndarray]:
            return [column.view(np.int32), np.full(count, value, np.int32)]

        return [
            *padded(plan.seed, 0, 2 * padding),
            *padded(plan.decode_slots, self._runner.dummy_slot),
            *padded(plan.decode_positions, 0),
            *padded(plan.temperature, 0),
            *padded(plan.banned, -1),
        ]

    def _batch(self, slots: np.ndarray, positions: np.ndarray) -> AttentionBatch:
        return AttentionBatch(
            num_decode=len(slots),
            q_lens=np.ones(len(slots), np.int32),
            kv_lens=positions + 1,
            slots=slots,
            block_table=self._runner.block_table,
        )

    def _capture(self, size: int, pool: Any) -> Any:
        runner = self._runner
        none = np.empty(0, np.int32)
        empty = StepPlan(
            decode_slots=none,
            decode_positions=none,
            prefill_slots=none,
            prefill_starts=none,
            prefill_lens=none,
            prefill_tokens=none,
            prefill_samples=np.empty(0, bool),
            table_updates=np.empty((0, 3), np.int32),
            sample_slots=none,
            sample_epochs=np.empty(0, np.int64),
            temperature=np.empty(0, np.float32),
            seed=np.empty(0, np.uint64),
            banned=none,
        )
        self._inputs[size] = torch.empty(COLUMNS * size, dtype=torch.int32, device=runner.device)
        self._staging.upload(self._columns(empty, size), self._inputs[size])
        attention = runner.attention.graph_state(size)
        self._attention[size] = attention
        with torch.inference_mode():
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # warm-up outside the capture: lazy initialisation
                self._step(size)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._outputs[size] = self._step(size)
        self._graphs[size] = graph
        return graph.pool()

    def _step(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What is captured; reads only the static input and device state."""
        runner, data = self._runner, self._inputs[size]
        seed = data[: 2 * size].view(torch.int64)
        slots, positions, temperature, banned = data[2 * size :].split(size)
        input_ids, slot_mapping = runner.ops.decode_inputs(
            slots, positions, runner.last_token, runner.block_table, runner.page_size
        )
        hidden = runner.model(input_ids, positions, slot_mapping, runner.kv_caches, self._attention[size])
        logits = runner.model.logits(hidden)
        tokens = runner.ops.sample(
            logits,
            temperature.view(torch.float32),
            seed,
            positions + 1,
            banned,
            (runner.last_token, slots),
        )
        return tokens, logits
