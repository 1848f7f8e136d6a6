# SPDX-License-Identifier: Apache-2.0
"""Splitting decode rows into work items."""

import numpy as np
import pytest
from msgspec.structs import replace

from flashinfer_backend.attention.split import ITEM_WORDS, MAX_PARTS, max_items, most_items, split_rows
from flashinfer_backend.core import tuned
from flashinfer_backend.core.tuned import DecodeAttention
from flashinfer_backend.ops import device
from tables import entries


def slots_of(kv_lens):
    """Some slot for each row, in no order."""
    return (len(kv_lens) + 7 * np.arange(len(kv_lens)) % 1009).astype(np.int32)[::-1]


def split(kv_lens, num_kv_heads=8, items=None):
    kv_lens = np.array(kv_lens, dtype=np.int32)
    out = np.full((items or max_items(len(kv_lens), num_kv_heads, False), ITEM_WORDS), 99, dtype=np.int32)
    split_rows(kv_lens, slots_of(kv_lens), len(out), out)
    return out[out[:, 0] >= 0], out


@pytest.mark.parametrize("longest", [1, 65, 300, 9000, 131072])
@pytest.mark.parametrize("num_kv_heads", [1, 4, 8, 32])
def test_items_cover_every_token_once(longest, num_kv_heads):
    rng = np.random.default_rng(longest)
    for _ in range(40):
        rows = int(rng.integers(1, 300))
        kv_lens = rng.integers(1, longest + 1, rows).astype(np.int32)
        kv_lens[rng.integers(rows)] = longest
        used, out = split(kv_lens, num_kv_heads)
        assert (used[:, 1] < used[:, 2]).all()
        ends = np.zeros(rows, dtype=np.int64)
        for index, (row, start, end, first, count, *_) in enumerate(used):
            assert start == ends[row] and first <= index < first + count <= first + MAX_PARTS
            ends[row] = end
        assert (ends == kv_lens).all()
        assert (used[:, 5] == slots_of(kv_lens)[used[:, 0]]).all()
        counts = np.bincount(used[:, 0], minlength=rows)
        assert (used[:, 4] == counts[used[:, 0]]).all()
        assert (used[used[:, 3], 0] == used[:, 0]).all() and (used[used[:, 3], 1] == 0).all()
        assert (out[len(used) :, 0] == -1).all()


@pytest.mark.parametrize("window", [1, 63, 200, 5000])
def test_items_of_a_window_are_those_of_its_tokens(window):
    kv_lens = np.random.default_rng(window).integers(1, 9000, 100).astype(np.int32)
    out = np.full((300, ITEM_WORDS), 99, dtype=np.int32)
    split_rows(kv_lens, slots_of(kv_lens), len(out), out, window)
    read = [[] for _ in kv_lens]
    for row, start, end, *_ in out[out[:, 0] >= 0]:
        read[row] += range(start, end)
    for tokens, kv_len in zip(read, kv_lens, strict=True):
        assert tokens == list(range(max(0, kv_len - window), kv_len))


def test_rows_of_longer_chunks_come_first():
    """Programs start in the order of their items: the last ones are short, so that all end at about the same
    time. Only a row's last chunk may be shorter than those of the row behind it."""
    assert split([64, 900, 1, 300, 65])[0][:, 0].tolist() == [1] * 8 + [3] * 3 + [4, 0, 2]
    rng = np.random.default_rng(0)
    for longest in (100, 900, 9000):
        used, _ = split(rng.integers(1, longest, 64))
        first = used[used[:, 1] == 0]
        assert (np.diff(first[:, 2]) <= 0).all(), first[:, 2]
    used, _ = split([7] * 30)
    assert used[:, 0].tolist() == list(range(30))


def test_equal_short_rows_stay_whole_and_long_rows_are_split():
    assert len(split([256] * 64)[0]) == 64
    used = split([4096] + [64] * 63)[0]
    assert (used[:, 0] == 0).sum() > 4 and len(used) == (used[:, 0] == 0).sum() + 63


def test_a_graph_of_more_rows_has_room_for_fewer():
    """A graph's number of items is that of its bucket, whatever the lengths."""
    used, _ = split([131072] * 3 + [1] * 61)
    assert len(used) <= max_items(64, 8, fp8=False)


def test_items_by_the_cache_and_room_for_all_numbers_of_rows():
    """Fewer rows may be split for so many more programs that they have more items."""
    few, many, plain = (DecodeAttention(64, 3, 2, 16, 8, programs) for programs in (16, 4, 2))
    forms = {"16 bits": entries((None, plain)), "e4m3": entries((16, few), (None, many))}
    with device.use(replace(tuned.fallback(), decode_attention=forms)):
        sms = device.sms()
        for rows, programs in ((16, 16), (17, 4)):
            assert max_items(rows, 8, fp8=False) == rows + -(-2 * sms // 8)
            assert max_items(rows, 8, fp8=True) == rows + -(-programs * sms // 8)
        for rows in (1, 16, 17, 40, 2000):
            every = [max_items(some, 8, fp8=True) for some in range(1, rows + 1)]
            assert most_items(rows, 8, fp8=True) == max(every)
            assert most_items(rows, 8, fp8=False) == max_items(rows, 8, fp8=False)
        assert most_items(40, 8, fp8=True) > max_items(40, 8, fp8=True)
