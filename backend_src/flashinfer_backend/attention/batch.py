# SPDX-License-Identifier: Apache-2.0
"""What attention is told of a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from flashinfer_backend.attention.prefixes import Prefixes


@dataclass
class AttentionBatch:
    """One step as attention sees it. Rows of one query token come first, num_single of them.

    q_lens, kv_lens, slots: int32 [rows] on the host; kv_lens count this step's tokens.
    block_table: int32 [slots, max blocks] on the device, row = slot.
    lengths: int32 [slots] on the device; where given, a row has its slot's and `ahead` tokens more, and those
    of kv_lens are upper bounds of decode rows. drafted: the most query tokens of a row where all are decode
    rows, and some have several. prefixes: what decode rows share, for a graph that reads it once.
    """

    q_lens: np.ndarray
    kv_lens: np.ndarray
    slots: np.ndarray
    block_table: torch.Tensor
    lengths: torch.Tensor | None = None
    ahead: int = 0
    drafted: int = 1
    prefixes: Prefixes | None = None

    def exact(self) -> AttentionBatch:
        """The same with the kv_lens that the device has; waits for it."""
        if self.lengths is None:
            return self
        lengths = self.lengths.cpu().numpy()
        padding = self.slots == len(lengths) - 1  # its length stays 0
        kv_lens = np.where(padding, self.kv_lens, lengths[self.slots] + np.int32(self.ahead))
        return AttentionBatch(self.q_lens, kv_lens, self.slots, self.block_table)

    @cached_property
    def num_single(self) -> int:
        """Rows of one query token before the first longer one."""
        longer = self.q_lens > 1
        return int(longer.argmax()) if longer.any() else len(longer)
