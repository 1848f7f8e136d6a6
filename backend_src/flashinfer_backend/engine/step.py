# SPDX-License-Identifier: Apache-2.0
"""The data of one engine step, passed explicitly from scheduler to runner to attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from flashinfer_backend.engine.request import Request


class ExtraRow(NamedTuple):
    """A sampling row whose request asks for more than the plain sampler gives."""

    row: int  # index into the step's sampling rows
    slot: int
    epoch: int  # of the slot
    request: Request
    banned: int  # a token id that must not be chosen, or -1


@dataclass
class StepPlan:
    """What the scheduler decided for one step; host data only.

    Rows are sequences: decode rows first (one token each), then prefill rows (a chunk each).
    A prefill row samples only when its chunk reaches the end of the known tokens.
    """

    decode_slots: np.ndarray  # int32 [d]
    decode_positions: np.ndarray  # int32 [d], position of the token each decode row feeds
    decode_pages: np.ndarray  # int32 [d], new page that this position opens, or -1
    prefill_slots: np.ndarray  # int32 [p]
    prefill_starts: np.ndarray  # int32 [p], tokens already in the KV cache
    prefill_lens: np.ndarray  # int32 [p]
    prefill_tokens: np.ndarray  # int32 [sum(prefill_lens)]
    prefill_samples: np.ndarray  # bool [p]
    table_updates: np.ndarray  # int32 [n, 3] of admitted rows: (slot, index in the slot's block table, page)
    # Sampling rows: all decode rows, then the prefill rows that sample.
    sample_slots: np.ndarray  # int32 [s]
    sample_epochs: np.ndarray  # int64 [s], owner of the slot when the step was planned
    temperature: np.ndarray  # float32 [s]
    seed: np.ndarray  # uint64 [s]
    banned: np.ndarray  # int32 [s], a token id that must not be chosen, or -1
    extras: list[ExtraRow] = field(default_factory=list)
    context_logits: list[tuple[int, Request]] = field(default_factory=list)  # prefill rows that want them

    @property
    def num_decode(self) -> int:
        return len(self.decode_slots)

    @property
    def num_prefill(self) -> int:
        return len(self.prefill_slots)

    @property
    def num_tokens(self) -> int:
        return len(self.decode_slots) + len(self.prefill_tokens)

    @property
    def guided(self) -> bool:
        """Whether rows can be sampled only after the tokens of all earlier steps were read."""
        return any(row.request.guide is not None for row in self.extras)


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
