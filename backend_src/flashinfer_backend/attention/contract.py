# SPDX-License-Identifier: Apache-2.0
"""What the worker asks of attention, and of whatever else may mix a sequence's tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from flashinfer_backend.attention.batch import AttentionBatch


class Variant(NamedTuple):
    """Attention that changes scores before the softmax, by a number for each query head.

    transforms: for FlashInfer's FA2, CUDA text of its REGISTER_ macros, of a struct of this name
    (flashinfer_calls.declaration). `params` have by_head (float [heads]) and sm_scale, and the transform of
    logits multiplies these by sm_scale. Masks stay causal and without windows.
    scores: the same in plain torch, of scores float32 [B, H, Q, L], times their scale; the positions of keys
    and of queries, and by_head, which broadcast to it.
    """

    struct: str
    transforms: str
    scores: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Scores(NamedTuple):
    """How a layer's scores, products of queries and keys, become weights: times `scale`; then, with a
    soft_cap, soft_cap * tanh(score / soft_cap); then the softmax, in which each head's sink (float32 [heads])
    takes part as the score of a value that is zero: https://arxiv.org/abs/2309.17453. variant, by_head: in
    place of cap and softmax, with its float32 [heads]."""

    scale: float
    soft_cap: float | None = None
    sinks: Tensor | None = None
    variant: Variant | None = None
    by_head: Tensor | None = None


class StepShape(NamedTuple):
    """The steps that one graph runs: tokens, padding included, and the most rows that feed feeds_per_row
    tokens. (r, r, 1): decode rows alone. (t, r, None): up to r decode rows, then prompts. shared: decode rows
    read once what they share (AttentionBatch.prefixes)."""

    tokens: int
    rows: int
    feeds_per_row: int | None
    shared: bool = False


class Prepared(Protocol):
    """A step whose layers can run; until the mixer's next step is prepared."""

    def run(self, layer: int, q: Tensor, out: Tensor) -> None:
        """Attend q [T, Hq, D] to the layer's cache, which already holds this step's keys and values, and
        write out [T, Hq, D]; rows in the batch's order."""


class Captured(Prepared, Protocol):
    """Steps of one shape inside a CUDA graph: `run` is captured once for every layer, `plan` called before
    each replay, on its stream."""

    @property
    def reads_block_table(self) -> bool:
        """Whether the graph sees what changes in the block table after `plan`."""

    def plan(self, batch: AttentionBatch, host: np.ndarray) -> bool:
        """Describe the step that the next replay computes; False, and nothing done, where it cannot. host:
        int32 [graph_words] of the step's upload, written here. Host work and asynchronous copies only."""

    def ahead(self, tokens: int, lengths: Tensor) -> Prepared:
        """Attention of one query a row of the same step, which sees `tokens` more than its slot has of
        `lengths`; of a graph of decode rows with lengths alone. To be captured."""


class Mixer(Protocol):
    """Mixes the tokens of each sequence, over its cache. All calls come from one thread with one stream."""

    def step(self, batch: AttentionBatch) -> Prepared:
        """Describe a step that is launched layer by layer. Nothing may wait for the device."""

    def graph_words(self, shape: StepShape) -> int:
        """How many int32 words a graph of this shape wants in the step's upload; a multiple of 8."""

    def captured(
        self, shape: StepShape, block_table: Tensor, words: Tensor, lengths: Tensor | None = None
    ) -> Captured | None:
        """State for a CUDA graph of such steps, ready to be captured; None where there is none. It keeps the
        addresses of block_table int32 [slots, columns], words int32 [graph_words(shape)] and, where they are
        given, lengths (AttentionBatch.lengths), all on the device."""
