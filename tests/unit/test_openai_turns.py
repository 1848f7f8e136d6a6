# SPDX-License-Identifier: Apache-2.0
"""When the work of requests begins that have arrived at the same time."""

import asyncio
from itertools import pairwise

from flashinfer_backend.openai.turns import Turns


def order_of(large: list[bool], cancelled: tuple[int, ...] = ()) -> list[int | str]:
    """In which order requests began, of which some are large; ".": another callback of the loop."""
    seen: list[int | str] = []

    async def request(turns: Turns, number: int) -> None:
        await turns.take(large[number])
        seen.append(number)

    async def run() -> None:
        loop, turns = asyncio.get_running_loop(), Turns()

        def tick() -> None:
            seen.append(".")
            loop.call_soon(tick)

        tasks = [asyncio.create_task(request(turns, number)) for number in range(len(large))]
        await asyncio.sleep(0)
        loop.call_soon(tick)
        for number in cancelled:
            tasks[number].cancel()
        await asyncio.wait(tasks)

    asyncio.run(run())
    return seen


def test_one_begins_in_a_turn_of_the_loop() -> None:
    seen = order_of([False] * 50)
    assert [each for each in seen if each != "."] == [*range(50)]
    assert not any(a != "." and b != "." for a, b in pairwise(seen[1:]))


def test_small_and_large_ones_take_turns() -> None:
    began = [each for each in order_of([True] * 6 + [False] * 3) if each != "."]
    assert began == [0, 1, 6, 2, 7, 3, 8, 4, 5] or began == [0, 6, 1, 7, 2, 8, 3, 4, 5]


def test_one_that_was_cancelled_takes_no_turn_and_the_next_request_none_waits_for() -> None:
    assert [each for each in order_of([False] * 4, (1, 2)) if each != "."] == [0, 3]

    async def twice() -> None:
        turns = Turns()
        for _ in range(2):
            await asyncio.wait_for(turns.take(False), 10)
            await asyncio.sleep(0.01)
            assert not turns._taken

    asyncio.run(twice())
