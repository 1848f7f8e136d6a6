# SPDX-License-Identifier: Apache-2.0
"""Large matrices of tests are thinned; with ALL_CASES=1 in the environment they run whole, for minutes."""

import os
from collections.abc import Sequence
from typing import TypeVar

ALL_CASES = os.environ.get("ALL_CASES") == "1"
Case = TypeVar("Case")


def examples(count: int) -> int:
    """How many examples hypothesis draws of the `count` of a thorough run."""
    return count if ALL_CASES else max(20, count // 8)


def some(cases: Sequence[Case], few: Sequence[Case]) -> Sequence[Case]:
    """All of the cases in a thorough run, else the few."""
    return cases if ALL_CASES else few
