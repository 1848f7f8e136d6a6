# SPDX-License-Identifier: Apache-2.0
"""Room for what may be held at the same time: who gets it, and in which order."""

import random

from flashinfer_backend.core.gate import Gate, Ticket


class Places:
    """Of a gate for 100 bytes."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.gate = Gate(100)

    @property
    def seen(self) -> tuple[int, int]:
        return self.gate.held, self.gate.waiting

    def enter(self, name: str, size: int, priority: int = 0) -> Ticket:
        ticket = Ticket(size, priority, lambda: self.started.append(name))
        self.gate.enter(ticket)
        return ticket


def test_who_waits_goes_in_by_priority_and_then_by_arrival() -> None:
    places = Places()
    first = places.enter("first", 60)
    large = places.enter("large", 300)
    places.enter("small", 10)  # would fit
    urgent = places.enter("urgent", 50, priority=-1)
    assert places.started == ["first"] and places.seen == (60, 3)
    places.gate.leave(first)
    places.gate.leave(first)
    assert places.started == ["first", "urgent"]
    places.gate.leave(urgent)
    assert places.started[2:] == ["large"] and places.seen == (300, 1)  # alone, beyond the bound
    places.gate.leave(large)
    assert places.started[3:] == ["small"] and places.seen == (10, 0)
    places.enter("the rest", 90)
    places.enter("empty", 1)
    assert places.started[4:] == ["the rest"] and places.seen == (100, 1)


def test_who_leaves_together_lets_in_none_of_themselves() -> None:
    places = Places()
    first, second, third = (places.enter(name, 100) for name in ("first", "second", "third"))
    places.enter("last", 100)
    places.gate.leave(first, second, third, Ticket(1, 0, lambda: None))
    assert places.started == ["first", "last"] and places.seen == (100, 0)


def test_those_who_leave_the_line_in_any_order_leave_the_others_in_theirs() -> None:
    draw, places = random.Random(0), Places()
    last = places.enter("in", 100)
    line = [(draw.randrange(3), f"{i}") for i in range(200)]
    entered = {name: places.enter(name, 100, priority) for priority, name in line}
    for priority, name in draw.sample(line, 120):
        places.gate.leave(entered.pop(name))
        line.remove((priority, name))
        if draw.random() < 0.2:  # who comes again is last
            entered[name] = places.enter(name, 100, priority)
            line.append((priority, name))
    expected = [name for _, name in sorted(line, key=lambda each: each[0])]
    for name in expected:
        places.gate.leave(last)
        last = entered[name]
    assert places.started == ["in", *expected]
