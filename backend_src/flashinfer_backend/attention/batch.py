# SPDX-License-Identifier: Apache-2.0
"""What attention is told of a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass
class AttentionBatch:
    """One step as attention sees it: rows 0..num_decode have one query token and come first.

    q_lens, kv_lens, slots: int32 [rows] on the host; kv_lens count this step's tokens.
    block_table: int32 [slots, max pages] on the device, row = slot.
    """

    num_decode: int
    q_lens: np.ndarray
    kv_lens: np.ndarray
    slots: np.ndarray
    block_table: torch.Tensor
