# SPDX-License-Identifier: Apache-2.0
"""Drafts pause while they are not worth their cost, for longer each time, and come back when they are."""

from __future__ import annotations

import numpy as np

from flashinfer_backend.scheduler.draft_pace import FIRST_PAUSE, LONGEST_PAUSE, DraftPace


def drafted_steps(pace: DraftPace, slots: np.ndarray, accepted: int, steps: int) -> list[int]:
    """Which of so many steps have drafts, if each row accepts as many."""
    found = []
    for step in range(steps):
        if pace.offers(slots):
            found.append(step)
            pace.checked(slots, np.full(len(slots), accepted, np.int32))
    return found


def test_drafts_that_are_never_right_are_tried_ever_more_seldom() -> None:
    pace, slots = DraftPace(4), np.arange(2)
    tried = drafted_steps(pace, slots, 0, 2000)
    few = tried.index(next(step for step in tried if step >= FIRST_PAUSE))
    assert tried[:few] == list(range(few)) and few < 8
    pauses = np.diff(tried[few - 1 :]).tolist()
    assert pauses[:4] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE, 8 * FIRST_PAUSE]
    assert set(pauses[4:]) == {LONGEST_PAUSE}


def test_a_try_that_succeeds_ends_the_pause() -> None:
    pace, slots = DraftPace(4), np.arange(2)
    drafted_steps(pace, slots, 0, 300)
    found = drafted_steps(pace, slots, 3, 400)
    assert found[0] < LONGEST_PAUSE and found[1:] == list(range(found[0] + 1, 400))
    # From then on pauses begin with the shortest.
    again = drafted_steps(pace, slots, 0, 200)
    assert FIRST_PAUSE in np.diff(again)


def test_a_new_sequence_among_many_does_not_bring_drafts_back() -> None:
    pace, slots = DraftPace(20), np.arange(16)
    drafted_steps(pace, slots, 0, 40)
    pace.begin(3)
    assert not pace.offers(slots)
    assert pace.offers(slots[3:4])
