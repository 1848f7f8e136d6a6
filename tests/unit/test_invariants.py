# SPDX-License-Identifier: Apache-2.0
"""Each rule of scheduler/invariants.py is broken once, in the middle of a walk, and has to be named."""

from typing import Any

import numpy as np
import pytest
from scheduler_walk import STUBS, Settings, World

from flashinfer_backend.core.request import Held
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.core.step import Feeds, Wants
from flashinfer_backend.scheduler.invariants import BrokenInvariantError, InvariantChecker

SIZES = {"slots": 4, "block": 4, "blocks": 90, "longest": 90, "step_tokens": 14, "busy_step_tokens": 10}
ALL = SIZES | {"windows": ((9, 60),), "snapshots": 20, "reserves": True, "longest_first": True}
DRAFTS = SIZES | {"drafts": 3, "right_drafts": 0.5}


def names(settings: dict[str, Any]) -> dict[str, Any]:
    """What the statements of the tests are about: two sequences that decode, one whose prompt is at work, an
    idle slot, and requests that wait."""
    world = World(Settings(**settings), seed=1)
    params = SamplingParams(max_tokens=60)
    for token in (1, 2):
        world.submit(STUBS[0], [token] * 13, params)
    for _ in range(12):
        world.step()
    for token in (3, 4, 5, 6):
        world.submit(STUBS[0], list(range(token, token + 25)), params, priority=token // 5, timed=True)
    world.step()
    scheduler, checker = world.scheduler, world.loop._checker
    assert checker is not None and len(world.loop.in_flight) == 1
    stream, other, prompt = scheduler.running.values()
    assert scheduler.prefilling == [prompt] and len(scheduler.queue) == 3
    return {
        "scheduler": scheduler, "checker": checker, "table": scheduler.table, "queue": scheduler.queue,
        "manager": scheduler.kv_manager, "pool": scheduler.kv_manager.pools[0],
        "windows": scheduler.kv_manager.pools[-1], "snapshots": scheduler.kv_manager.snapshots,
        "stream": stream, "other": other, "prompt": prompt, "waits": scheduler.queue.head,
        "last": scheduler.queue.tail, "blocks": stream.held[0].blocks, "window": stream.held[-1],
        "np": np, "Held": Held, "Feeds": Feeds, "Wants": Wants,
    }  # fmt: skip


@pytest.mark.parametrize("settings", [ALL, DRAFTS])
def test_a_walk_that_is_right_breaks_none(settings: dict[str, Any]) -> None:
    made = names(settings)
    made["checker"].check(1)
    plan = made["scheduler"].schedule(in_flight=True)
    made["checker"].check_plan(plan)
    assert plan.num_decodes == 2 and plan.num_rows > 2


@pytest.mark.parametrize(
    ("statement", "sentence"),
    [
        # What is open waits or runs.
        ("del scheduler.requests[stream.handle]", "open are the requests"),
        ("del scheduler.running[stream.handle]", "open are the requests"),
        ("scheduler.running[waits.handle] = waits", "open are the requests"),
        ("queue.tokens += 1", "the queue counts"),
        ("queue.known_tokens += 1", "the queue counts"),
        ("last.max_new += 9; queue.tokens += 9", "the longest is 60, and .* 69"),
        ("waits.slot = 0", "waits, and still holds a slot or blocks"),
        ("waits.held.append(Held([]))", "waits, and still holds a slot or blocks"),
        ("waits.reserved_blocks = 1", "waits, and still holds a slot or blocks"),
        ("queue._line.reverse()", "the queue is in the order"),
        ("last.first_scheduled_ns, last.deadline_ns = 1, 0", "is in the order"),
        ("waits.deadline_ns += 1", "deadlines are .*, but those of the queue"),
        ("stream.deadline_ns = 5", "1 requests that have begun may still be late"),
        ("table.requests[stream.slot] = None", "runs, but slot 0 is not its own"),
        ("stream.slot, other.slot = other.slot, stream.slot", "runs, but slot 1 is not its own"),
        ("prompt.slot = -1; table.requests[3] = prompt", "runs, but slot -1 is not its own"),
        ("table._free.append(0)", r"slots \[0, 1, 2\] are taken and \[0, 3\] free"),
        ("table.requests[3] = stream", "4 slots have an owner, 3 sequences run"),
        # Each block and each snapshot is in one place.
        ("pool._free.append(blocks[0])", "is free 1 times, cached 0 times and held by 1"),
        ("pool._free.append(pool._free[0])", "is free 2 times, cached 0 times and held by 0"),
        ("pool._lru[blocks[0]] = None", "is free 0 times, cached 1 times and held by 1"),
        ("pool._free.remove(90)", "block 90 is free 0 times, cached 0 times and held by 0"),
        ("pool._free.append(1)", "block 1 is free 1 times"),
        ("pool._free.append(0)", "block 0, which padding writes to, was given away"),
        ("pool._references[blocks[0]] += 1", "block 1 counts 2 holders, and 1 sequences have it"),
        ("windows._references[window.blocks[-1]] += 1", "counts 2 holders, and 1 sequences have it"),
        ("blocks[0] = other.held[0].blocks[0]", "counts 1 holders, and 0 sequences"),
        ("blocks[0] = 0", "has block 0, or one that does not exist"),
        ("blocks[0] = 91", "has block 0, or one that does not exist"),
        ("blocks[0] = blocks[1]", "has a block twice"),
        ("snapshots._references[stream.snapshot] += 1", "snapshot .* counts 2 holders, and 1 sequences"),
        ("scheduler._saving.append(snapshots._free[0])", "snapshot .* counts 0 holders, and 1 sequences"),
        ("snapshots._key_of[stream.snapshot] = b''", "writes to a snapshot that others can find"),
        ("window.committed += 1", "blocks are promised to sequences"),
        ("scheduler.reserved_blocks += 1", "blocks are reserved by sequences"),
        ("stream.reserved_blocks += 1", "blocks are reserved by sequences"),
        # A key finds the block with its content.
        ("pool._block_of[b''] = 1", "keys name"),
        ("pool._key_of[blocks[0]] = b''", "block 1 has a key that finds None"),
        ("scheduler.release(stream); del pool._block_of[pool._key_of.pop(min(pool._lru))]",
         "is cached without a key, so it cannot be found"),
        ("free = pool._free[0]; pool._key_of[free], pool._block_of[b''] = b'', free", "can still be found"),
        ("stream.registered_blocks -= 1", "has not the key of what request .* has in it"),
        ("stream.registered_blocks = int(table.computed[0]) // 4 + 1", "blocks can be found, "),
        ("waits.block_keys.append(b'')", "has keys of other tokens than its own"),
        # Each goes on where it is.
        ("scheduler.prefilling.append(prompt)", "a prompt is twice among those at work"),
        ("scheduler.prefilling.append(waits)", "a prompt is at work that does not run"),
        ("scheduler.decoding = scheduler.decoding[[0, 0, 1]]", "a slot is decoded twice"),
        ("scheduler.decoding = scheduler.decoding[1:]", r"slots \[1\] are decoded, and \[0, 1\] should be"),
        ("table.num_blocks[stream.slot] -= 1", r"request \d+: \d+ of \d+ blocks"),
        ("table.num_blocks[stream.slot] += 1", r"request \d+: \d+ of \d+ blocks"),
        ("blocks += pool.allocate(1)", r"has \d+ blocks for \d+ tokens, not \d+"),
        ("prompt.held[1].blocks += windows.allocate(1)", r"has \d+ blocks for \d+ tokens, not \d+"),
        ("stream.reserved_blocks += 1; other.reserved_blocks -= 1", "has a reservation that is not its own"),
        ("stream.max_new = 11; scheduler.reserved_blocks -= 13; stream.reserved_blocks = 0",
         "has 11 of 11 tokens, and was not ended"),
        ("table.planned_outputs[prompt.slot] += 1", "1 outputs are planned before its prompt is done"),
        ("table.planned_outputs[stream.slot] += 1", r"\d+ tokens for output \d+"),
        ("table.known[stream.slot] -= 1", "outputs are planned and .* read, with 1 steps in flight"),
        ("table.known[stream.slot] += 2", "outputs are planned and .* read, with 1 steps in flight"),
        # What is behind a window was given back, and no more.
        ("pool.release(blocks[:1]); blocks[0] = 0; stream.held[0].behind = 1", "given back 1 blocks that it"),
        ("stream.held[0].committed = pool.committed = 1", "has given back 0 blocks that it still reads"),
        ("manager.leave_behind(stream, int(table.computed[0]) + 8)", "given back the blocks before column"),
        ("window.blocks[0] = 5", "given back the blocks before column"),
        ("window.committed += 1; windows.committed += 1", "blocks as its own, which are"),
        ("window.blocks[:window.behind] = windows.allocate(window.behind); window.behind = 0; "
         "more = len(window.blocks) - window.committed; window.committed += more; windows.committed += more",
         "blocks of a window, and was promised"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_between_two_steps_is_found(statement: str, sentence: str) -> None:
    made = names(ALL)
    made["checker"].check(1)
    exec(statement, made)
    with pytest.raises(BrokenInvariantError, match=sentence):
        made["checker"].check(1)


def test_no_more_than_the_drafts_of_steps_in_flight_are_unread() -> None:
    made = names(DRAFTS)
    checker: InvariantChecker = made["checker"]
    checker.check(1)
    with pytest.raises(BrokenInvariantError, match="read, with 0 steps in flight"):
        checker.check(0)
    table, slot = made["table"], made["stream"].slot
    table.num_blocks[slot] = (table.computed[slot] + 2 * 3) // 4 + 2
    with pytest.raises(BrokenInvariantError, match=r"request \d+: \d+ of \d+ blocks"):
        checker.check(1)


@pytest.mark.parametrize(
    ("statement", "sentence"),
    [
        ("plan.slots = plan.slots[:0]", "a plan has 0 rows; 1..4 fit"),
        ("plan.slots = np.arange(5)", "a plan has 5 rows; 1..4 fit"),
        ("plan.lengths[-1] += 1", "a plan has 11 tokens, and 10 are allowed"),
        ("plan.tokens = plan.tokens[:-1]", "given rows and tokens differ in number"),
        ("plan.tokens += 1", "a row has other tokens than its own"),
        ("table.known[prompt.slot] = plan.starts[2]", "a row has other tokens than its own"),
        ("plan.feeds[1:] = plan.feeds[:0:-1]; plan.lengths[1:] = plan.lengths[:0:-1]", "are in the order"),
        ("plan.lengths[0] = 0", "a plan has a row without tokens"),
        ("plan.slots[1] = plan.slots[0]", "a slot has two rows in one plan"),
        ("plan.restored = np.array([[1, 2], [1, 3]])", "a slot is restored twice"),
        ("plan.lengths[0] = 2; plan.lengths[2:] -= [1]; plan.tokens = plan.tokens[1:]", "a longer row comes"),
        ("plan.epochs = plan.epochs[:-1]", "epochs are not those of its samples"),
        ("plan.epochs += 1", "names epochs that are over"),
        ("plan.starts[2] += 1", "is not booked as computed"),
        ("plan.block_updates[0, 3] = 0", "outside of the block table, or block 0"),
        ("plan.block_updates[0, 2] = -1", "outside of the block table, or block 0"),
        ("plan.block_updates[0, 2] = 24", "outside of the block table, or block 0"),
        ("plan.block_updates = plan.block_updates[:-1]", "but the device is told"),
        ("table.requests[1] = None", "a row for slot 1, which no sequence has"),
        ("checker._computed[0] += 1", r"a row starts at \d+, \d+ are computed"),
        ("prompt.held[0].blocks[3:] = []", "a row writes 16 tokens to 3 blocks"),
        ("manager.leave_behind(stream, int(table.computed[0]) + 4)", "which were given back"),
        ("checker._computed[1] -= 1; plan.starts[1:] += [-1, 1]; plan.lengths[1:] += [1, -1]; "
         "plan.tokens = plan.tokens[1:]", "a decode row has 2 tokens"),
        ("stream.max_new = 9", r"a row ends at \d+, the last is 21"),
        ("table.known[0] += 2", "a token that is known is decoded"),
        ("plan.wants[0] = Wants.NOTHING; plan.epochs = plan.epochs[1:]", "known tokens does not sample"),
        ("plan.wants[2] = Wants.NEXT; plan.epochs = table.epoch[plan.slots]", "25 known tokens samples"),
        ("plan.freed.append(waits.handle)", "is open, and told to be gone"),
    ],
)  # fmt: skip
def test_a_plan_that_contradicts_the_scheduler_is_found(statement: str, sentence: str) -> None:
    """Of two rows that decode and a prompt's."""
    made = names(ALL)
    made["checker"].check(1)
    plan = made["plan"] = made["scheduler"].schedule(in_flight=True)
    exec(statement, made)
    with pytest.raises(BrokenInvariantError, match=sentence):
        made["checker"].check_plan(plan)
