# SPDX-License-Identifier: Apache-2.0
"""What goes to stubs beside the tokens, and guides that follow the tokens."""

from __future__ import annotations

import time

import numpy as np

from flashinfer_backend.core.request import Request
from flashinfer_backend.engine.outputs import Outcome
from flashinfer_backend.sampling.logprobs import Report
from flashinfer_backend.scheduler.slot_table import SlotTable
from flashinfer_backend.structured.queue import GrammarQueue
from flashinfer_backend.transport import protocol


def row_extras(
    table: SlotTable, outcome: Outcome, report: Report | None, values: np.ndarray
) -> dict[int, list[protocol.RowExtras]]:
    """What rows asked for beside their tokens, by stub pid. values: the step's readback.

    A row without a token (its end id was chosen) has no log probability and no logits, so there are
    as many of them as tokens.
    """
    by_row: dict[int, protocol.RowExtras] = {}

    def extra(index: int) -> protocol.RowExtras:
        local_id = int(table.local_id[outcome.slots[index]])
        return by_row.setdefault(index, protocol.RowExtras(local_id))

    if report is not None:
        carries = outcome.tokens != protocol.NO_TOKEN
        index_of = {int(outcome.rows[i]): i for i in carries.nonzero()[0].tolist()}
        for row, log_prob in report.log_probs(values):
            if row in index_of:
                extra(index_of[row]).log_prob = log_prob
        for row, logits in report.generation_logits():
            if row in index_of:
                extra(index_of[row]).generation_logits = logits
    for index in outcome.first.nonzero()[0].tolist():
        request = table.requests[outcome.slots[index]]
        assert request is not None
        extra(index).queue_ns = queue_ns(request)
        if request.context_logits is not None:
            extra(index).context_logits = memoryview(request.context_logits).cast("B")
            request.context_logits = None
    for index in (outcome.codes != protocol.RUNNING).nonzero()[0].tolist():
        request = table.requests[outcome.slots[index]]
        if request is not None and request.params.perf_metrics:
            request.last_token_ns = time.time_ns()
            extra(index).perf = perf_of(request)
    result: dict[int, list[protocol.RowExtras]] = {}
    for index, row_extra in by_row.items():
        result.setdefault(int(table.stub[outcome.slots[index]]), []).append(row_extra)
    return result


def follow_grammars(table: SlotTable, outcome: Outcome, guides: GrammarQueue) -> list[tuple[Request, str]]:
    """Move the guides of a read step's rows on, and end (in outcome.codes) sequences whose guide lets
    nothing follow. Returns the requests that cannot go on, with why; of a token that did not follow its
    guide, nothing is sent."""
    rows = (table.guided[outcome.slots] & (outcome.codes == protocol.RUNNING)).nonzero()[0].tolist()
    moves = []
    for index in rows:
        request = table.requests[outcome.slots[index]]
        assert request is not None
        moves.append((request, int(outcome.tokens[index])))
    stuck = []
    for index, (request, _), error in zip(rows, moves, guides.follow(moves), strict=True):
        guide = request.grammar
        assert guide is not None
        if error is not None:
            outcome.tokens[index] = protocol.NO_TOKEN
            stuck.append((request, str(error)))
        elif guide.exhausted and guide.complete:
            outcome.codes[index] = protocol.FINISHED_END_ID
        elif guide.exhausted:
            stuck.append((request, guide.problem()))
    return stuck


def queue_ns(request: Request) -> int:
    """How long a request waited for its first step, or has waited so far. It travels with the first thing
    that a stub hears of the request, so that none is missed however it ends."""
    until = request.first_scheduled_ns or time.time_ns()
    return max(0, until - request.arrival_ns)  # the wall clock may have been set back


def perf_of(request: Request) -> protocol.Perf:
    """Times and block counts of a request whose last token has been read."""
    return protocol.Perf(
        arrival_ns=request.arrival_ns,
        first_scheduled_ns=request.first_scheduled_ns,
        first_token_ns=request.first_token_ns,
        last_token_ns=request.last_token_ns,
        new_blocks=request.new_blocks,
        reused_blocks=request.reused_blocks,
    )
