# SPDX-License-Identifier: Apache-2.0
"""Chooses tokens from logits.

`ops.sample` makes every choice, so that a seed gives the same tokens on every path. Rows that ask for
nothing else cost nothing else. Those that change their logits are sampled again, from a float32 copy
that is changed in this order: penalties, bias, bad words, end id until min_tokens, guide, temperature,
top-k, top-p. The model's logits are left as they are, for what is reported of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.step import ExtraRow, StepPlan
from flashinfer_backend.ops.staging import StagingRing
from flashinfer_backend.sampling import processors
from flashinfer_backend.sampling.filters import top_k_top_p_mask
from flashinfer_backend.sampling.history import TokenHistory
from flashinfer_backend.sampling.logprobs import Report, ReportedRows
from flashinfer_backend.sampling.rows import Filtered, ProcessedRows, upload

FILTER_ROWS = 128  # at a time: the filters work on several copies of their logits


@dataclass
class SamplingRows:
    """Per-row sampling state on the device, [s] each."""

    slots: Tensor  # int32
    temperature: Tensor  # float32
    seed: Tensor  # int64
    position: Tensor  # int32, position the sampled token will have
    suppressed: Tensor  # int32, or -1

    @classmethod
    def upload(cls, plan: StepPlan, position: np.ndarray, staging: StagingRing) -> SamplingRows:
        rows = len(plan.sample_slots)
        data = staging.upload(
            [
                plan.seed.view(np.int32),
                plan.sample_slots,
                plan.temperature.view(np.int32),
                position.astype(np.int32),
                plan.suppressed,
            ]
        )
        slots, temperature, position_, suppressed = data[2 * rows :].view(4, rows)
        return cls(
            slots, temperature.view(torch.float32), data[: 2 * rows].view(torch.int64), position_, suppressed
        )


class Sampler:
    """Samples a step's rows and records their tokens in last_token (int32 [slots + 1])."""

    def __init__(
        self,
        ops: ModuleType,
        vocab_size: int,
        config: EngineConfig,
        device: torch.device,
        staging: StagingRing,
        last_token: Tensor,
    ) -> None:
        self._ops, self._vocab_size = ops, vocab_size
        self._staging, self._last_token = staging, last_token
        self._history = TokenHistory(config.max_num_seqs, config.max_seq_len + 1, device, staging)
        self._extras: list[ExtraRow] = []  # what the two below were made of
        self._processed: ProcessedRows | None = None
        self._reported: ReportedRows | None = None

    @torch.inference_mode()
    def warm_up(self, dummy_slot: int) -> None:
        """Run what would otherwise be compiled when the first request needs it."""
        logits = torch.zeros((1, self._vocab_size), device=self._last_token.device)
        slot = torch.full((1,), dummy_slot, dtype=torch.int32, device=logits.device)
        one = torch.ones_like(slot)
        kept = top_k_top_p_mask(logits, one, one / 2)
        logits.masked_fill_(~kept, processors.NEVER)
        self._ops.sample(logits, one.float(), one.long(), one, None, (self._last_token, slot))

    def sample(self, logits: Tensor, plan: StepPlan, position: np.ndarray) -> Tensor:
        """Tokens int32 [s] of logits [s, V] for rows that ask for nothing else."""
        rows = SamplingRows.upload(plan, position, self._staging)
        record = (self._last_token, rows.slots)
        return self._ops.sample(logits, rows.temperature, rows.seed, rows.position, rows.suppressed, record)

    def sample_extras(
        self, logits: Tensor, tokens: Tensor, plan: StepPlan, position: np.ndarray
    ) -> tuple[Tensor, Report | None]:
        """Sample the rows of plan.extras anew, into `tokens` (int32 [s], from `sample` or a graph).

        logits [s or more, V]; position int32 [s], of the sampled tokens. Returns what to read back: tokens,
        and behind them what the report holds.
        """
        if plan.extras != self._extras:
            self._compose(plan)
        if self._processed is not None:
            self._sample_processed(self._processed, logits, tokens, position)
        if self._reported is None:
            return tokens, None
        return self._reported.take(logits, tokens)

    def _compose(self, plan: StepPlan) -> None:
        self._extras = plan.extras
        reported = [r for r in plan.extras if r.request.reports_logits]
        self._reported = ReportedRows(reported, self._staging) if reported else None
        processed = [r for r in plan.extras if r.request.changes_logits]
        self._processed = None
        if processed:
            self._processed = ProcessedRows(processed, plan, self._vocab_size, self._staging, self._history)

    def _sample_processed(
        self, rows: ProcessedRows, logits: Tensor, tokens: Tensor, position: np.ndarray
    ) -> None:
        host_position = position[rows.host_rows].astype(np.int32)
        columns = [host_position]
        if rows.guided:
            # A row whose owner has left meanwhile gets its last mask; its token is dropped.
            columns.append(np.stack([guide.mask_without(suppressed) for guide, suppressed in rows.grammars]))
        position_, *masks = upload(self._staging, columns)
        own = logits[rows.rows].float()
        self._penalise(own, rows, position_, host_position)
        if rows.bias is not None:
            processors.add_bias(own, *rows.bias)
        changed = rows.bias is not None or rows.repetition is not None or rows.counts is not None
        if changed:
            processors.keep_finite(own)
        before_bad_words = None
        if rows.guided:
            index = rows.guided[0]
            model = logits[rows.rows[index]].float() if changed else None
            before_bad_words = self._before_bad_words(own, index, masks[0], model)
        if rows.words is not None:
            processors.mask_bad_words(own, rows.words, self._history.tokens, position_)
        if rows.suppresses:
            processors.suppress_tokens(own, rows.suppressed)
        if rows.guided and before_bad_words is not None:
            processors.allow_only(own, rows.guided[0], masks[0], before_bad_words)
        if rows.filtered is not None:
            self._filter(own, rows.filtered, rows.temperature)
        record = (self._last_token, rows.slots)
        chosen = self._ops.sample(own, rows.temperature, rows.seed, position_, None, record)
        tokens[rows.rows] = chosen
        if rows.recorded:
            index, slots = rows.recorded
            self._history.record(slots, position_[index], chosen[index])

    def _before_bad_words(self, own: Tensor, index: Tensor, mask: Tensor, model: Tensor | None) -> Tensor:
        """Logits of guided rows before words are suppressed: `model`, the model's own if they were changed,
        where the changes leave nothing that the guide allows."""
        if model is None:
            return own[index]
        before_bad_words = own[index]
        # What would be -inf over some temperature.
        own[index] = before_bad_words.masked_fill_(before_bad_words < -processors.LARGEST, processors.NEVER)
        processors.allow_only(before_bad_words, torch.arange(len(index), device=own.device), mask, model)
        return before_bad_words

    def _filter(self, own: Tensor, filtered: Filtered, temperature: Tensor) -> None:
        columns = (filtered.index, filtered.top_k, filtered.top_p)
        for index, top_k, top_p in zip(*(column.split(FILTER_ROWS) for column in columns), strict=True):
            logits = own[index]
            kept = top_k_top_p_mask(logits / temperature[index].unsqueeze(1), top_k, top_p)
            own[index] = logits.masked_fill_(~kept, processors.NEVER)

    def _penalise(
        self, own: Tensor, rows: ProcessedRows, position: Tensor, host_position: np.ndarray
    ) -> None:
        repetition, counts = rows.repetition, rows.counts
        if repetition is not None:
            longest = int(host_position[rows.repetition_rows].max())
            tokens, _ = self._history.before(repetition.slots, position[repetition.index], longest)
            processors.penalise_repetition(own, repetition.index, tokens, repetition.penalty)
        if counts is not None:
            longest = int(host_position[rows.counts_rows].max())
            tokens, valid = self._history.before(counts.slots, position[counts.index], longest)
            generated = torch.arange(longest, device=own.device) >= counts.prompt_len.unsqueeze(1)
            processors.penalise_counts(
                own, counts.index, tokens, valid & generated, counts.presence, counts.frequency
            )
