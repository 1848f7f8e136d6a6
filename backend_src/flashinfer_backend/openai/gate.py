# SPDX-License-Identifier: Apache-2.0
"""Room for what one process may hold at the same time: who wants some waits for their turn.

For the event loop's thread alone.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass

LOGITS_ROOM = 512 << 20  # bytes, for logits of prompts, unless a door is started with another bound
MOST_WAITING = 4096  # places; the engine's queue has no smaller bound by default


@dataclass(eq=False)
class Place:
    """`size`: bytes. `priority`: who waits with a smaller number goes first, then who came first. `start` is
    called once there is room, perhaps before `enter` returns."""

    size: int
    priority: int
    start: Callable[[], None]
    waiting: bool = False
    inside: bool = False


class Gate:
    """Bounds the bytes of all who are inside. One who wants more than the bound goes in alone."""

    def __init__(self, most: int, changed: Callable[[int, int], None] = lambda held, waiting: None) -> None:
        """most: bytes. changed: told of the bytes inside and of how many wait, when one of them changes."""
        self._most, self._changed = most, changed
        self._held = 0
        self._waiting: list[Place] = []  # in their order

    def enter(self, place: Place) -> bool:
        """Takes a place, or a place in the line. False: too many wait already."""
        if len(self._waiting) >= MOST_WAITING:
            return False
        place.waiting = True
        bisect.insort(self._waiting, place, key=lambda each: each.priority)
        self._admit()
        return True

    def leave(self, place: Place) -> None:
        """Gives a place back, or its place in the line. May be called more than once."""
        if place.waiting:
            self._waiting.remove(place)
        elif place.inside:
            self._held -= place.size
        place.waiting = place.inside = False
        self._admit()

    def _admit(self) -> None:
        # Nobody overtakes one who is too large for what is left: else it might wait for ever.
        while self._waiting and (not self._held or self._held + self._waiting[0].size <= self._most):
            place = self._waiting.pop(0)
            place.waiting, place.inside = False, True
            self._held += place.size
            place.start()
        self._changed(self._held, len(self._waiting))
