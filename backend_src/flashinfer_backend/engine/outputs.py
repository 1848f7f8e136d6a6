# SPDX-License-Identifier: Apache-2.0
"""Takes a step's output in: which rows still count, what they end with, what stubs are told with tokens."""

from __future__ import annotations

import bisect
import time
from dataclasses import dataclass, fields

import numpy as np

from flashinfer_backend.core.request import Request, backwards
from flashinfer_backend.core.step import StepOutput, StepPlan
from flashinfer_backend.scheduler.slot_table import SlotTable
from flashinfer_backend.transport import protocol


@dataclass
class Outcome:
    """Tokens of the rows that still have their owner, those of a row follow each other; arrays [n]."""

    rows: np.ndarray  # index into the step's sampling rows
    places: np.ndarray  # index into StepOutput.tokens
    turns: np.ndarray  # how many tokens of its row come before it
    slots: np.ndarray  # intp
    tokens: np.ndarray  # int32, NO_TOKEN where the end id was chosen
    codes: np.ndarray  # int32, protocol's finish codes
    first: np.ndarray  # bool, this is the sequence's first output


def accept(table: SlotTable, plan: StepPlan, tokens: np.ndarray, counts: np.ndarray | None = None) -> Outcome:
    """Record the tokens of `plan` (as in StepOutput) in `table`, those of a row up to its end; releases
    nothing."""
    slots = plan.sample_slots.astype(np.intp)
    rows = (table.epoch[slots] == plan.epochs).nonzero()[0]
    if counts is None:
        return _accept(table, rows, rows, slots[rows], tokens[rows], 0)
    rows = rows[counts[rows] > 0]
    first, parts = np.cumsum(counts) - counts, []
    for turn in range(int(counts.max(initial=1))):
        places = first[rows] + turn
        part = _accept(table, rows, places, slots[rows], tokens[places], turn)
        parts.append(part)
        rows = rows[(part.codes == protocol.RUNNING) & (counts[rows] > turn + 1)]
    order = np.argsort(np.concatenate([part.rows for part in parts]), kind="stable")
    columns = ([getattr(part, f.name) for part in parts] for f in fields(Outcome))
    return Outcome(*(np.concatenate(column)[order] for column in columns))


def _accept(
    table: SlotTable, rows: np.ndarray, places: np.ndarray, slots: np.ndarray, tokens: np.ndarray, turn: int
) -> Outcome:
    """One token of each of `rows`, whose slots are `slots` [n]."""
    known = table.known[slots]
    table.tokens[slots, known] = tokens
    known += 1
    table.known[slots] = known
    outputs = known - table.prompt_len[slots]
    ended = tokens == table.end_id[slots]
    if len(table.end_ids):
        others = (tokens[:, None] == table.end_ids).any(axis=1)
        # Before min_tokens there is one only where a grammar allows nothing else.
        ended |= table.any_end[slots] & others & (outputs > table.min_tokens[slots])
    codes = np.full(len(slots), protocol.RUNNING, np.int32)
    codes[outputs >= table.max_new[slots]] = protocol.FINISHED_LENGTH
    codes[ended] = protocol.FINISHED_END_ID
    for i in (table.stops[slots] & ~ended).nonzero()[0].tolist():
        if _ends_with_stop_sequence(table, int(slots[i])):
            codes[i] = protocol.FINISHED_STOP_WORDS
    tokens[ended] = protocol.NO_TOKEN
    turns = np.full(len(slots), turn, np.int32)
    return Outcome(rows, places, turns, slots, tokens, codes, first=outputs == 1)


def _ends_with_stop_sequence(table: SlotTable, slot: int) -> bool:
    request = table.requests[slot]
    assert request is not None
    stops, longest = request.stops_backwards
    known, start = int(table.known[slot]), int(table.prompt_len[slot])
    said = backwards(table.tokens[slot, max(start, known - longest) : known])
    at = bisect.bisect_right(stops, said)
    return at > 0 and said.startswith(stops[at - 1])


def end_grammars(outcome: Outcome, output: StepOutput) -> None:
    """End (in outcome.codes) sequences whose grammar lets nothing follow."""
    if output.grammar_ends:
        ended = np.isin(outcome.rows, output.grammar_ends) & (outcome.codes == protocol.RUNNING)
        if output.counts is not None:
            ended &= outcome.turns == output.counts[outcome.rows] - 1
        outcome.codes[ended] = protocol.FINISHED_END_ID


def row_reports(
    table: SlotTable, outcome: Outcome, output: StepOutput
) -> dict[int, list[protocol.RowReport]]:
    """What rows asked for besides their tokens, by stub pid.

    A row without a token (its end id was chosen) has no log probability and no logits, so there are
    as many of them as tokens.
    """
    by_index: dict[int, protocol.RowReport] = {}

    def report(index: int) -> protocol.RowReport:
        if (found := by_index.get(index)) is None:
            local_id = int(table.local_id[outcome.slots[index]])
            found = by_index[index] = protocol.RowReport(local_id, int(outcome.turns[index]))
        return found

    if output.log_probs or output.generation_logits:
        carries = outcome.tokens != protocol.NO_TOKEN
        index_of = {int(outcome.places[i]): i for i in carries.nonzero()[0].tolist()}
        for place, log_prob in output.log_probs:
            if place in index_of:
                report(index_of[place]).log_prob = log_prob
        for place, top in output.top_logprobs:
            if place in index_of:
                report(index_of[place]).top_logprobs = top
        for place, logits in output.generation_logits:
            if place in index_of:
                report(index_of[place]).generation_logits = logits
    for index in outcome.first.nonzero()[0].tolist():
        request = table.requests[outcome.slots[index]]
        assert request is not None
        report(index).queue_ns = queue_ns(request)
        if request.context_logits is not None:
            report(index).context_logits = memoryview(request.context_logits).cast("B")
            request.context_logits = None
        if request.prompt_log_probs:
            report(index).prompt_log_probs = np.concatenate(request.prompt_log_probs).tobytes()
            request.prompt_log_probs = []
        if request.params.perf_metrics:
            request.last_token_ns = request.first_token_ns
            report(index).perf = perf_of(request)
    for index in (outcome.codes != protocol.RUNNING).nonzero()[0].tolist():
        request = table.requests[outcome.slots[index]]
        if request is not None and request.params.perf_metrics:
            request.last_token_ns = time.time_ns()
            report(index).perf = perf_of(request)
    result: dict[int, list[protocol.RowReport]] = {}
    for index, row_report in by_index.items():
        result.setdefault(int(table.stub[outcome.slots[index]]), []).append(row_report)
    return result


def queue_ns(request: Request) -> int:
    """How long a request waited for its first step, or has waited so far. It travels with the first thing
    that a stub hears of the request, so that none is missed however it ends."""
    until = request.first_scheduled_ns or time.time_ns()
    return max(0, until - request.arrival_ns)  # the wall clock may have been set back


def perf_of(request: Request) -> protocol.Perf:
    """Times and block counts of a request whose first or last token has been read."""
    return protocol.Perf(*(getattr(request, name) for name in protocol.Perf.__struct_fields__))
