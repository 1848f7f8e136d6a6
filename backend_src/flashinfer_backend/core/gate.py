# SPDX-License-Identifier: Apache-2.0
"""Room for what may be held at the same time: who wants some waits for their turn.

A gate belongs to one thread, that of the engine's loop.
"""

import bisect
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class Ticket:
    """`size`: bytes. `priority`: smaller numbers come first, equal ones in order of arrival. `start` is
    called once there is room, perhaps before `enter` returns."""

    size: int
    priority: int
    start: Callable[[], object]
    waiting: bool = False
    inside: bool = False
    number: int = 0  # in the order in which they came


class Gate:
    """Bounds the bytes of all who are inside. One who wants more than the bound goes in alone."""

    def __init__(self, most: int) -> None:
        """most: bytes."""
        self._most = most
        self.held = 0  # bytes
        self._waiting: list[Ticket] = []  # in their order
        self._came = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def enter(self, ticket: Ticket) -> None:
        """The ticket goes in, or into the line."""
        self._came += 1
        ticket.waiting, ticket.number = True, self._came
        bisect.insort(self._waiting, ticket, key=_turn)
        self._admit()

    def leave(self, *tickets: Ticket) -> None:
        """Gives tickets back, also from the line: all of them before another one goes in. May be called
        more than once, and of a ticket that never entered."""
        for ticket in tickets:
            if ticket.waiting:
                del self._waiting[bisect.bisect_left(self._waiting, _turn(ticket), key=_turn)]
            elif ticket.inside:
                self.held -= ticket.size
            ticket.waiting = ticket.inside = False
        self._admit()

    def _admit(self) -> None:
        # None overtakes one that is too large for the room left: it might wait indefinitely.
        while self._waiting and (not self.held or self.held + self._waiting[0].size <= self._most):
            ticket = self._waiting.pop(0)
            ticket.waiting, ticket.inside = False, True
            self.held += ticket.size
            ticket.start()


def _turn(ticket: Ticket) -> tuple[int, int]:
    return ticket.priority, ticket.number
