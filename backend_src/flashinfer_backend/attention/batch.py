# SPDX-License-Identifier: Apache-2.0
"""What attention is told of a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch


@dataclass
class AttentionBatch:
    """One step as attention sees it. Rows of one query token come first, num_single of them.

    q_lens, kv_lens, slots: int32 [rows] on the host; kv_lens count this step's tokens.
    block_table: int32 [slots, max blocks] on the device, row = slot.
    """

    q_lens: np.ndarray
    kv_lens: np.ndarray
    slots: np.ndarray
    block_table: torch.Tensor

    @cached_property
    def num_single(self) -> int:
        """Rows of one query token before the first longer one."""
        longer = self.q_lens > 1
        return int(longer.argmax()) if longer.any() else len(longer)
