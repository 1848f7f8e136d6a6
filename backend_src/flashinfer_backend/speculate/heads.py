# SPDX-License-Identifier: Apache-2.0
"""Drafts by a head, a small model next to the target: EAGLE-3's (speculate.eagle3) or the checkpoint's own
(speculate.mtp)."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Protocol

import torch
from torch import Tensor

from flashinfer_backend.attention.contract import Prepared
from flashinfer_backend.models.transformer import Transformer
from flashinfer_backend.speculate.proposer import DraftStep, Places, Slots


class DraftHead(Protocol):
    """taken: the target's layers whose outputs it takes."""

    @property
    def layers(self) -> Sized: ...

    @property
    def taken(self) -> tuple[int, ...]: ...

    def join(self, taken: Tensor) -> Tensor:
        """The outputs of these layers as the head takes them, [T, H]."""

    def __call__(self, tokens: Tensor, hidden: Tensor, places: Places, rows: Tensor | None = None) -> Tensor:
        """tokens, int32 [T], that follow the hidden states [T, H], joined or the head's own, which can be
        overwritten -> the head's hidden states of `rows` (default: all)."""

    def store(self, tokens: Tensor, hidden: Tensor, places: Places) -> None:
        """The same as far as it fills the cache."""

    def guess(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest token by each of hidden [R, H], int32 [R], and what the next guess starts from."""


class HeadProposer:
    """The proposer by a head. A position's keys and values come from the token behind it as well: the last
    position of a cached block can have another token's, which changes only how many drafts are accepted."""

    history = False

    def __init__(self, head: DraftHead, target: Transformer, count: int) -> None:
        self.head, self.count, self.layers = head, count, head.taken
        self._ops = target.ops
        self.cache_layers, self._first = len(head.layers), len(target.spec.attentions)
        # Keys and values of a second layer follow from the first one's attention.
        self.defers = self.cache_layers == 1

    def propose(self, step: DraftStep, state: Slots, count: int) -> Tensor:
        assert step.hidden is not None and step.next_tokens is not None
        head, caches = self.head, state.kv_layers[self._first :]
        places = Places(step.positions, step.cache_locations, caches, self._attention(step.attention))
        fed = step.next_tokens, head.join(step.hidden), places
        if not count or not len(step.ends):
            head.store(*fed)
            return step.ends.new_empty((len(step.ends), count))
        token, hidden = head.guess(head(*fed, step.ends))
        drafts = [token]
        # What the step has fed has blocks, and what is drafted may have none yet: that is not stored.
        rows = step.positions, step.ends, step.sample_slots, step.fed_lengths
        positions, locations = self._ops.places_ahead(*rows, state.by_slot, count - 1)
        for index in range(count - 1):
            attend = self._attention(step.decode(index + 1))
            places = Places(positions[index], locations[index], caches, attend)
            token, hidden = head.guess(head(token, hidden, places))
            drafts.append(token)
        return torch.stack(drafts, dim=1)

    def _attention(self, prepared: Prepared | None) -> Callable[[int, Tensor, Tensor], None]:
        def attend(layer: int, q: Tensor, out: Tensor) -> None:
            assert prepared is not None
            prepared.run(self._first + layer, q, out)

        return attend
