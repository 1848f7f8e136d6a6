# SPDX-License-Identifier: Apache-2.0
"""How many drafts pay: what a step with them costs, against how often they are right."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from flashinfer_backend.core.draft_counts import SIZES, draft_counts, drafted_shapes

Costs = Mapping[tuple[int, int], float]  # (rows, drafts of each) -> seconds of a step

WORTH = 1.02  # tokens per second with drafts, relative to steps without, from which on there are any
TRIES = 0.003  # of the time, at most, is spent on drafts that were not right of late
RAREST = 256  # steps from one such try to the next, at most, unless TRIES asks for more
MEMORY = 24.0  # drafts by which a sequence is judged
FORGETS = 1 / 64  # of that memory, in a step without drafts
HOPED, LEAST_HOPED = 0.7, 0.35  # chance that a draft of a new sequence is right: at first, and at least
NEW = 3.0  # drafts that count as seen of a new sequence
SLOW = 1 / 64  # share of a step in the chance that new sequences are given


def unmeasured(rows: int, most: int) -> Costs:
    """Costs of steps by rows, where none was timed: those of a device that is busy from
    64 tokens on."""
    shapes = drafted_shapes([min(rows, SIZES[-1])], most)
    return {
        (size, count): 1 + size * (1 + count) / 64 + count / 32
        for size, count in [*((size, 0) for size, _ in shapes), *shapes]
    }


class DraftPace:
    """Chooses how many drafts each row of a step is given, by the tokens per second that it expects.

    A draft is right with some chance, if all before it are: that of its sequence, as its last drafts were.
    So a row with k drafts yields 1 + p + ... + p^k tokens. All rows wait for each other's tokens, so their
    mean counts. Where no number of drafts pays, a step now and then tries some: after as many steps as TRIES
    asks for, then after twice as many each time, up to RAREST, until drafts pay again.
    """

    def __init__(self, slots: int, most: int, costs: Costs | None) -> None:
        """most: drafts of a row. costs: None or without entries if none was timed."""
        self._counts, self._ratios = relative_costs(costs or unmeasured(slots, most), slots, most)
        self._chance = np.full(slots, HOPED)
        self._seen = np.full(slots, NEW)
        self._usual = HOPED
        self._since = 0  # steps since drafts were tried, or paid
        self._failed = 0  # tries since drafts paid

    def begin(self, slot: int) -> None:
        """A sequence has come to a slot."""
        self._chance[slot], self._seen[slot] = max(self._usual, LEAST_HOPED), NEW

    def most(self, rows: int) -> int:
        """The most drafts of each row in a step of `rows`."""
        able = np.isfinite(self._ratios[rows])
        return int(self._counts[able].max()) if able.any() else 0

    def offers(self, slots: np.ndarray, rows: int) -> int:
        """How many drafts each row is to have in the step after the one that is being planned, of the same
        rows. slots: those of its rows that take drafts."""
        ratios = self._ratios[rows]
        if not len(slots) or not np.isfinite(ratios).any():
            return 0
        self._seen[slots] = np.maximum(self._seen[slots] * (1 - FORGETS), NEW)
        count, speed = best_count(self._chance[slots], rows, self._counts, ratios)
        if speed >= WORTH:
            self._since = self._failed = 0
            return count
        self._since += 1
        if self._since < steps_between_tries(float(ratios.min()) - 1, self._failed):
            return 0
        count, speed = best_count(np.full(len(slots), HOPED), rows, self._counts, ratios)
        extra = float(ratios[self._counts == count][0]) - 1
        if speed < WORTH or self._since < steps_between_tries(extra, self._failed):
            return 0
        self._since = 0
        self._failed += 1
        return count

    def checked(self, slots: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """How many drafts the rows of a step had, and accepted; int32 [n] each."""
        tried = accepted + (accepted < drafted)  # those behind a wrong one tell nothing
        seen = self._seen[slots] + tried
        self._chance[slots] += (accepted - tried * self._chance[slots]) / seen
        self._seen[slots] = np.minimum(seen, MEMORY)
        if total := tried.sum():
            self._usual += (accepted.sum() / total - self._usual) * SLOW


def steps_between_tries(extra: float, failed: int) -> float:
    """extra: what a try costs beyond a step without drafts, in such steps. failed: tries before it."""
    least = extra / TRIES
    return max(least, min(least * 2.0 ** min(failed, 30), RAREST))


def best_count(chances: np.ndarray, rows: int, counts: np.ndarray, ratios: np.ndarray) -> tuple[int, float]:
    """Which of `counts` drafts a row gives the most tokens per second, and how many more than none do.

    chances: of each row that takes drafts, that the next one is right. rows: of the step, with those that
    take none. ratios: what a step with that number of drafts costs, relative to one without."""
    powers = np.broadcast_to(chances, (counts[-1], len(chances))).cumprod(0)
    tokens = 1 + powers.sum(1).cumsum() / rows
    speeds = tokens[counts - 1] / ratios
    best = int(speeds.argmax())
    return int(counts[best]), float(speeds[best])


def relative_costs(costs: Costs, slots: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """(counts, ratios): how many drafts there are, int [c] ascending, and what steps of 0 to `slots` rows
    with so many cost, relative to steps without, float [slots + 1, c]; inf where there are none. A step costs
    what the next larger one does that was timed."""
    counts = np.array(draft_counts(1, most))
    ratios = np.full((slots + 1, len(counts)), math.inf)
    sizes = {count: sorted(size for size, own in costs if own == count) for count in (0, *counts.tolist())}

    def cost(rows: int, count: int) -> float | None:
        size = next((size for size in sizes[count] if size >= rows), None)
        return None if size is None else costs[size, count]

    for rows in range(1, slots + 1):
        plain = cost(rows, 0)
        for column, count in enumerate(counts.tolist()):
            own = cost(rows, count) if count in draft_counts(rows, most) else None
            if plain and own:
                ratios[rows, column] = own / plain
    return counts, ratios
