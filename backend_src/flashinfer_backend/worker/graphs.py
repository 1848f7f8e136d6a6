# SPDX-License-Identifier: Apache-2.0
"""Steps as CUDA graphs.

Steps of decode rows alone are whole graphs (DecodeGraphs), one per number of rows: a graph holds everything
from the last tokens to the next ones, so that a step costs the host one upload and one launch.

Mixed steps of few tokens have one or two graphs per number of tokens (MixedGraphs). A step with prompts has
attention of a new shape each time, but its other operations depend only on the number of tokens. Launched one
by one they cost the host about 10 ms, more than the device needs for a short prompt. Steps are padded to a
captured number of tokens. Where attention can be captured too (StepGraphState: FA3 and the Triton kernel read
what changes from the device), the step is one full graph. Else it goes layer by layer, and what lies between
two attention calls is a graph: from the embedding to the first query, from one layer's attention to the next
layer's query. After the last attention only the tokens go on whose logits are wanted, outside any graph.

More padding can be faster: a matrix product of 448 tokens may take longer than one of 512. So each number of
tokens is timed once it is captured, and a step takes the fastest that holds it.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from flashinfer_backend.attention.batch import AttentionBatch
from flashinfer_backend.attention.contract import Captured, Prepared, StepShape
from flashinfer_backend.core.step import StepPlan
from flashinfer_backend.models.spec import Experts
from flashinfer_backend.models.transformer import Taps
from flashinfer_backend.worker.device_state import DeviceState

T = TypeVar("T")

COLUMNS = 5  # int32 words per row of a graph's input, beside attention's and a block of each cache group
# Numbers of tokens of mixed steps. Beyond the last one the device takes longer than the host, so nothing is
# gained. Padding costs about 3 % of a step for 16 tokens of 256, so they are dense.
MIXED_SIZES = [8, 16, 24, 32, 48, *range(64, 512, 16), *range(512, 1025, 32)]
TIMED_REPLAYS = 10


class GraphCapture:
    """Each stream that graphs are captured on brings workspaces of cuBLAS, so there is one. Graphs share a
    pool of memory: they replay one after another, and what one computes is used up before the next."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        self.sizes = 0  # of steps by now, each of one or more graphs; for whoever waits

    def __call__(
        self, work: Callable[[], T], warm_up: Callable[[], object] | None = None
    ) -> tuple[torch.cuda.CUDAGraph, T]:
        """A graph of what `work` launches, and what it returns. `warm_up` (or `work`) is run before, outside
        the capture, for what is initialised at first use."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            (warm_up or work)()
            self._stream.synchronize()
            graph.capture_begin(pool=self._pool)
            result = work()
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph, result


def default_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of rows to capture: dense where steps are short, so that little is padded. Not 40: on an H200
    such a step takes longer than one of 48."""
    sizes = [1, 2, 4, 8, 16, 24, 32, *range(48, 256, 8), *range(256, 512, 16), *range(512, 1025, 32)]
    return [size for size in sizes if size < max_num_seqs] + [min(max_num_seqs, 1024)]


class DecodeStep(NamedTuple):
    """A graph, what it reads (int32: attention's words, then COLUMNS a row) and what it writes."""

    graph: torch.cuda.CUDAGraph
    inputs: torch.Tensor
    attention: Captured
    tokens: torch.Tensor
    logits: torch.Tensor


class DecodeGraphs:
    """Captured decode steps; `replay` runs the smallest that fits."""

    def __init__(self, state: DeviceState, sizes: list[int], capture: GraphCapture) -> None:
        self._state = state
        self._sizes = sorted(set(sizes))
        self._ones = np.ones(self._sizes[-1], np.int32)
        groups = len(state.groups)
        self._columns = COLUMNS + groups
        # Inert rows: dummy slot, no new blocks, temperature 0, nothing suppressed.
        self._padding = np.array([[state.dummy_slot], *[[-1]] * groups, [0], [-1]], np.int32)
        self._opened = np.full((groups, state.dummy_slot + 1), -1, np.int32)  # scratch of _upload
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
        size = self._size(plan.num_rows)
        captured = self._captured[size]
        if not captured.attention.reads_block_table:  # else the graph's own entry is early enough
            self._state.update_block_table(plan)
        self._upload(plan, size, captured.inputs, captured.attention)
        captured.graph.replay()
        return captured.tokens[: plan.num_rows], captured.logits

    def graph(self, rows: int) -> torch.cuda.CUDAGraph:
        """The graph that runs steps of so many rows."""
        return self._captured[self._size(rows)].graph

    def _size(self, rows: int) -> int:
        return self._sizes[bisect_left(self._sizes, rows)]

    def _upload(self, plan: StepPlan, size: int, inputs: torch.Tensor, attention: Captured) -> None:
        """Give a graph its step: attention's words, seeds [2 size], then the other columns [size]."""
        rows = plan.num_rows
        words = self._state.staging.begin(len(inputs))
        own = len(words) - self._columns * size
        seed = words[own : own + 2 * size].view(np.uint64)
        seed[:rows], seed[rows:] = plan.seed, 0
        columns = words[own + 2 * size :].reshape(self._columns - 2, size)
        slots, temperature, suppressed = columns[0], columns[-2], columns[-1]
        slots[:rows] = plan.slots
        (group, slot, _, block), opened = plan.block_updates.T, self._opened
        opened[group, slot] = block
        columns[1:-2, :rows] = opened[:, plan.slots]
        opened[group, slot] = -1
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
        if not attention.plan(batch, words[:own]):
            raise RuntimeError(f"attention cannot run a step of {size} decode rows in its graph")
        self._state.staging.send(inputs)

    def _capture(self, size: int, capture: GraphCapture) -> DecodeStep:
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
        shape = StepShape(size, size, 1)
        own = state.attention.graph_words(shape)
        inputs = torch.empty(own + self._columns * size, dtype=torch.int32, device=state.device)
        attention = state.attention.captured(shape, state.block_table, inputs[:own])
        if attention is None:
            raise ValueError("this attention cannot be captured: set cuda_graph_batch_sizes to none")
        self._upload(empty, size, inputs, attention)
        graph, tokens = capture(lambda: self._step(inputs[own:], attention, size))
        capture.sizes += 1
        return DecodeStep(graph, inputs, attention, tokens, self._logits[:size])

    def _step(self, data: torch.Tensor, attention: Captured, size: int) -> torch.Tensor:
        """What is captured: tokens int32 [size], their logits in self._logits. Reads only the static input
        and device state."""
        state = self._state
        seed = data[: 2 * size].view(torch.int64)
        columns = data[2 * size :].view(-1, size)
        slots, temperature, suppressed = columns[0], columns[-2], columns[-1]
        input_ids, positions, locations = state.decode_inputs(slots, columns[1:-2])
        cache_locations = state.by_layer(locations)
        hidden = state.model(input_ids, positions, cache_locations, state.kv_layers, attention)
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


class FullStep(NamedTuple):
    """A captured step, attention and all: `decode_rows` is the most decode rows of a step that it serves,
    `hidden` the residual stream at the last attention."""

    decode_rows: int
    graph: torch.cuda.CUDAGraph
    attention: Captured
    hidden: torch.Tensor


class MixedGraphs:
    """Captured steps by number of tokens, over one set of static tensors."""

    def __init__(self, state: DeviceState, capture: GraphCapture) -> None:
        self._state, self._model = state, state.model
        model, attention, block_table = state.model, state.attention, state.block_table
        self.largest = MIXED_SIZES[-1]
        heads, device = model.spec.attention, model.device
        # Ids, positions, and cache locations in each cache group.
        self._inputs = torch.zeros((2 + len(state.groups), self.largest), dtype=torch.int32, device=device)
        shape = (self.largest, heads.heads, heads.head_dim)
        self._q = torch.zeros(shape, dtype=model.dtype, device=device)
        # Rows of padding are never written: they must not hold NaN.
        self._attended = torch.zeros(shape, dtype=model.dtype, device=device)
        self._taps = state.taps(self.largest)
        self._no_words = torch.empty(0, dtype=torch.int32, device=device)
        self._graphs: dict[int, list[torch.cuda.CUDAGraph]] = {}
        self._hidden: dict[int, torch.Tensor] = {}
        self._full: dict[int, list[FullStep]] = {}
        self._capture_graph = capture
        with torch.inference_mode():
            for size in reversed(MIXED_SIZES):  # the largest first, so that the others fit its memory
                self._capture(size)
                most = min(size, block_table.shape[0] - 1)
                # Few decode rows are cut up otherwise than many.
                for rows in sorted({min(64, most), most}):
                    steps = StepShape(size, rows, None)
                    self._capture_full(size, attention.captured(steps, block_table, self._no_words), rows)
                capture.sizes += 1
        # All ranks must pad to the same sizes.
        times = model.collectives.agreed([self._layer_seconds(size) for size in MIXED_SIZES])
        self._best = fastest_sizes(MIXED_SIZES, times)

    def padded(self, tokens: int) -> int:
        """The number of tokens to run a step of `tokens` with."""
        return self._best[bisect_left(MIXED_SIZES, tokens)] if tokens <= self.largest else tokens

    def plan_full(self, size: int, batch: AttentionBatch) -> FullStep | None:
        """The full graph of a step of `size` tokens (padding included), its attention planned; None where
        the step must run piecewise."""
        for full in self._full.get(size, ()):
            if batch.num_single <= full.decode_rows:
                return full if full.attention.plan(batch, np.empty(0, np.int32)) else None
        return None

    def run_full(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        cache_locations: torch.Tensor,
        full: FullStep,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """As `run`, of a step that plan_full has planned."""
        self._copy(input_ids, positions, cache_locations)
        full.graph.replay()
        return self._model.finish(self._attended[: len(input_ids)], full.hidden, rows)

    def run(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        cache_locations: torch.Tensor,
        tokens: int,
        attention: Prepared,
        rows: torch.Tensor | None,
        between_layers: Callable[[], object],
    ) -> torch.Tensor:
        """As Transformer.forward over inputs int32 [padded size] of which `tokens` are real; padding must lie
        in the dummy block."""
        size = input_ids.shape[0]
        self._copy(input_ids, positions, cache_locations)
        q, attended = self._q[:tokens], self._attended[:tokens]
        for layer, graph in enumerate(self._graphs[size]):
            graph.replay()
            attention.run(layer, q, attended)
            between_layers()
        return self._model.finish(self._attended[:size], self._hidden[size], rows)

    def taps(self, size: int) -> Taps | None:
        """The outputs that a proposer takes of the last step, of `size` tokens; None where it takes none."""
        return None if self._taps is None else self._taps._replace(out=self._taps.out[:size])

    def _copy(self, ids: torch.Tensor, positions: torch.Tensor, locations: torch.Tensor) -> None:
        tokens = len(ids)
        self._inputs[0, :tokens].copy_(ids)
        self._inputs[1, :tokens].copy_(positions)
        self._inputs[2:, :tokens].copy_(locations.view(-1, tokens))

    def _layer_seconds(self, size: int) -> float:
        """Median time of the piece between two layers' attention."""
        *before, graph = self._graphs[size]
        if isinstance(self._model.spec.mlp, Experts):
            # Tokens that differ, as in a step: which experts they have decides how long it takes.
            with torch.inference_mode():
                self._inputs[0, :size] = torch.arange(size) % self._model.spec.vocab_size
            for each in before:
                each.replay()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(TIMED_REPLAYS + 1)]
        graph.replay()
        for event in events[:-1]:
            event.record()
            graph.replay()
        events[-1].record()
        torch.cuda.synchronize()
        return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events)) / 1e3

    def _piece(self, size: int, index: int, hidden: torch.Tensor | None) -> torch.Tensor:
        """Runs the model's piece before the attention of layer `index`, over the static tensors; returns the
        residual stream."""
        input_ids, positions, *locations = (row[:size] for row in self._inputs)
        cache_locations = self._state.by_layer(locations[0] if len(locations) == 1 else locations)
        inputs, attended = (input_ids, positions, cache_locations), self._attended[:size]
        _, hidden = self._model.piece(
            index, inputs, self._state.kv_layers, attended, hidden, self._q[:size], self.taps(size)
        )
        return hidden

    def _capture(self, size: int) -> None:
        hidden: torch.Tensor | None = None
        self._graphs[size] = []

        def warm_up() -> None:
            self._model.finish(self._attended[:size], self._piece(size, 0, None), None)

        for index in range(len(self._model.layers)):
            piece = functools.partial(self._piece, size, index, hidden)
            graph, hidden = self._capture_graph(piece, (lambda: None) if index else warm_up)
            self._graphs[size].append(graph)
        assert hidden is not None
        self._hidden[size] = hidden

    def _capture_full(self, size: int, attention: Captured | None, rows: int) -> None:
        if attention is None:
            return

        def layers(count: int) -> torch.Tensor:
            hidden = None
            for index in range(count):
                hidden = self._piece(size, index, hidden)
                attention.run(index, self._q[:size], self._attended[:size])
            assert hidden is not None
            return hidden

        graph, hidden = self._capture_graph(lambda: layers(len(self._model.layers)), lambda: layers(1))
        self._full.setdefault(size, []).append(FullStep(rows, graph, attention, hidden))


def fastest_sizes(sizes: list[int], seconds: list[float]) -> list[int]:
    """For each of the ascending `sizes`, the one of at least that size that takes least time."""
    best: list[int] = []
    fastest = float("inf")
    for size, time in zip(reversed(sizes), reversed(seconds), strict=True):
        if time < fastest:
            fastest = time
            best.append(size)
        else:
            best.append(best[-1])
    return best[::-1]
