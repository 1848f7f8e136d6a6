# SPDX-License-Identifier: Apache-2.0
"""Drafts without a model: what followed the last tokens when they stood in the prompt or the answer before.

Saxena, Prompt Lookup Decoding, https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.models.transformer import Transformer
from flashinfer_backend.speculate.proposer import DraftStep, Slots


class NGram:
    """Looks up the longest run of a sequence's last tokens, of `least` to `most` of them, and of equally long
    ones the latest."""

    layers: tuple[int, ...] = ()
    cache_layers = 0
    history = defers = True

    def __init__(self, ops: ModuleType, count: int, most: int, least: int) -> None:
        self._ops, self.count, self._most, self._least = ops, count, most, least

    def propose(self, step: DraftStep, state: Slots, count: int) -> Tensor:
        slots = step.sample_slots
        if not count:
            return slots.new_empty(len(slots), 0)
        sizes = self._most, self._least
        return self._ops.ngram_drafts(state.tokens, slots, state.by_slot.lengths, count, *sizes)


def make_ngram(config: EngineConfig, target: Transformer) -> NGram:
    sizes = config.max_matching_ngram_size, config.min_matching_ngram_size
    return NGram(target.ops, config.max_draft_len, *sizes)
