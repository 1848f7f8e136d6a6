# SPDX-License-Identifier: Apache-2.0
"""Who is at the head of the queue, and who has waited too long."""

from typing import Any

import numpy as np
import pytest

from flashinfer_backend.cache.pool import BlockPool
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.deadlines import Waiting
from flashinfer_backend.core.request import Request
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.scheduler.kv_cache_manager import KVCacheManager
from flashinfer_backend.scheduler.request_queue import RequestQueue
from flashinfer_backend.scheduler.scheduler import Scheduler


def request(handle: int, max_new: int = 8, prompt_tokens: int = 4, **fields: Any) -> Request:
    params = SamplingParams(max_tokens=max_new)
    return Request(handle, np.zeros(prompt_tokens, np.int32), params, max_new, **fields)


def scheduler(**settings: Any) -> Scheduler:
    config = EngineConfig(model_dir="", max_seq_len=4096, max_input_len=4095, **settings)
    return Scheduler(config, KVCacheManager([BlockPool(64)], 16, reuse=False))


def order(queue: RequestQueue) -> list[int]:
    return [each.handle for each in queue]


@pytest.mark.parametrize(
    ("longest_first", "expected"), [(False, [5, 2, 4, 1, 6, 3]), (True, [5, 4, 2, 1, 6, 3])]
)
def test_priorities_come_before_what_orders_one_of_them(longest_first, expected):
    queue = RequestQueue(longest_first)
    for handle, (priority, max_new) in enumerate([(0, 9), (-1, 5), (4, 99), (-1, 7), (-4, 1), (0, 8)], 1):
        queue.add(request(handle, max_new, priority=priority))
    assert order(queue) == expected
    assert queue.longest == 99
    assert (queue.head.handle, queue.tail.handle) == (5, 3)
    queue.remove(next(each for each in queue if each.handle == 2))
    assert order(queue) == [handle for handle in expected if handle != 2]


def test_preempted_sequences_are_ahead_of_every_priority():
    queue = RequestQueue(longest_first=False)
    queue.add(request(1, priority=-4))
    for handle in (2, 3):
        queue.put_back(request(handle, priority=4))
    assert order(queue) == [3, 2, 1]
    queue.take(queue.head)
    assert order(queue) == [2, 1]


def test_a_stub_that_leaves_takes_its_own_requests_along():
    left: list[int] = []
    waiting = Waiting[int](left.append)
    for stub, deadline_ns in ((7, 0), (8, 5), (7, 5)):
        waiting.add(request(stub << 32 | len(waiting), deadline_ns=deadline_ns), stub)
    waiting.drop_stub(7)
    assert left == [7, 7] and [stub for _, stub in waiting.entries] == [8]
    assert len(waiting.drop_late(5)) == 1 and not len(waiting)


def test_the_longest_answer_is_known_whoever_is_at_the_head():
    queue = RequestQueue(longest_first=True)
    queue.add(request(1, 20))
    queue.add(request(2, 30))
    assert queue.longest == 30
    queue.add(request(3, 5, priority=-1))
    assert (queue.head.handle, queue.longest) == (3, 30)
    queue.take(queue.head)
    queue.put_back(request(4, 6))
    assert (queue.head.handle, queue.longest) == (4, 30)


def test_the_longest_of_thousands_is_found_without_a_look_at_each():
    looks = []

    class Seen(Request):
        def __getattribute__(self, name: str) -> Any:
            looks.append(name)
            return super().__getattribute__(name)

    queue = RequestQueue(longest_first=True)
    lengths = np.random.default_rng(0).integers(1, 5000, 1000).tolist()
    for handle, length in enumerate(lengths):
        params = SamplingParams(max_tokens=length)
        each = Seen(handle, np.zeros(4, np.int32), params, length, priority=handle % 9 - 4)
        if handle < 5:
            queue.put_back(each)
        else:
            queue.add(each)
    while queue:
        looks.clear()
        longest = queue.longest
        assert len(looks) <= 9 + 5
        assert longest == max(each.max_new for each in queue)
        queue.take(queue.head)


def test_late_requests_leave_and_never_had_a_block():
    waiting = scheduler(max_num_seqs=1)
    for handle, deadline_ns in enumerate([0, 300, 200, 0, 100, 300], 1):
        waiting.submit(request(handle, deadline_ns=deadline_ns))
    free = waiting.kv_manager.pools[0].available
    assert waiting.drop_late(99) == []
    assert [each.handle for each in waiting.drop_late(200)] == [5, 3]
    assert order(waiting.queue) == [1, 2, 4, 6] and sorted(waiting.requests) == [1, 2, 4, 6]
    assert waiting.queue.tokens == 4 * (4 + 8) and waiting.queue.known_tokens == 4 * 4
    waiting.release(waiting.requests[6])  # cancelled
    assert [each.handle for each in waiting.drop_late(10**20)] == [2]
    assert waiting.drop_late(10**20) == []
    assert waiting.kv_manager.pools[0].available == free and waiting.table.free == 1


def test_what_has_had_a_slot_is_never_late():
    """Nor once it is preempted, and waits again."""
    running = scheduler(max_num_seqs=2)
    for handle in (1, 2):
        running.submit(request(handle, max_new=600, prompt_tokens=400, deadline_ns=100))
    assert running.schedule(in_flight=False) is not None
    assert sorted(running.running) == [1, 2] and running.drop_late(10**20) == []
    while not running.preemptions:
        assert running.schedule(in_flight=False) is not None
        for each in running.running.values():  # as if each step's token had been read
            running.table.known[each.slot] = running.table.computed[each.slot]
    running.submit(request(3, deadline_ns=10**19))
    assert order(running.queue) == [2, 3] and running.drop_late(10**18) == []
    running.release(running.requests[2])  # what it leaves behind is not the other's deadline
    assert [each.handle for each in running.drop_late(10**20)] == [3]
