# SPDX-License-Identifier: Apache-2.0
"""Takes a step's sampled tokens in: which rows still count, what they end with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flashinfer_backend.core.step import StepPlan
from flashinfer_backend.scheduler.slot_table import SlotTable
from flashinfer_backend.transport import protocol


@dataclass
class Outcome:
    """Rows of a step that still have their owner; arrays [n]."""

    rows: np.ndarray  # index into the step's sampling rows
    slots: np.ndarray  # intp
    tokens: np.ndarray  # int32, NO_TOKEN where the end id was chosen
    codes: np.ndarray  # int32, protocol's finish codes
    first: np.ndarray  # bool, this is the sequence's first output


def accept(table: SlotTable, plan: StepPlan, tokens: np.ndarray) -> Outcome:
    """Record the tokens (int32 [sampling rows]) of `plan` in `table`; releases nothing."""
    slots = plan.sample_slots.astype(np.intp)
    rows = (table.epoch[slots] == plan.sample_epochs).nonzero()[0]
    slots, tokens = slots[rows], tokens[rows]
    known = table.known[slots]
    table.tokens[slots, known] = tokens
    known += 1
    table.known[slots] = known
    outputs = known - table.prompt_len[slots]
    ended = tokens == table.end_id[slots]
    if len(table.end_ids):
        others = (tokens[:, None] == table.end_ids).any(axis=1)
        # Only the request's own end id is suppressed until min_tokens; another is like any token.
        ended |= table.any_end[slots] & others & (outputs > table.min_tokens[slots])
    codes = np.full(len(slots), protocol.RUNNING, np.int32)
    codes[outputs >= table.max_new[slots]] = protocol.FINISHED_LENGTH
    codes[ended] = protocol.FINISHED_END_ID
    for i in (table.stops[slots] & ~ended).nonzero()[0].tolist():
        if _ends_with_stop_sequence(table, int(slots[i])):
            codes[i] = protocol.FINISHED_STOP_WORDS
    tokens[ended] = protocol.NO_TOKEN
    return Outcome(rows=rows, slots=slots, tokens=tokens, codes=codes, first=outputs == 1)


def _ends_with_stop_sequence(table: SlotTable, slot: int) -> bool:
    request = table.requests[slot]
    assert request is not None
    known, start = int(table.known[slot]), int(table.prompt_len[slot])
    for stop in request.params.stop_sequences:
        if (
            stop
            and known - start >= len(stop)
            and table.tokens[slot, known - len(stop) : known].tolist() == stop
        ):
            return True
    return False
