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
        self.tokens: Tensor | None = None

    def restore(self, sequences: list[tuple[int, np.ndarray]]) -> None:
        """Enter the known tokens (int32 [n]) of sequences that have come to slots."""
        if self.tokens is None:
            self.tokens = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        data = self._staging.upload([tokens for _, tokens in sequences])
        parts = data.split([len(tokens) for _, tokens in sequences])
        for (slot, tokens), part in zip(sequences, parts, strict=True):
            self.tokens[slot, : len(tokens)] = part

    def record(self, slots: Tensor, position: Tensor, tokens: Tensor) -> None:
        """Append sampled tokens: int32 [n] at position int32 [n] of the rows `slots`."""
        assert self.tokens is not None
        self.tokens[slots, position] = tokens
