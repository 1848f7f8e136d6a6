# SPDX-License-Identifier: Apache-2.0
"""The sampler's state of sequences that ask for more than a temperature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.core.step import StepPlan
from flashinfer_backend.sampling.history import TokenHistory
from flashinfer_backend.structured.grammar import Grammar
from flashinfer_backend.structured.masks import SequenceGrammars


@dataclass(eq=False)
class SequenceState:
    """The state of one sequence. It outlives preemption, and ends when a plan says that the sequence is
    gone."""

    handle: int
    params: SamplingParams
    prompt_len: int
    grammar: Grammar | None
    slot: int = -1
    epoch: int = -1
    bias: list[Tensor] | None = None  # ids and values on the device, sent once
    words: list[Tensor] | None = None  # its bad words likewise: last, word, token and back of BadWords
    allowed: list[Tensor] | None = None  # and its allowed ids: mask and marker of Allowed
    marker: int = -1  # on the host


class StatefulRow(NamedTuple):
    """One token that a step samples for a slot with a state; a sampling row with drafts has several."""

    row: int  # sampling row
    at: int  # among the step's sampled tokens
    slot: int
    state: SequenceState
    suppressed: int  # a token id that must not be chosen, or -1
    early: bool  # nor must its late_ids
    checks: int = -1  # which of the slot's drafts stands in its place; -1: none
    behind: int = 0  # sampled tokens of its row that come after it

    @property
    def processed(self) -> bool:
        """Whether it is sampled from logits that are changed."""
        return self.early or self.state.params.changes_logits


class SequenceStates:
    """The states by handle and by slot, as plans tell of new and freed sequences."""

    def __init__(self, grammars: SequenceGrammars, history: TokenHistory) -> None:
        self._grammars, self._history = grammars, history
        self._by_handle: dict[int, SequenceState] = {}
        self._by_slot: dict[int, SequenceState] = {}

    def __contains__(self, state: SequenceState) -> bool:
        return self._by_handle.get(state.handle) is state

    def update(self, plan: StepPlan) -> None:
        for handle in plan.freed:
            state = self._by_handle.pop(handle, None)
            if state is not None and self._by_slot.get(state.slot) is state:
                del self._by_slot[state.slot]
        restored = []
        for new in plan.new:
            state = self._by_handle.get(new.handle)
            if state is None:
                grammar = self._grammars.take(new.handle) if new.params.grammar_type else None
                state = SequenceState(new.handle, new.params, new.prompt_len, grammar)
                self._by_handle[new.handle] = state
            state.slot, state.epoch = new.slot, new.epoch
            self._by_slot[new.slot] = state
            if new.params.needs_history:
                restored.append((new.slot, np.frombuffer(new.tokens, "<i4")))
        if restored:
            self._history.restore(restored)

    def rows(self, plan: StepPlan) -> list[StatefulRow]:
        """The plan's stateful rows. A plan names no row of a sequence that it, or one before it, frees. Where
        its positions are upper bounds, these and all that they can be are before min_tokens, or none is."""
        slots, epochs, positions = plan.sample_slots, plan.epochs, plan.sample_positions
        counts = plan.samples
        first = np.cumsum(counts) - counts
        rows = []
        for row in plan.stateful.tolist():
            state = self._by_slot[int(slots[row])]
            assert state.epoch == epochs[row], f"slot {slots[row]} has the state of another sequence"
            params, at, behind = state.params, int(first[row]), int(counts[row]) - 1
            early = bool(params.late_ids) and int(positions[row]) - state.prompt_len < params.min_tokens
            suppressed = int(plan.suppressed[row])
            for draft in range(behind):
                own = StatefulRow(
                    row, at + draft, state.slot, state, suppressed, early, draft, behind - draft
                )
                rows.append(own)
            rows.append(StatefulRow(row, at + behind, state.slot, state, suppressed, early))
        return rows
