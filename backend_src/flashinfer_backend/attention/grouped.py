# SPDX-License-Identifier: Apache-2.0
"""Attention of layers that are in several cache groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from flashinfer_backend.attention.batch import AttentionBatch
from flashinfer_backend.attention.contract import Prepared, StepShape
from flashinfer_backend.attention.torch_paged import TorchPagedAttention


class GroupAttention(NamedTuple):
    """What attends to the caches of `layers`, in this order, through the group's block table."""

    layers: tuple[int, ...]
    attention: TorchPagedAttention
    block_table: Tensor


class GroupedAttention:
    """step(batch) once per step, then run(layer, q, out) once per layer, which its group's attention does."""

    def __init__(self, groups: Sequence[GroupAttention]) -> None:
        self._groups = groups
        self._of = {
            layer: (group.attention, index) for group in groups for index, layer in enumerate(group.layers)
        }

    def step(self, batch: AttentionBatch) -> Prepared:
        """Prepare one step; the batch's block table is not read."""
        for group in self._groups:
            group.attention.step(replace(batch, block_table=group.block_table))
        return self

    def run(self, layer: int, q: Tensor, out: Tensor) -> None:
        """Attend q[T, Hq, D] to the layer's cache and write out[T, Hq, D], rows as in step()."""
        attention, index = self._of[layer]
        attention.run(index, q, out)

    def graph_words(self, shape: StepShape) -> int:
        """None: steps are not captured."""
        return 0

    def captured(self, shape: StepShape, block_table: Tensor, words: Tensor) -> None:
        """None: the host decides what each step gathers, so that a graph would repeat one step."""
        return None
