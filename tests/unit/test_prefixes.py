# SPDX-License-Identifier: Apache-2.0
"""Which decode rows begin with the same blocks, and how what they share is cut up."""

import itertools

import numpy as np
import pytest

from flashinfer_backend.attention import split
from flashinfer_backend.attention.prefixes import (
    MAX_PREFIX_PARTS,
    PREFIX_WORDS,
    QUERIES,
    Prefixes,
    PrefixTiles,
    find_prefixes,
)
from flashinfer_backend.core.step import Feeds, greedy_plan
from flashinfer_backend.worker.prefixes import SharedPrefixes

BLOCK_SIZE = 64


def find(rows: list[list[int]]) -> dict[frozenset[int], int] | None:
    """What find_prefixes gives of the rows' full blocks, as the blocks that each set of rows shares."""
    slots = np.arange(len(rows), dtype=np.int32)[::-1] * 2
    table = np.full((2 * len(rows), 2 + max(map(len, rows))), 7, np.int32)  # 7: what was there before
    for slot, blocks in zip(slots, rows, strict=True):
        table[slot, : len(blocks)] = blocks
    found = find_prefixes(table, slots, np.array([len(blocks) for blocks in rows], np.int32), BLOCK_SIZE)
    if found is None:
        return None
    assert all(array.dtype == np.int32 for array in found)
    assert len(set(found.rows.tolist())) == len(found.rows)
    sets = np.split(found.rows, np.cumsum(found.counts)[:-1])
    return {
        frozenset(own.tolist()): tokens // BLOCK_SIZE for own, tokens in zip(sets, found.tokens, strict=True)
    }


def run(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def test_sets_are_those_that_save_most():
    """Of a system prompt with documents behind it, and of a document that few of many rows have."""
    system = run(100, 10)
    documents = [[*system, *run(1000 * i, 40)] for i in range(1, 5)]
    rows = [[*documents[i % 4], 20000 + i] for i in range(16)]
    assert find(rows) == {frozenset(range(i, 16, 4)): 50 for i in range(4)}
    rows = [[*system, 30000 + i] for i in range(14)] + [documents[0], documents[0]]
    assert find(rows) == {frozenset(range(16)): 10}
    # A chain of ever longer prefixes, of as many rows as an engine may have.
    rows = [run(1, 8 + i) for i in range(1024)]
    sets = find(rows)
    assert sets is not None and sum((len(own) - 1) * blocks for own, blocks in sets.items()) > 1024 * 200


def best(rows: list[list[int]]) -> int:
    """The most tokens that sets of rows save, by trying all runs at each node of the tree of prefixes."""

    def within(rows: list[list[int]], depth: int) -> int:
        while all(len(row) > depth and row[depth] == rows[0][depth] for row in rows):
            depth += 1
        by_next: dict[int, list[list[int]]] = {}
        for row in rows:
            if len(row) > depth:
                by_next.setdefault(row[depth], []).append(row)
        apart = sum(within(own, depth) for own in by_next.values() if len(own) > 1)
        return max(apart, (len(rows) - 1) * depth * BLOCK_SIZE - 256)

    return max(0, within(rows, 0)) if len(rows) > 1 else 0


def test_no_other_sets_save_more():
    rng = np.random.default_rng(0)
    for _ in range(200):
        rows = []
        for _ in range(int(rng.integers(2, 14))):
            row: list[int] = []
            for depth in range(int(rng.integers(0, 5))):  # runs of three blocks, each one of two
                row += run(1000 * depth + 100 * int(rng.integers(2)) + 10 * sum(row[::3]) % 97, 3)
            rows.append(row)
        found = find(rows) or {}
        saved = sum((len(own) - 1) * blocks * BLOCK_SIZE - 256 for own, blocks in found.items())
        assert saved == best(rows)
        for own, blocks in found.items():
            first = rows[min(own)]
            assert all(rows[row][:blocks] == first[:blocks] and len(rows[row]) >= blocks for row in own)


@pytest.mark.parametrize("heads, kv_heads", [(32, 8), (28, 4), (8, 8), (32, 1), (64, 8)])
@pytest.mark.parametrize("counts, tokens", [
    ([64], [30016]), ([4] * 16, [704] * 16), ([2] * 32, [64 * i for i in range(8, 40)]),
    ([60, 2], [64, 9600]), ([2, 3, 17], [128, 4096, 640]), ([2], [131008]), ([200], [1024]),
])  # fmt: skip
def test_tiles_cover_what_rows_share(heads, kv_heads, counts, tokens):
    """Each row's tokens once, those of its prefix and its own; no two sums go to one cell."""
    rng = np.random.default_rng(0)
    rows = sum(counts) + 5
    prefixes = Prefixes(
        rng.permutation(rows)[: sum(counts)].astype(np.int32),
        np.array(counts, np.int32),
        np.array(tokens, np.int32),
    )
    slots = rng.permutation(2 * rows)[:rows].astype(np.int32)
    tiles = PrefixTiles(rows, heads, kv_heads)
    words = np.full(tiles.words, 99, np.int32)
    parts = tiles.split(prefixes, slots, 1000, words)
    items, order = words[: tiles.sizes[0]].reshape(-1, PREFIX_WORDS), words[tiles.sizes[0] :]
    read: list[dict[int, tuple[int, int]]] = [{} for _ in range(rows)]
    for first, count, start, end, cell, stride, slot, _ in items[items[:, 1] > 0].tolist():
        assert count * (heads // kv_heads) <= QUERIES and start < end
        own = order[first : first + count].tolist()
        sets = np.split(prefixes.rows, np.cumsum(counts)[:-1])
        assert any(set(own) <= set(each) and slot in slots[each] for each in map(np.ndarray.tolist, sets))
        for place, row in enumerate(own):
            assert cell + place * stride not in read[row]
            read[row][cell + place * stride] = start, end
    used = [cell for cells in read for cell in cells]
    assert len(set(used)) == len(used) and min(used) >= 1000 and max(used) < 1000 + tiles.cells
    kv_lens = parts.tokens + rng.integers(1, 300, rows).astype(np.int32)
    out = np.full((split.max_items(rows, kv_heads, False), split.ITEM_WORDS), 99, np.int32)
    split.split_rows(kv_lens, slots, len(out), out, shared=parts)
    own_items = out[out[:, 0] >= 0].tolist()
    for row, cells in enumerate(read):
        assert parts.parts[row] == len(cells) <= MAX_PREFIX_PARTS
        mine = [item for item in own_items if item[0] == row]
        assert mine and all(item[5:] == [slots[row], len(cells), parts.cells[row]] for item in mine)
        if cells:
            first = int(parts.cells[row])
            assert sorted(cells) == list(range(first, first + len(cells)))
        ranges = [*(cells[cell] for cell in sorted(cells)), *(item[1:3] for item in mine)]
        assert ranges[0][0] == 0 and ranges[-1][1] == kv_lens[row]
        assert all(b[1] == a[0] for b, a in itertools.pairwise(ranges)), f"{ranges}"


def test_few_long_tiles_are_one_wave_of_programs():
    """64 rows over a document: as many parts as fill the device, and none that would wait for the others."""
    tiles = PrefixTiles(64, 32, 8)
    prefixes = Prefixes(np.arange(64, dtype=np.int32), np.array([64], np.int32), np.array([30016], np.int32))
    words = np.zeros(tiles.words, np.int32)
    tiles.split(prefixes, np.arange(64, dtype=np.int32), 0, words)
    used = int((words[: tiles.sizes[0]].reshape(-1, PREFIX_WORDS)[:, 1] > 0).sum())
    assert 0.8 * 264 < 8 * used <= 264


def test_without_prefixes_there_is_nothing_to_read():
    tiles = PrefixTiles(16, 32, 8)
    words = np.full(tiles.words, 99, np.int32)
    parts = tiles.split(None, np.arange(16, dtype=np.int32), 0, words)
    assert not words[: tiles.sizes[0]].reshape(-1, PREFIX_WORDS)[:, 1].any()
    assert not any(each.any() for each in parts) and {len(each) for each in parts} == {16}


def come(shared: SharedPrefixes, blocks: dict[int, list[int]]) -> None:
    """A step with which sequences come to slots."""
    updates = [(0, slot, column, block) for slot, own in blocks.items() for column, block in enumerate(own)]
    updates += [(1, slot, column, 9) for slot in blocks for column in range(3)]  # of another cache group
    slots = np.array(list(blocks), np.int32)
    shared.note(greedy_plan(slots, 0, 5, Feeds.GIVEN, block_updates=np.array(updates, np.int32)))


def decode(shared: SharedPrefixes, slots: list[int], start: int) -> list[tuple[int, int]] | None:
    """(rows, tokens) of the sets in a step of decodes."""
    plan = greedy_plan(np.array(slots, np.int32), start, 1, Feeds.LAST)
    shared.note(plan)
    found = shared.of(plan)
    return None if found is None else list(zip(found.counts.tolist(), found.tokens.tolist(), strict=True))


def test_what_a_slot_shares_changes_with_its_sequence():
    document = run(100, 20)
    shared = SharedPrefixes(8, 40, BLOCK_SIZE, 64 << 10)  # 64 MiB are 1024 tokens
    come(shared, {slot: [*document, 500 + slot] for slot in range(4)})
    assert decode(shared, [0, 1, 2, 3], 1290) == [(4, 1280)]
    assert decode(shared, [0, 1, 2, 3], 1291) == [(4, 1280)]
    assert decode(shared, [3, 1], 1291) == [(2, 1280)]
    assert decode(shared, [0, 1, 2, 3], 1292) == [(4, 1280)]
    come(shared, {5: run(600, 4)})
    assert decode(shared, [], 0) is None  # a step of prompts alone
    assert decode(shared, [0, 1, 2, 3], 1292) == [(4, 1280)]
    come(shared, {1: [*document[:15], *run(700, 9)]})  # other tokens, in the same slot
    assert decode(shared, [0, 1, 2, 3], 1293) == [(4, 960)]
    come(shared, {slot: run(800 + 30 * slot, 21) for slot in (0, 1, 2)})
    assert decode(shared, [0, 1, 2, 3], 1294) is None


def test_what_saves_little_is_read_by_each_row():
    for bytes_per_token, worth in ((32 << 10, False), (64 << 10, True)):
        shared = SharedPrefixes(4, 40, BLOCK_SIZE, bytes_per_token)
        come(shared, {slot: [*run(100, 20), 500 + slot] for slot in range(2)})
        assert decode(shared, [0, 1], 1290) == ([(2, 1280)] if worth else None)
