# SPDX-License-Identifier: Apache-2.0
"""Attention of layers that are in several cache groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from torch import Tensor

from flashinfer_backend.attention.batch import AttentionBatch
from flashinfer_backend.attention.contract import Captured, Mixer, Prepared, StepShape


class GroupAttention(NamedTuple):
    """What attends to the caches of `layers`, in this order, through the group's block table."""

    layers: tuple[int, ...]
    attention: Mixer
    block_table: Tensor


class GroupedAttention:
    """A Mixer of several: each layer's attention is that of its group. Block tables that it is given, in
    batches too, are not read."""

    def __init__(self, groups: Sequence[GroupAttention]) -> None:
        self._groups = groups

    def step(self, batch: AttentionBatch) -> Prepared:
        prepared = [g.attention.step(replace(batch, block_table=g.block_table)) for g in self._groups]
        return _ByLayer(self._groups, prepared)

    def graph_words(self, shape: StepShape) -> int:
        """The words of all groups in their order."""
        return sum(group.attention.graph_words(shape) for group in self._groups)

    def captured(
        self, shape: StepShape, block_table: Tensor, words: Tensor, lengths: Tensor | None = None
    ) -> Captured | None:
        """All groups' states, or None where one has none."""
        sizes = [group.attention.graph_words(shape) for group in self._groups]
        captured = []
        for group, part in zip(self._groups, words.split(sizes), strict=True):
            state = group.attention.captured(shape, group.block_table, part, lengths)
            if state is None:
                return None
            captured.append(state)
        return _CapturedByLayer(self._groups, captured, sizes)


class _ByLayer:
    def __init__(self, groups: Sequence[GroupAttention], prepared: Sequence[Prepared]) -> None:
        self._of = {
            layer: (each, index)
            for group, each in zip(groups, prepared, strict=True)
            for index, layer in enumerate(group.layers)
        }

    def run(self, layer: int, q: Tensor, out: Tensor) -> None:
        prepared, index = self._of[layer]
        prepared.run(index, q, out)


class _CapturedByLayer(_ByLayer):
    def __init__(
        self, groups: Sequence[GroupAttention], captured: Sequence[Captured], sizes: Sequence[int]
    ) -> None:
        super().__init__(groups, captured)
        self._groups, self._captured = groups, captured
        self._ends = np.cumsum(sizes)[:-1].tolist()

    @property
    def reads_block_table(self) -> bool:
        return all(each.reads_block_table for each in self._captured)

    def plan(self, batch: AttentionBatch, host: np.ndarray) -> bool:
        """Describe the step that the next replay computes; False where a group cannot. What the others were
        told is told again before they run."""
        parts = zip(self._groups, self._captured, np.split(host, self._ends), strict=True)
        return all(
            each.plan(replace(batch, block_table=group.block_table), part) for group, each, part in parts
        )

    def ahead(self, tokens: int, lengths: Tensor) -> Prepared:
        return _ByLayer(self._groups, [each.ahead(tokens, lengths) for each in self._captured])
