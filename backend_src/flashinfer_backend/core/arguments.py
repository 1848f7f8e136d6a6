# SPDX-License-Identifier: Apache-2.0
"""Types of command-line options: each returns the value, or has the parser say what would be right."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Callable

LONGEST_S = 86400  # of a time to wait


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """A whole number from low to high, both included."""
    span = f"{low} or more" if high is None else f"{low} to {high}"

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low or (high is not None and value > high):
            raise ArgumentTypeError(f"{text}: it should be a whole number, {span}")
        return value

    return convert


count = whole(0)
whole_seconds = whole(0, LONGEST_S)


def seconds(text: str) -> float:
    """A time to wait, which may be 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= LONGEST_S:
        raise ArgumentTypeError(f"{text}: it should be 0 to {LONGEST_S} seconds")
    return value
