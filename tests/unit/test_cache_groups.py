# SPDX-License-Identifier: Apache-2.0
"""How layers fall into cache groups, and how these share the memory."""

import numpy as np
import pytest
import torch

from flashinfer_backend.cache.device import StateFormat
from flashinfer_backend.cache.groups import CacheGroup, cache_groups, share_memory
from flashinfer_backend.cache.pool import BlockPool
from flashinfer_backend.core.request import Request
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.scheduler.kv_cache_manager import KVCacheManager

FULL, WINDOW = cache_groups([8, None, 8, 8], 4, 100)


def test_layers_with_one_window_share_blocks_and_those_that_see_all_come_first() -> None:
    assert [(g.name, g.layers, g.bytes_per_block) for g in (FULL, WINDOW)] == [
        ("full", (1,), 100),
        ("window 8", (0, 2, 3), 300),
    ]
    assert [g.window for g in cache_groups([3, 9, 3], 4, 1)] == [9, 3]


@pytest.mark.parametrize(("window", "tail"), [(1, 0), (2, 1), (5, 1), (6, 2), (8, 2), (9, 2)])
def test_tokens_read_the_blocks_in_front_that_their_window_reaches(window: int, tail: int) -> None:
    assert CacheGroup((0,), window, 4, 1).tail == tail
    first_read = 40 - window + 1  # by the first token of block 10
    assert first_read // 4 == 10 - tail


@pytest.mark.parametrize(
    ("max_seq_len", "step_tokens", "needed"),
    [(100, 0, 5 * 4), (100, 30, 5 * 4 + 7), (12, 0, 5 * 3)],  # tail, block that is written, next one
)
def test_a_window_bounds_what_slots_need(max_seq_len: int, step_tokens: int, needed: int) -> None:
    assert WINDOW.needed_blocks(5, max_seq_len, step_tokens) == needed
    assert WINDOW.enough_blocks(5, max_seq_len, step_tokens) == needed * 3 // 2
    assert FULL.enough_blocks(5, max_seq_len, step_tokens) == 5 * max_seq_len // 4


@pytest.mark.parametrize(
    ("memory", "first"),
    [(399, 0), (400, 1), (4000, 10), (4100, 11), (10_000, 70)],  # 10 blocks are enough for the window
)
def test_a_window_gets_no_more_than_enough_and_the_first_group_the_rest(memory: int, first: int) -> None:
    assert share_memory([FULL, WINDOW], [0, 10], memory) == first


def test_one_group_gets_all() -> None:
    assert share_memory([FULL], [5], 1234) == 12


def test_a_prefix_is_as_long_as_its_last_blocks_are_known() -> None:
    pool, keys = BlockPool(10, tail=2), [bytes([i]) for i in range(6)]
    for block, key in zip(pool.allocate(5) or [], [keys[i] for i in (0, 1, 3, 4, 5)], strict=True):
        pool.register(block, key)
    assert [pool.serves(keys, most) for most in range(7)] == [0, 1, 2, 2, 2, 5, 6]


def test_what_a_chunk_was_promised_no_other_one_of_its_step_gets() -> None:
    manager = KVCacheManager([BlockPool(11, tail=1)], 4, reuse=False)
    prompt, params = np.zeros(40, np.int32), SamplingParams(max_tokens=8)
    first, second = (Request(handle, prompt, params, max_new=8) for handle in (1, 2))
    for slot, request in enumerate((first, second)):
        manager.take(request, [], slot)
    assert manager.fit_chunk(first, 0, 16) == 16
    assert manager.fit_chunk(second, 8, 32) == 6 * 4 - 8
    assert len(manager.open_windows(second, 6 * 4, 1) + manager.open_windows(first, 16, 0)) == 10


def test_copied_rows_are_the_same_however_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are copied some at a time, in all layers together."""
    states = StateFormat(3, 4, 16, 32, 192, 4, torch.bfloat16, 0, 8).allocate(20, torch.device("cpu"))
    assert len(states._all) == 6
    for each in states._all:
        each.copy_(9 * torch.randn(each.shape))
    before = [each.clone() for each in states._all]
    sources, targets = (torch.arange(n, n + 7, dtype=torch.int32, device="cpu") for n in (0, 10))
    monkeypatch.setattr(
        "flashinfer_backend.cache.device.COPIED_BYTES", 2 * states._all[0][:, 0].nbytes + 9999
    )
    states.copy(sources, targets)
    for each, old in zip(states._all, before, strict=True):
        assert torch.equal(each[:, 10:17], old[:, :7])
        assert torch.equal(each[:, :10], old[:, :10]) and torch.equal(each[:, 17:], old[:, 17:])
