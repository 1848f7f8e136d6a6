# SPDX-License-Identifier: Apache-2.0
"""Whole decode steps as CUDA graphs, one per number of rows.

A graph holds everything from the last tokens to the next ones, so that a step costs the host one
upload and one launch.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, NamedTuple

import numpy as np
import torch

from flashinfer_backend.attention.batch import AttentionBatch
from flashinfer_backend.core.step import StepPlan
from flashinfer_backend.worker.capture import GraphCapture
from flashinfer_backend.worker.device_state import DeviceState

COLUMNS = 6  # int32 words per row of a graph's input, beside attention's


def default_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of rows to capture: dense where steps are short, so that little is padded. Not 40: on an H200
    such a step takes longer than one of 48."""
    sizes = [1, 2, 4, 8, 16, 24, 32, *range(48, 256, 8), *range(256, 512, 16), *range(512, 1025, 32)]
    return [size for size in sizes if size < max_num_seqs] + [min(max_num_seqs, 1024)]


class _Captured(NamedTuple):
    """A graph, what it reads (int32: attention's words, then COLUMNS a row) and what it writes."""

    graph: torch.cuda.CUDAGraph
    inputs: torch.Tensor
    attention: Any
    tokens: torch.Tensor
    logits: torch.Tensor


class DecodeGraphs:
    """Captured decode steps; `replay` runs the smallest that fits."""

    def __init__(self, state: DeviceState, sizes: list[int], capture: GraphCapture) -> None:
        self._state = state
        self._sizes = sorted(set(sizes))
        self._ones = np.ones(self._sizes[-1], np.int32)
        # Inert rows: dummy slot, no new block, temperature 0, nothing suppressed.
        self._padding = np.array([[state.dummy_slot], [-1], [0], [-1]], np.int32)
        self._opened = np.full(state.dummy_slot + 1, -1, np.int32)  # by slot; scratch of _upload
        # One for all sizes: a step's logits are used up before the next step. Rank 0 alone gets any.
        model = state.model
        shape = (0 if model.collectives.shard.rank else self._sizes[-1], model.spec.vocab_size)
        self._logits = torch.empty(shape, dtype=model.dtype, device=state.device)
        # The largest first, so that the others fit its memory.
        self._captured = {size: self._capture(size, capture) for size in reversed(self._sizes)}

    @property
    def largest(self) -> int:
        return self._sizes[-1]

    def replay(self, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch the step: tokens int32 [rows] and rank 0's logits [rows and padding, V], valid until the
        next replay."""
        captured = self._captured[self._size(plan.num_rows)]
        if not captured.attention.reads_block_table:  # else the graph's own entry is early enough
            self._state.update_block_table(plan)
        self._upload(plan, captured.inputs, captured.attention)
        captured.graph.replay()
        return captured.tokens[: plan.num_rows], captured.logits

    def graph(self, rows: int) -> torch.cuda.CUDAGraph:
        """The graph that runs steps of so many rows."""
        return self._captured[self._size(rows)].graph

    def _size(self, rows: int) -> int:
        return self._sizes[bisect_left(self._sizes, rows)]

    def _upload(self, plan: StepPlan, inputs: torch.Tensor, attention: Any) -> None:
        """Give a graph its step: attention's words, seeds [2 size], then COLUMNS - 2 columns [size]."""
        rows, size = plan.num_rows, attention.bucket
        words = self._state.staging.begin(len(inputs))
        own = len(words) - COLUMNS * size
        seed = words[own : own + 2 * size].view(np.uint64)
        seed[:rows], seed[rows:] = plan.seed, 0
        columns = words[own + 2 * size :].reshape(COLUMNS - 2, size)
        slots, blocks, temperature, suppressed = columns
        slots[:rows] = plan.slots
        updates, opened = plan.block_updates, self._opened
        opened[updates[:, 1]] = updates[:, 3]
        blocks[:rows] = opened[plan.slots]
        opened[updates[:, 1]] = -1
        temperature[:rows] = plan.temperature.view(np.int32)
        suppressed[:rows] = plan.suppressed
        columns[:, rows:] = self._padding
        kv_lens = self._ones[:size].copy()
        kv_lens[:rows] += plan.starts
        batch = AttentionBatch(
            q_lens=self._ones[:size],
            kv_lens=kv_lens,
            slots=slots,
            block_table=self._state.block_table,
        )
        attention.plan(batch, words[:own])
        self._state.staging.send(inputs)

    def _capture(self, size: int, capture: GraphCapture) -> _Captured:
        state, none = self._state, np.empty(0, np.int32)
        empty = StepPlan(
            slots=none,
            starts=none,
            lengths=none,
            feeds=np.empty(0, np.int8),
            wants=np.empty(0, np.int8),
            tokens=none,
            epochs=np.empty(0, np.int64),
            temperature=np.empty(0, np.float32),
            seed=np.empty(0, np.uint64),
            suppressed=none,
        )
        own = state.attention.graph_words(size)
        inputs = torch.empty(own + COLUMNS * size, dtype=torch.int32, device=state.device)
        attention = state.attention.graph_state(size, state.block_table, inputs[:own])
        self._upload(empty, inputs, attention)
        graph, tokens = capture(lambda: self._step(inputs[own:], attention, size))
        capture.sizes += 1
        return _Captured(graph, inputs, attention, tokens, self._logits[:size])

    def _step(self, data: torch.Tensor, attention: Any, size: int) -> torch.Tensor:
        """What is captured: tokens int32 [size], their logits in self._logits. Reads only the static input
        and device state."""
        state = self._state
        seed = data[: 2 * size].view(torch.int64)
        slots, blocks, temperature, suppressed = data[2 * size :].split(size)
        input_ids, positions, cache_locations = state.ops.step_inputs(
            slots, state.last_token, state.lengths, state.block_table, state.block_size, blocks
        )
        hidden = state.model(input_ids, positions, cache_locations, state.kv_cache.layers, attention)
        logits = state.model.logits(hidden, self._logits[:size])
        collectives = state.model.collectives
        if collectives.shard.rank:
            tokens = collectives.broadcast(torch.empty_like(slots))
            state.last_token[slots] = tokens
            return tokens
        tokens = state.ops.sample(
            logits,
            temperature.view(torch.float32),
            seed,
            positions + 1,
            suppressed,
            (state.last_token, slots),
        )
        return collectives.broadcast(tokens)
