# SPDX-License-Identifier: Apache-2.0
"""When checking drafts pays."""

from __future__ import annotations

import numpy as np

WORTH = 0.25  # drafts accepted by a row's step from which on its further tokens cost less than they bring
FIRST_PAUSE, LONGEST_PAUSE = 16, 256  # steps
MEMORY = 4  # steps with drafts


class DraftPace:
    """Steps have drafts while their rows accept on average WORTH of them a step; a new sequence counts as one
    that accepts 1. Else one step in FIRST_PAUSE tries, and each try that fails doubles the pause, up to
    LONGEST_PAUSE steps. It counts the rows together, since all of them wait for each other's tokens."""

    def __init__(self, slots: int) -> None:
        self._accepted = np.ones(slots, np.float32)  # a step with drafts, of late; by slot
        self._pause = self._left = FIRST_PAUSE

    def begin(self, slot: int) -> None:
        """A sequence has come to a slot."""
        self._accepted[slot] = 1.0

    def offers(self, slots: np.ndarray) -> bool:
        """Whether the step after the one that is being planned, of the same rows, is to have drafts. slots:
        those that take drafts, one or more."""
        if self._accepted[slots].mean() >= WORTH:
            self._pause = self._left = FIRST_PAUSE
            return True
        self._left -= 1
        if self._left:
            return False
        self._pause = self._left = min(2 * self._pause, LONGEST_PAUSE)
        return True

    def checked(self, slots: np.ndarray, accepted: np.ndarray) -> None:
        """How many drafts the rows of a step accepted; int32 [n] each."""
        self._accepted[slots] += (accepted - self._accepted[slots]) / MEMORY
