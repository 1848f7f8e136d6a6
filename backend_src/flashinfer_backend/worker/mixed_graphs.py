# SPDX-License-Identifier: Apache-2.0
"""Mixed steps of few tokens as CUDA graphs, one or two per number of tokens.

A step with prompts has attention of a new shape each time, but its other operations depend only on the number
of tokens. Launched one by one they cost the host about 10 ms, more than the device needs for a short prompt.
Steps are padded to a captured number of tokens. Where attention can be captured too (StepGraphState: FA3 and
the Triton kernel read what changes from the device), the step is one full graph. Else it is
piecewise: a graph for each piece between two attention calls, from the embedding to the first query, from one
layer's attention to the next layer's query. After the last attention only the tokens go on whose logits are
wanted, outside any graph.

More padding can be faster: a matrix product of 448 tokens may take longer than one of 512. So each
number is timed once it is captured, and a step takes the fastest that holds it.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from bisect import bisect_left
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flashinfer_backend.attention.batch import AttentionBatch
from flashinfer_backend.models.spec import Experts
from flashinfer_backend.models.transformer import Attention, Transformer
from flashinfer_backend.worker.capture import GraphCapture

# Beyond the last size the device takes longer than the host, so nothing is gained. Padding costs about 3 % of
# a step for 16 tokens of 256, so sizes are dense.
SIZES = [8, 16, 24, 32, 48, *range(64, 512, 16), *range(512, 1025, 32)]
TIMED_REPLAYS = 10


class FullStep(NamedTuple):
    """A captured step, attention and all: `decode_rows` is the most decode rows of a step that it serves,
    `hidden` the residual stream at the last attention."""

    decode_rows: int
    graph: torch.cuda.CUDAGraph
    attention: Any
    hidden: torch.Tensor


class MixedGraphs:
    """Captured steps by number of tokens, over one set of static tensors. `attention` (FlashInferAttention)
    and block_table [slots + 1, blocks] are what full graphs read."""

    def __init__(
        self,
        model: Transformer,
        kv_caches: list[tuple[torch.Tensor, torch.Tensor]],
        attention: Any,
        block_table: torch.Tensor,
        capture: GraphCapture,
    ) -> None:
        self._model, self._kv_caches = model, kv_caches
        self.largest = SIZES[-1]
        heads, device = model.spec.attention, model.device
        self._inputs = torch.zeros((3, self.largest), dtype=torch.int32, device=device)
        shape = (self.largest, heads.heads, heads.head_dim)
        self._q = torch.zeros(shape, dtype=model.dtype, device=device)
        # Rows of padding are never written: they must not hold NaN.
        self._attended = torch.zeros(shape, dtype=model.dtype, device=device)
        self._graphs: dict[int, list[torch.cuda.CUDAGraph]] = {}
        self._hidden: dict[int, torch.Tensor] = {}
        self._full: dict[int, list[FullStep]] = {}
        self._capture_graph = capture
        with torch.inference_mode():
            for size in reversed(SIZES):  # the largest first, so that the others fit its memory
                self._capture(size)
                most = min(size, block_table.shape[0] - 1)
                # Few decode rows are cut up otherwise than many.
                for rows in sorted({min(64, most), most}):
                    self._capture_full(size, attention.step_graph_state(size, rows, block_table), rows)
                capture.sizes += 1
        # All ranks must pad to the same sizes.
        times = model.collectives.agreed([self._layer_seconds(size) for size in SIZES])
        self._best = fastest_sizes(SIZES, times)

    def padded(self, tokens: int) -> int:
        """The number of tokens to run a step of `tokens` with."""
        return self._best[bisect_left(SIZES, tokens)] if tokens <= self.largest else tokens

    def plan_full(self, size: int, batch: AttentionBatch) -> FullStep | None:
        """The full graph of a step of `size` tokens (padding included), its attention planned; None where
        the step must run piecewise."""
        for full in self._full.get(size, ()):
            if batch.num_single <= full.decode_rows:
                return full if full.attention.plan(batch) else None
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
        attention: Attention,
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

    def _copy(self, *columns: torch.Tensor) -> None:
        for target, source in zip(self._inputs, columns, strict=True):
            target[: len(source)].copy_(source)

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
        input_ids, positions, cache_locations = (row[:size] for row in self._inputs)
        inputs, attended = (input_ids, positions, cache_locations), self._attended[:size]
        _, hidden = self._model.piece(index, inputs, self._kv_caches, attended, hidden, self._q[:size])
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

    def _capture_full(self, size: int, attention: Any, rows: int) -> None:
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
