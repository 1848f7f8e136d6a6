# SPDX-License-Identifier: Apache-2.0
"""The data of one engine step, passed explicitly from scheduler to runner to attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from flashinfer_backend.core.request import Request
from flashinfer_backend.scheduler.slot_table import SlotTable


class ExtraRow(NamedTuple):
    """A sampling row whose request asks for more than the plain sampler gives."""

    row: int  # index into the step's sampling rows
    slot: int
    epoch: int  # of the slot
    request: Request
    suppressed: int  # a token id that must not be chosen, or -1


NONE = np.empty(0, np.int32)


@dataclass(kw_only=True)
class StepPlan:
    """What the scheduler decided for one step; host data only.

    Rows are sequences: decode rows first (one token each), then prefill rows (a chunk each).
    A prefill row samples only when its chunk reaches the end of the known tokens.
    """

    decode_slots: np.ndarray  # int32 [d]
    decode_positions: np.ndarray  # int32 [d], position of the token each decode row feeds
    new_blocks: np.ndarray  # int32 [d], new block that this position opens, or -1
    prefill_slots: np.ndarray = field(default_factory=lambda: NONE)  # int32 [p]
    prefill_starts: np.ndarray = field(default_factory=lambda: NONE)  # int32 [p], tokens in the KV cache
    prefill_lens: np.ndarray = field(default_factory=lambda: NONE)  # int32 [p]
    prefill_tokens: np.ndarray = field(default_factory=lambda: NONE)  # int32 [sum(prefill_lens)]
    prefill_samples: np.ndarray = field(default_factory=lambda: NONE > 0)  # bool [p]
    # int32 [n, 3] of admitted rows: (slot, index in the slot's block table, block)
    table_updates: np.ndarray = field(default_factory=lambda: NONE.reshape(0, 3))
    # Sampling rows: all decode rows, then the prefill rows that sample.
    sample_slots: np.ndarray  # int32 [s]
    sample_epochs: np.ndarray  # int64 [s], owner of the slot when the step was planned
    temperature: np.ndarray  # float32 [s]
    seed: np.ndarray  # uint64 [s]
    suppressed: np.ndarray  # int32 [s], a token id that must not be chosen, or -1
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
        return any(row.request.grammar is not None for row in self.extras)


def prompt_rows(
    table: SlotTable, chunks: list[tuple[Request, int, int]], updates: list[tuple[int, int, int]]
) -> dict[str, Any]:
    """What a StepPlan has of its prefill rows, given as (request, start, length) and table updates."""
    slots, starts, lens = np.array([(r.slot, start, n) for r, start, n in chunks], np.int32).T
    return {
        "prefill_slots": slots,
        "prefill_starts": starts,
        "prefill_lens": lens,
        "prefill_tokens": np.concatenate([table.tokens[r.slot, s : s + n] for r, s, n in chunks]),
        "prefill_samples": starts + lens == table.known[slots],
        "table_updates": np.array(updates, np.int32).reshape(-1, 3),
        "context_logits": [
            (i, r) for i, (r, _, _) in enumerate(chunks) if r.params.context_logits and not len(r.generated)
        ],
    }
