# SPDX-License-Identifier: Apache-2.0
"""How many drafts the rows of a decode step can check.

Graphs are captured for these numbers, and the scheduler chooses among them by what they cost.
"""

from bisect import bisect_left
from collections.abc import Sequence

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)  # numbers of rows of the graphs of steps with drafts
STEP_TOKENS = 256  # of such a step at most: beyond, a GPU's time grows with the tokens


def draft_counts(rows: int, most: int) -> list[int]:
    """How many drafts each row of a step of `rows` can check, ascending: `most`, and its halves down to 1,
    as far as a step has room for them."""
    place = bisect_left(SIZES, rows)
    if place == len(SIZES):
        return []
    found = []
    while most:
        if SIZES[place] * (1 + most) <= STEP_TOKENS:
            found.append(most)
        most //= 2
    return found[::-1]


def most_drafts(rows: int, most: int) -> int:
    """The last one of draft_counts; 0 without any."""
    return max(draft_counts(rows, most), default=0)


def drafted_shapes(plain: Sequence[int], most: int) -> list[tuple[int, int]]:
    """(rows, drafts of each) of the graphs of steps with drafts, ascending. plain: rows of those without."""
    largest = max((size for size in plain if size <= SIZES[-1]), default=0)
    sizes = sorted({min(size, largest) for size in SIZES})
    return [(size, count) for size in sizes if size for count in draft_counts(size, most)]
