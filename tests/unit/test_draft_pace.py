# SPDX-License-Identifier: Apache-2.0
"""How many drafts steps have: as many as pay by given costs, none where none do, and tries now and then."""

import numpy as np
import pytest

from flashinfer_backend.core.draft_counts import SIZES, STEP_TOKENS, draft_counts, drafted_shapes
from flashinfer_backend.scheduler.draft_pace import (
    LEAST_HOPED,
    RAREST,
    TRIES,
    WORTH,
    DraftPace,
    best_count,
    relative_costs,
    unmeasured,
)

# As on a GPU: weights are read in 4 ms, whatever the tokens up to some 200; each draft takes 0.3 ms.
DENSE = {(size, count): 4.0 + max(0, size * (1 + count) - 200) * 0.03 + 0.3 * count
         for size in (1, 4, 16, 64, 256) for count in (0, 1, 3)}  # fmt: skip
# As of a mixture of experts: up to some 64 tokens, each one reads more of them.
EXPERTS = {(size, count): 1.0 + min(size * (1 + count), 64) / 16 + 0.1 * count
           for size in (1, 4, 16, 64, 256) for count in (0, 1, 3)}  # fmt: skip

# An 8B model and an EAGLE-3 head on an H100, in ms.
BFLOAT16 = {(1, 0): 5.37, (1, 1): 5.77, (1, 3): 6.39, (16, 0): 5.53, (16, 1): 6.13, (16, 3): 7.01,
            (64, 0): 6.02, (64, 1): 6.79, (64, 3): 8.66}  # fmt: skip
FP8 = {(1, 0): 3.12, (1, 1): 3.58, (1, 3): 4.04, (16, 0): 3.43, (16, 1): 3.92, (16, 3): 4.75,
       (64, 0): 3.98, (64, 1): 4.86, (64, 3): 6.17}  # fmt: skip


def run(pace: DraftPace, slots: np.ndarray, right: float, steps: int, seed: int = 0) -> list[int]:
    """How many drafts each step has, if each is right with this chance."""
    generator, found = np.random.default_rng(seed), []
    for _ in range(steps):
        found.append(count := pace.offers(slots, len(slots)))
        if count:
            accepted = (generator.random((len(slots), count)) < right).cumprod(1).sum(1)
            pace.checked(slots, np.full(len(slots), count), accepted)
    return found


def test_counts_are_halves_and_steps_stay_small() -> None:
    assert draft_counts(1, 3) == [1, 3] and draft_counts(1, 4) == [1, 2, 4] and draft_counts(1, 0) == []
    assert draft_counts(SIZES[-1], 15) == [1] and draft_counts(SIZES[-1] + 1, 15) == []
    for rows in range(1, 140):
        counts = draft_counts(rows, 15)
        assert all(rows * (1 + count) <= STEP_TOKENS for count in counts)
        # The graph of the next larger size has the same.
        assert {count for size, count in drafted_shapes([1, 128, 130], 15) if size >= rows} >= set(counts)
    assert drafted_shapes([4, 12], 3)[-1] == (12, 3)
    assert not drafted_shapes([256], 3)
    assert unmeasured(64, 3)[64, 3] == 1 + 64 * 4 / 64 + 3 / 32 and unmeasured(64, 3)[1, 0] == 1 + 1 / 64


@pytest.mark.parametrize(
    "costs", [DENSE, EXPERTS, unmeasured(256, 3)], ids=["dense", "experts", "unmeasured"]
)
def test_the_best_count_is_that_of_all_expected_rates(costs: dict[tuple[int, int], float]) -> None:
    counts, ratios = relative_costs(costs, 256, 3)
    assert counts.tolist() == [1, 3]
    for rows in (1, 3, 16, 50, 128):
        size = next(size for size in sorted({size for size, _ in costs}) if size >= rows)
        for chance in (0.0, 0.2, 0.5, 0.9):
            rates = {
                count: sum(chance**power for power in range(count + 1)) * costs[size, 0] / costs[size, count]
                for count in draft_counts(rows, 3)
            }
            best, speed = best_count(np.full(rows, chance), rows, counts, ratios[rows])
            assert np.isclose(speed, max(rates.values())) and np.isclose(rates[best], speed)
    assert np.isinf(ratios[129:]).all() and np.isinf(ratios[0]).all()


def test_rows_that_take_no_drafts_wait_for_those_that_do() -> None:
    counts, ratios = relative_costs(DENSE, 16, 3)
    all_take = best_count(np.full(16, 0.6), 16, counts, ratios[16])[1]
    few_take = best_count(np.full(2, 0.6), 16, counts, ratios[16])[1]
    assert all_take > WORTH > few_take


def test_few_rows_have_all_drafts_and_more_rows_fewer() -> None:
    pace = DraftPace(256, 3, DENSE)
    found = [run(pace, np.arange(rows), 0.7, 200)[-1] for rows in (1, 16, 64, 100, 200)]
    assert found == [3, 3, 1, 0, 0]  # 100 rows would take as long as 256
    assert [pace.most(rows) for rows in (1, 64, 128, 129)] == [3, 3, 1, 0]


def test_experts_that_more_tokens_read_lower_the_count() -> None:
    found = {rows: run(DraftPace(256, 3, EXPERTS), np.arange(rows), 0.6, 400)[200:] for rows in (1, 4, 16)}
    most_often = {rows: max(set(counts), key=counts.count) for rows, counts in found.items()}
    assert most_often == {1: 3, 4: 1, 16: 0}


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("costs", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("right", [0.0, 0.1, 0.54, 0.8])
def test_no_acceptance_makes_it_slower(right: float, costs: dict[tuple[int, int], float], rows: int) -> None:
    """Over many steps, counted from the first one; and what pays well is used nearly always."""
    pace, slots, generator = DraftPace(rows, 3, costs), np.arange(rows), np.random.default_rng(1)
    seconds = tokens = 0.0
    for _ in range(3000):
        count = pace.offers(slots, rows)
        accepted = (generator.random((rows, count)) < right).cumprod(1).sum(1)
        seconds += costs[rows, count] / costs[rows, 0]
        tokens += 1 + accepted.mean()
        if count:
            pace.checked(slots, np.full(rows, count), accepted)
    counts, ratios = relative_costs(costs, rows, 3)
    best = max(1.0, best_count(np.full(rows, right), rows, counts, ratios[rows])[1])
    assert tokens / seconds > 0.97 * best and tokens / seconds > 0.99


def test_tries_of_wrong_drafts_become_rare() -> None:
    pace = DraftPace(4, 3, DENSE)
    found = run(pace, np.arange(1), 0.0, 4000)
    tried = np.flatnonzero(found)
    begin = int(np.flatnonzero(np.diff(tried) > 1)[0])
    spent = [DENSE[1, found[step]] / DENSE[1, 0] - 1 for step in tried]
    assert sum(spent[: begin + 1]) < 2  # steps' time, until it is clear
    gaps = np.diff(tried[begin:])
    assert gaps[0] == np.ceil(spent[begin + 1] / TRIES)
    assert (abs(gaps[1:] - np.minimum(2 * gaps[:-1], RAREST)) <= 1).all() and gaps[-1] == RAREST


def test_expensive_tries_are_as_rare_as_their_share_of_the_time_asks_for() -> None:
    tried = np.flatnonzero(run(DraftPace(1, 3, {(1, 0): 1.0, (1, 3): 2.4}), np.arange(1), 0.0, 2000))
    assert np.diff(tried)[-4:].tolist() == [np.ceil(1.4 / TRIES)] * 4 and 1.4 / TRIES > RAREST


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("costs", [BFLOAT16, FP8], ids=["bfloat16", "FP8"])
def test_wrong_drafts_cost_little_in_the_long_run(costs: dict[tuple[int, int], float], rows: int) -> None:
    pace = DraftPace(rows, 3, costs)
    found = run(pace, np.arange(rows), 0.0, 4000)[1000:]
    seconds = np.mean([costs[rows, count] / costs[rows, 0] for count in found])
    assert any(found) and seconds < 1.0025


def test_drafts_come_back_when_they_are_right_again() -> None:
    pace = DraftPace(4, 3, DENSE)
    run(pace, np.arange(1), 0.0, 1000)
    found = run(pace, np.arange(1), 1.0, RAREST + 200)
    first = int(np.flatnonzero(found)[0])
    assert first <= RAREST and found[first + 3 :] == [3] * (len(found) - first - 3)


def test_a_new_sequence_is_hoped_of_what_others_had() -> None:
    good, bad = DraftPace(4, 3, DENSE), DraftPace(4, 3, DENSE)
    run(good, np.arange(1), 0.9, 500)
    run(bad, np.arange(1), 0.0, 8000)
    assert bad._usual < LEAST_HOPED < good._usual < 1
    wasted = []
    for pace in (good, bad):
        pace.begin(2)
        wasted.append(run(pace, np.array([2]), 0.0, 100).count(3))
    assert wasted[0] > wasted[1] > 0


def test_a_new_sequence_among_many_does_not_bring_drafts_back() -> None:
    pace, slots = DraftPace(20, 3, DENSE), np.arange(16)
    run(pace, slots, 0.0, 2000)
    pace.begin(3)
    assert sum(pace.offers(slots, 16) > 0 for _ in range(10)) <= 1  # a try
    assert pace.offers(slots[3:4], 1)
