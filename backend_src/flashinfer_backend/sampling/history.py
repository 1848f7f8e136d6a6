# SPDX-License-Identifier: Apache-2.0
"""Tokens of sequences whose sampling depends on what came before, on the device.

A step is launched before the last one's tokens are on the host, so penalties and bad words read them
here. A row belongs to a slot; tokens are written in the order of the stream.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flashinfer_backend.ops.staging import StagingRing


class TokenHistory:
    """int32 [slots, length], allocated when the first sequence needs it."""

    def __init__(self, slots: int, length: int, device: torch.device, staging: StagingRing) -> None:
        self._shape, self._device, self._staging = (slots, length), device, staging
        self._owner = np.full(slots, -1, np.int64)  # epoch of the slot whose tokens its row holds
        self.tokens: Tensor | None = None

    def restore(self, owners: list[tuple[int, int, np.ndarray]]) -> None:
        """See to it that the rows of owners (slot, epoch, all known tokens as int32 [n]) hold their
        tokens. What was sampled since an owner was first seen has been recorded already."""
        new = [owner for owner in owners if self._owner[owner[0]] != owner[1]]
        if not new:
            return
        if self.tokens is None:
            self.tokens = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        data = self._staging.upload([tokens for _, _, tokens in new])
        parts = data.split([len(tokens) for _, _, tokens in new])
        for (slot, epoch, tokens), part in zip(new, parts, strict=True):
            self._owner[slot] = epoch
            self.tokens[slot, : len(tokens)] = part

    def before(self, slots: Tensor, position: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """(tokens int64 [n, longest], valid bool [n, longest]) ahead of position (int32 [n]). What is not
        valid repeats the sequence's first token. longest: the largest position."""
        assert self.tokens is not None
        tokens = self.tokens[:, :longest][slots].long()
        valid = torch.arange(longest, device=self._device) < position.unsqueeze(1)
        return torch.where(valid, tokens, tokens[:, :1]), valid

    def record(self, slots: Tensor, position: Tensor, tokens: Tensor) -> None:
        """Append sampled tokens: int32 [n] at position int32 [n] of the rows `slots`."""
        assert self.tokens is not None
        self.tokens[slots, position] = tokens
