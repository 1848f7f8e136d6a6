# SPDX-License-Identifier: Apache-2.0
"""Chooses tokens from logits.

`ops.sample` makes every choice, so that a seed gives the same tokens on every path. Rows that ask for
nothing else cost nothing else. Those that change their logits are sampled again, from a float32 copy
that is changed in this order: allowed ids, penalties, bias, bad words, end ids until min_tokens, grammar,
temperature, top-k, top-p, min-p. The model's logits stay unchanged for reports.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.sampling_params import NO_TOKEN_LEFT
from flashinfer_backend.core.step import StepOutput, StepPlan
from flashinfer_backend.ops.staging import StagingRing
from flashinfer_backend.ops.torch_ops import LARGEST_LOGIT, keep_finite
from flashinfer_backend.sampling import processors
from flashinfer_backend.sampling.filters import min_p_mask, top_k_top_p_mask
from flashinfer_backend.sampling.history import TokenHistory
from flashinfer_backend.sampling.logprobs import Report, ReportedRows
from flashinfer_backend.sampling.rows import FEW, Filtered, ProcessedRows, upload
from flashinfer_backend.sampling.state import SequenceStates, StatefulRow
from flashinfer_backend.structured.masks import Move, SequenceGrammars

FILTER_ROWS = 128  # at a time: the filters work on several copies of their logits


@dataclass
class SamplingRows:
    """Per-row sampling state on the device, [n] each."""

    slots: Tensor  # int32
    temperature: Tensor  # float32
    seed: Tensor  # int64
    suppressed: Tensor  # int32, or -1

    @classmethod
    def upload(cls, plan: StepPlan, staging: StagingRing) -> SamplingRows:
        """A row for each token that is sampled."""
        columns = [plan.seed, plan.sample_slots, plan.temperature, plan.suppressed]
        if len(plan.drafted_rows):
            columns = [np.repeat(column, plan.samples) for column in columns]
        rows = len(columns[0])
        data = staging.upload([column.view(np.int32) for column in columns])
        slots, temperature, suppressed = data[2 * rows :].view(3, rows)
        return cls(slots, temperature.view(torch.float32), data[: 2 * rows].view(torch.int64), suppressed)


@dataclass
class Sampled:
    """A step's sampling, to be read: its readback, its reports, and failed rows with the reason."""

    readback: Tensor  # int32 [s + n]: tokens, and behind them log probabilities
    reports: list[Report] = field(default_factory=list)
    failed: list[tuple[int, str]] = field(default_factory=list)
    guided: list[StatefulRow] = field(default_factory=list)  # the last token of each row with a grammar
    limited: list[StatefulRow] = field(default_factory=list)  # and of each with allowed ids


class Sampler:
    """Samples a step's rows and records their tokens in last_token (int32 [slots + 1]). Owns the state of
    sequences that ask for more than a temperature.

    lengths: int32 [slots + 1], tokens in the cache behind the step, all drafts included; drafts int32
    [slots + 1, k], those that the step checks.
    """

    def __init__(
        self,
        ops: ModuleType,
        vocab_size: int,
        config: EngineConfig,
        device: torch.device,
        staging: StagingRing,
        last_token: Tensor,
        lengths: Tensor,
        drafts: Tensor,
    ) -> None:
        self._ops, self._vocab_size = ops, vocab_size
        self._staging, self._last_token, self._lengths, self._drafts = staging, last_token, lengths, drafts
        self._history = TokenHistory(config.max_num_seqs, config.max_seq_len + 1, device, staging)
        self.grammars = SequenceGrammars(vocab_size)
        self._states = SequenceStates(self.grammars, self._history)
        # What the last composition of rows was made to, and of what.
        self._composed: list[StatefulRow] | None = None
        self._processed: ProcessedRows | None = None
        self._reported: ReportedRows | None = None

    def update(self, plan: StepPlan) -> None:
        """Take in which sequences are new and which are gone; before anything of the plan is sampled."""
        if plan.new or plan.freed:
            self._states.update(plan)

    def guided(self, plan: StepPlan) -> list[StatefulRow]:
        """Rows that can be sampled only after the tokens of all earlier steps were read."""
        return [row for row in self._states.rows(plan) if row.state.grammar is not None]

    def sample(self, logits: Tensor, position: Tensor, plan: StepPlan) -> Tensor:
        """Tokens int32 [n], behind each of the plan's sampled_tokens, for rows that ask for nothing else.
        logits [n, V]; position int32 [n], of the tokens that are sampled. A row's last sample is recorded
        as its last token."""
        rows = SamplingRows.upload(plan, self._staging)
        record = (self._last_token, rows.slots)
        return self._ops.sample(logits, rows.temperature, rows.seed, position, rows.suppressed, record)

    def sample_stateful(self, logits: Tensor, tokens: Tensor, plan: StepPlan) -> Sampled:
        """Sample the stateful rows anew, into `tokens` (int32 [n], from `sample` or a graph), and report what
        they ask for. logits [n or more, V]. Before drafts are accepted: each token of a row with drafts is
        sampled as if the drafts before it were accepted.

        What fails is tried again row by row: it fails those alone that it is about.
        """
        rows = self._states.rows(plan)
        last = [row for row in rows if not row.behind]
        guided = [row for row in last if row.state.grammar is not None]
        sampled = Sampled(tokens, guided=guided, limited=[r for r in last if r.state.params.allowed_ids])
        if sampled.guided:
            self.grammars.wait()
            for row in sampled.guided:
                if row.state.grammar is not None and row.state.grammar.problem is not None:
                    sampled.failed.append((row.row, row.state.grammar.problem))
        try:
            if rows != self._composed:
                self._compose(rows, plan)
            if self._processed is not None:
                self._sample_processed(self._processed, logits, tokens)
            if self._reported is not None:
                sampled.readback, report = self._reported.take(logits, tokens)
                sampled.reports = [report]
        except Exception:
            self._composed = None
            self._one_by_one(rows, logits, tokens, plan, sampled)
        return sampled

    def _compose(self, rows: list[StatefulRow], plan: StepPlan) -> None:
        self._composed = None
        self._processed = self._reported = None
        reported = [r for r in rows if r.state.params.reports_logits]
        if reported:
            self._reported = ReportedRows(reported, self._staging)
        processed = [r for r in rows if r.processed]
        if processed:
            self._processed = ProcessedRows(processed, plan, self._vocab_size, self._staging)
        self._composed = rows

    def _one_by_one(
        self, rows: list[StatefulRow], logits: Tensor, tokens: Tensor, plan: StepPlan, sampled: Sampled
    ) -> None:
        if tokens.is_cuda:
            torch.cuda.synchronize()  # raises where the device, not a row, is what failed
            torch.cuda.empty_cache()
        sampled.readback, sampled.reports = tokens, []
        reported = []
        for number, group in groupby(rows, key=lambda row: row.row):
            own = list(group)
            try:
                if own[0].processed:
                    processed = ProcessedRows(own, plan, self._vocab_size, self._staging)
                    self._sample_processed(processed, logits, tokens)
                if own[0].state.params.reports_logits:
                    ReportedRows(own, self._staging).take(logits, tokens)
                    reported += own
            except Exception as error:
                sampled.failed.append((number, f"{type(error).__name__}: {error}"))
        if reported:
            try:
                sampled.readback, report = ReportedRows(reported, self._staging).take(logits, tokens)
                sampled.reports = [report]
            except Exception as error:  # each of them works, all of them do not
                why = f"{type(error).__name__}: {error}"
                sampled.failed += [(row, why) for row in dict.fromkeys(row.row for row in reported)]

    def forced(self, sampled: Sampled, most: int) -> list[tuple[int, int, list[int]]]:
        """What the grammars of a sampled step let its rows go on with alone, from the step's tokens on:
        (slot, position of the first, up to `most` tokens). Between sample_stateful() and read()."""
        found = []
        for row in sampled.guided:
            grammar = row.state.grammar
            if grammar is None or grammar.ended or grammar.problem is not None:
                continue
            if len(tokens := grammar.forced(most)) > 1:  # one alone has been sampled
                found.append((row.slot, row.state.prompt_len + grammar.tokens, tokens))
        return found

    def read(
        self,
        sampled: Sampled,
        plan: StepPlan,
        values: np.ndarray,
        counts: np.ndarray | None = None,
        drafts: np.ndarray | None = None,
    ) -> StepOutput:
        """What a step came to; begins to move its grammars on by the tokens. values: the readback on the
        host; counts: StepOutput's; drafts: int32 [len(sampled.guided), k], of their slots' next rows."""
        output = StepOutput(values[: len(plan.sampled_tokens)])
        for report in sampled.reports:
            report.read(values, output)

        def tokens_of(row: StatefulRow) -> list[int]:
            kept = 1 if counts is None else int(counts[row.row])
            first = row.at + 1 - int(plan.samples[row.row])
            found: list[int] = values[first : first + kept].tolist()
            return found

        stuck = {
            row.row: found.index(row.state.marker)
            for row in sampled.limited
            if row.state.marker in (found := tokens_of(row))
        }
        if stuck:
            output.failed = [(row, NO_TOKEN_LEFT) for row in stuck]
            counts = np.ones_like(plan.samples) if counts is None else counts
            counts[list(stuck)] = list(stuck.values())
        moves, rows = [], []
        for i, row in enumerate(sampled.guided):
            tokens, end_id, grammar = tokens_of(row), row.state.params.end_id, row.state.grammar
            # The end id ends the sequence, and so does a grammar that lets nothing follow, perhaps after this
            # step was planned. One that is gone has nothing to follow.
            ended = end_id in tokens or row.row in stuck or row.state not in self._states
            if not ended and grammar is not None and not grammar.ended and grammar.problem is None:
                moves.append(Move(grammar, tokens, () if drafts is None else drafts[i].tolist()))
                rows.append(row)
        self.grammars.advance(moves)
        if any(row.state.params.end_id < 0 for row in rows):  # these can end here, amid what was accepted
            for row, move, followed in zip(rows, moves, self.grammars.followed(), strict=True):
                if row.state.params.end_id < 0 and move.grammar.ended:
                    output.grammar_ends.append(row.row)
                    if counts is not None:
                        counts[row.row] = followed
        if counts is not None:
            output.keep(plan.samples, counts)
        return output

    def _sample_processed(self, rows: ProcessedRows, logits: Tensor, tokens: Tensor) -> None:
        masks = []
        if rows.guided:
            # A row whose owner has left meanwhile gets its last mask; its token is dropped.
            masks = upload(self._staging, [self.grammars.stacked(rows.grammars, rows.masks)])
        position = self._lengths[rows.slots] - rows.behind
        if rows.checked:
            index, slots, drafts = rows.checked
            self._history.record(slots, position[index], self._drafts[slots, drafts])
        changed = rows.bias is not None or rows.penalties is not None
        own = self._ops.copy_rows(logits, rows.rows, bounded=changed)
        if rows.allowed is not None:
            self._ops.keep_allowed(own, rows.allowed.rows, rows.allowed.mask)
        model = own[rows.guided[0]] if rows.guided and changed else None
        if rows.penalties is not None:
            self._ops.penalise(own, rows.penalties, self._history.tokens, position)
        if rows.bias is not None:
            processors.add_bias(own, *rows.bias)
            keep_finite(own)
        before_bad_words = None
        if rows.guided and not changed and rows.words is None and not rows.suppresses:
            # Nothing but its grammar forbids a token, so no row can be left without one.
            self._ops.keep_allowed(own, rows.guided[0], masks[0])
        elif rows.guided:
            before_bad_words = self._before_bad_words(own, rows.guided[0], masks[0], model)
        if rows.words is not None:
            processors.mask_bad_words(own, rows.words, self._history.tokens, position)
        if rows.suppresses:
            processors.suppress_tokens(own, rows.suppressed)
        if rows.guided and before_bad_words is not None:
            processors.allow_only(own, rows.guided[0], masks[0], before_bad_words)
        if rows.allowed is not None:
            processors.mark_stuck(own, rows.allowed)
        if rows.few is not None and own.is_cuda:
            from flashinfer_backend.ops.triton_filters import keep_likeliest  # not where there is no GPU

            few = rows.few
            keep_likeliest(own, few.index, rows.temperature, few.top_k, few.top_p, few.min_p, FEW)
        elif rows.few is not None:
            self._filter(own, rows, rows.few)
        if rows.filtered is not None:
            self._filter(own, rows, rows.filtered)
        record = (self._last_token, rows.slots)
        chosen = self._ops.sample(own, rows.temperature, rows.seed, position, None, record)
        tokens[rows.rows] = chosen
        if rows.recorded:
            index, slots = rows.recorded
            # After the first wrong draft these are also wrong; the next step overwrites them.
            self._history.record(slots, position[index], chosen[index])

    def warm_up_masks(self, device: torch.device) -> None:
        """Run what masks need once, so that no request is the first."""
        words = torch.zeros(1, -(-self._vocab_size // 32), dtype=torch.int32, device=device)
        logits = torch.zeros(1, self._vocab_size, device=device)
        index = torch.zeros(1, dtype=torch.int64, device=device)
        self._ops.keep_allowed(logits, index, words)
        for model in (None, logits.clone()):  # of a grammar alone, and next to what changes logits
            before = self._before_bad_words(logits, index, words, model)
            processors.allow_only(logits, index, words, before)

    def _before_bad_words(self, own: Tensor, index: Tensor, mask: Tensor, model: Tensor | None) -> Tensor:
        """Logits of guided rows before words are suppressed: `model`, the model's of allowed ids if they were
        changed, where the changes leave nothing that the grammar allows."""
        if model is None:
            return own[index]
        before_bad_words = own[index]
        # What would be -inf over some temperature.
        own[index] = before_bad_words.masked_fill_(before_bad_words < -LARGEST_LOGIT, processors.NEVER)
        processors.allow_only(before_bad_words, torch.arange(len(index), device=own.device), mask, model)
        return before_bad_words

    def _filter(self, own: Tensor, rows: ProcessedRows, filtered: Filtered) -> None:
        columns = (filtered.index, filtered.top_k, filtered.top_p, filtered.min_p)
        for index, top_k, top_p, min_p in zip(*(c.split(FILTER_ROWS) for c in columns), strict=True):
            logits = own[index]
            scaled = logits / rows.temperature[index].unsqueeze(1)
            kept = top_k_top_p_mask(scaled, top_k, top_p, rows.limited or rows.few is filtered)
            if rows.min_p:
                kept &= min_p_mask(scaled, min_p)
            own[index] = logits.masked_fill_(~kept, processors.NEVER)
