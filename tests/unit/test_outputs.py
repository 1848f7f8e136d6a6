# SPDX-License-Identifier: Apache-2.0
"""What a step's tokens come to: several of a row, and where a sequence ends among them."""

from typing import Any

import numpy as np
import pytest

from flashinfer_backend.core.request import Request
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.core.step import Feeds, StepPlan, greedy_plan
from flashinfer_backend.engine.outputs import accept
from flashinfer_backend.scheduler.slot_table import SlotTable
from flashinfer_backend.transport.protocol import (
    FINISHED_END_ID,
    FINISHED_LENGTH,
    FINISHED_STOP_WORDS,
    NO_TOKEN,
    RUNNING,
    RowReport,
    pack_tokens,
    with_reports,
)

R, E, L, S = RUNNING, FINISHED_END_ID, FINISHED_LENGTH, FINISHED_STOP_WORDS


def table_of(*params: SamplingParams) -> SlotTable:
    """Each sequence has a prompt of two tokens, and its handle's slot."""
    table = SlotTable(len(params), 64, end_ids=(7, 8))
    for handle, each in enumerate(params):
        prompt = np.array([1, 2], np.int32)
        request = Request(handle=handle, prompt=prompt, params=each, max_new=each.max_tokens)
        assert table.occupy(request, 1, 0) == handle
    return table


def plan_of(table: SlotTable) -> StepPlan:
    slots = np.arange(len(table.requests), dtype=np.int32)
    return greedy_plan(
        slots, 2, 1, Feeds.LAST, epochs=table.epoch.copy(), temperature=table.temperature, seed=table.seed
    )


@pytest.mark.parametrize(
    ("options", "tokens", "kept", "codes"),
    [
        ({}, [3, 4, 5], [3, 4, 5], [R, R, R]),
        ({"max_tokens": 2}, [3, 4], [3, 4], [R, L]),
        ({"end_id": 4}, [3, 4, 5], [3, NO_TOKEN], [R, E]),
        ({"end_id": 7, "min_tokens": 2}, [3, 6, 8, 5], [3, 6, NO_TOKEN], [R, R, E]),
        ({"stop_sequences": [[3, 4]]}, [3, 4, 5], [3, 4], [R, S]),
        ({"stop_sequences": [[2, 3]]}, [3, 4, 5], [3, 4, 5], [R, R, R]),  # half of it is the prompt's
    ],
)
def test_a_sequence_may_end_amid_its_tokens(
    options: dict[str, Any], tokens: list[int], kept: list[int], codes: list[int]
) -> None:
    other = SamplingParams(max_tokens=9, end_id=-1)
    table = table_of(other, SamplingParams(**{"max_tokens": 9, "end_id": -1, **options}), other)
    flat = np.array([5, *tokens, 4, 6], np.int32)
    outcome = accept(table, plan_of(table), flat, np.array([1, len(tokens), 2]))
    assert outcome.rows.tolist() == outcome.slots.tolist() == [0, *[1] * len(kept), 2, 2]
    assert outcome.tokens.tolist() == [5, *kept, 4, 6]
    assert outcome.codes.tolist() == [R, *codes, R, R]
    assert outcome.first.tolist() == [True, True, *[False] * (len(kept) - 1), True, False]
    assert table.known.tolist() == [3, 2 + len(kept), 4]


def test_tokens_of_a_slot_that_has_another_owner_are_dropped() -> None:
    each = SamplingParams(max_tokens=9, end_id=-1)
    table = table_of(each, each)
    plan = plan_of(table)
    table.vacate(0)
    outcome = accept(table, plan, np.array([3, 4, 5, 6], np.int32), np.array([2, 2]))
    assert outcome.rows.tolist() == [1, 1] and outcome.tokens.tolist() == [5, 6]


def test_a_report_comes_with_the_token_that_it_is_about() -> None:
    ids, tokens, codes = np.array([[5, 4, 4, 4, 6], [9, 1, 2, 3, 8], [R, R, R, L, R]])
    five, first, last = RowReport(5, queue_ns=1), RowReport(4, queue_ns=2), RowReport(4, turn=2, log_prob=0.0)
    rows = list(with_reports(pack_tokens(ids, tokens, codes), [last, five, first]))
    assert rows == [(5, 9, R, five), (4, 1, R, first), (4, 2, R, None), (4, 3, L, last), (6, 8, R, None)]
