# SPDX-License-Identifier: Apache-2.0
"""What the end of a step does where tokens are guessed: it checks drafts, and has new ones proposed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flashinfer_backend.attention.batch import AttentionBatch
from flashinfer_backend.attention.contract import Prepared
from flashinfer_backend.core.step import Feeds, StepPlan, Wants
from flashinfer_backend.speculate.proposer import DraftStep, Proposer
from flashinfer_backend.worker.device_state import MOST_DEFERRED, DeviceState


class Fed(NamedTuple):
    """What a step fed the model, int32 [T] each with its padding, of several cache groups a row of
    cache_locations each; attention of its rows; and the outputs of the proposer's layers, [T, layers * H],
    where it takes some."""

    tokens: Tensor
    slots: Tensor
    positions: Tensor
    cache_locations: Tensor
    attention: Prepared
    hidden: Tensor | None

    def cut(self, tokens: int) -> Fed:
        """The same of the first `tokens`: attention that is not captured takes no padding."""
        return Fed(
            self.tokens[:tokens], self.slots[:tokens], self.positions[:tokens],
            self.cache_locations[..., :tokens], self.attention,
            None if self.hidden is None else self.hidden[:tokens],
        )  # fmt: skip


class Drafting:
    """A rank's proposer, and the drafts of every slot. All ranks run the same."""

    def __init__(self, proposer: Proposer, state: DeviceState) -> None:
        self.proposer, self._state = proposer, state
        # By slot, how many of its last tokens the proposer has not taken in, which `noted` has.
        self._behind = np.zeros(len(state.lengths), np.int32)
        # Whether the starts of the next plan are those that the device has: at most one step is in flight
        # when it is made, which has no drafts.
        self.exact = True

    @property
    def ahead(self) -> int:
        """How many keys beyond a step's own the proposer's layers may see."""
        return self.proposer.count if self.proposer.cache_layers else 0

    def recall(self, plan: StepPlan) -> None:
        """Take in tokens that no step feeds."""
        if not plan.recalled:
            return
        parts = [np.frombuffer(tokens, "<i4") for _, tokens in plan.recalled]
        uploaded, begin = self._state.staging.upload(parts), 0
        for (slot, _), part in zip(plan.recalled, parts, strict=True):
            self._state.tokens[slot, : len(part)] = uploaded[begin : begin + len(part)]
            begin += len(part)

    def finish(self, plan: StepPlan, fed: Fed, tokens: Tensor) -> Tensor | None:
        """The end of a step that was launched operation by operation: int32 [s], how many tokens each of its
        sampling rows comes to; None where it had no drafts. tokens: int32 [n], behind the plan's
        sampled_tokens."""
        state, rows = self._state, len(plan.sample_slots)
        samples = plan.samples
        uploaded = state.staging.upload(
            [
                plan.sample_slots,
                (np.cumsum(samples) - samples).astype(np.int32),
                samples.astype(np.int32),
                plan.sampled_tokens,
            ]
        )
        slots, first, lengths = uploaded[: 3 * rows].view(3, rows)
        places = uploaded[3 * rows :]
        counts, ends = None, places
        if len(plan.drafted_rows):
            counts, last = state.ops.accept(tokens, first, lengths, slots, state.by_slot)
            ends = places[last]
        follow = self._next_tokens(plan, fed, tokens, places) if self.proposer.layers else None

        def decode(ahead: int) -> Prepared:
            return state.attention.step(
                AttentionBatch(
                    q_lens=np.ones(rows, np.int32),
                    kv_lens=plan.sample_positions + np.int32(ahead),
                    slots=plan.sample_slots,
                    block_table=state.block_table,
                    lengths=state.lengths,
                    ahead=ahead,
                )
            )

        self.propose(fed, follow, slots, ends, state.fed_lengths, decode, plan.drafts)
        return counts

    def defer(self, slots: np.ndarray, noted: bool) -> None:
        """A step has fed one token of each of these slots, which the proposer has not taken in. noted: what
        it takes of them was; else it never has them, nor what was noted before, and its drafts are worse."""
        if not self.proposer.layers:
            return
        self._behind[slots] = self._behind[slots] + 1 if noted else 0
        if noted and self._behind[slots].max() == MOST_DEFERRED:
            self.catch_up()

    def catch_up(self) -> None:
        """Have the proposer take in all that was noted. Before anything of a step that may end a sequence's
        hold of its blocks, or that the proposer sees whole; all earlier ones are sampled."""
        slots = self._behind.nonzero()[0].astype(np.int32)
        if not len(slots):
            return
        state, counts = self._state, self._behind[slots]
        self._behind[slots] = 0
        uploaded, turns = state.staging.upload([slots, counts]).view(2, -1), int(counts.max())
        own = *uploaded, turns, state.by_slot
        positions, locations, follow, noted = state.ops.noted_inputs(state.tokens, *own)
        none = uploaded.new_empty(0)
        step = DraftStep(
            positions=positions,
            cache_locations=locations,  # of padding: in the dummy block
            next_tokens=follow,
            hidden=state.noted[noted],
            ends=none,
            sample_slots=none,
            fed_lengths=state.lengths,
            attention=None,
            decode=_no_attention,
        )
        self.proposer.propose(step, state, 0)

    def replace(self, known: list[tuple[int, int, list[int]]], count: int) -> None:
        """Replace drafts by tokens that are known better: (slot, position of the first, tokens)."""
        state, width = self._state, max(len(tokens) for _, _, tokens in known)
        padded = [
            [slot, at, len(tokens), *tokens] + [0] * (width - len(tokens)) for slot, at, tokens in known
        ]
        uploaded = state.staging.upload([np.array(padded, np.int32).reshape(-1)]).view(len(known), -1)
        slots, at, length, tokens = uploaded[:, 0], uploaded[:, 1:2], uploaded[:, 2:3], uploaded[:, 3:]
        ahead = torch.arange(1, count + 1, device=uploaded.device)
        places = state.lengths[slots].unsqueeze(1) + ahead - at
        known_there = (places >= 0) & (places < length)
        chosen = tokens.gather(1, places.clamp(0, width - 1))
        state.drafts[slots, :count] = torch.where(known_there, chosen, state.drafts[slots, :count])

    def propose(
        self,
        fed: Fed,
        next_tokens: Tensor | None,
        slots: Tensor,
        ends: Tensor,
        fed_lengths: Tensor,
        decode: Callable[[int], Prepared],
        count: int,
    ) -> None:
        """New drafts, `count` for each of the sampling rows' `slots`; see DraftStep."""
        state, proposer = self._state, self.proposer
        if proposer.history:
            own = fed.tokens, fed.slots, fed.positions
            state.ops.record_tokens(state.tokens, own, slots, state.by_slot)
        step = DraftStep(
            positions=fed.positions,
            # The proposer's layers see all, as those of the first group do.
            cache_locations=fed.cache_locations.view(-1, len(fed.tokens))[0],
            next_tokens=next_tokens,
            hidden=fed.hidden,
            ends=ends,
            sample_slots=slots,
            fed_lengths=fed_lengths,
            attention=fed.attention,
            decode=decode,
        )
        drafts = proposer.propose(step, state, count)
        if count:
            state.drafts[slots, :count] = drafts

    def _next_tokens(self, plan: StepPlan, fed: Fed, tokens: Tensor, places: Tensor) -> Tensor:
        """DraftStep.next_tokens of any step."""
        follow = fed.tokens.roll(-1)
        given = (plan.feeds == Feeds.GIVEN) & (plan.wants & (Wants.NEXT | Wants.NEXT_OF_EACH) == 0)
        if given.any():
            ends = np.cumsum(plan.lengths, dtype=np.int32)[given] - np.int32(1)
            known = plan.following[given[plan.feeds == Feeds.GIVEN]]
            where, behind = self._state.staging.upload([ends, known]).view(2, -1)
            follow[where] = behind
        follow[places] = tokens
        return follow


def _no_attention(ahead: int) -> Prepared:
    raise RuntimeError("tokens of earlier steps have no attention")
