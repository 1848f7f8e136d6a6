# SPDX-License-Identifier: Apache-2.0
"""Decode rows whose sequences begin with the same blocks: which they are, and how their work is cut up.

The kernel of shared prefixes (triton_prefix.py) takes tiles of rows, and reads a part of what they share once
for all of them. What it finds is one more part of each row for the decode kernel, which reads the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flashinfer_backend.ops import device

# first of the tile's rows in `order`, how many, start, end, where the first row's sums go, how far the next
# row's are from there, slot
PREFIX_WORDS = 8
QUERIES = 64  # rows of a tile's product: query heads of its rows that share a key/value head
PROGRAMS_PER_SM = 2
MAX_PREFIX_PARTS = 64
_CHUNK = 64  # tokens; parts start at multiples of it
_LEAST_PART = 256  # tokens; shorter parts cost more to add up than they gain
_COLUMNS = 64  # of block tables that are compared at once
_LEAST_GAIN = 256  # tokens that a set of rows saves at least, for its own tiles and parts


class Prefixes(NamedTuple):
    """Sets of a step's decode rows that begin with the same blocks. rows: in the step's order, one set behind
    the other; counts: rows of each set, two or more; tokens: what each set shares, in whole blocks. int32."""

    rows: np.ndarray
    counts: np.ndarray
    tokens: np.ndarray

    @property
    def saved(self) -> int:
        """Tokens that are not read again."""
        return int(((self.counts - 1) * self.tokens.astype(np.int64)).sum())

    def of_rows(self, each: np.ndarray, rows: int) -> np.ndarray:
        """int32 [rows]: what `each` has of the row's set, 0 of rows in none."""
        found = np.zeros(rows, np.int32)
        found[self.rows] = np.repeat(each, self.counts)
        return found


def find_prefixes(
    table: np.ndarray, slots: np.ndarray, counts: np.ndarray, block_size: int
) -> Prefixes | None:
    """The sets that save most, each row in one of them at most. table: int32 [slots, columns], of which each
    row's first `counts` blocks are full; columns behind them are not looked at."""
    _, sets, sizes = np.unique(table[slots, 0], return_inverse=True, return_counts=True)
    candidates = ((sizes[sets] > 1) & (counts > 0)).nonzero()[0]
    if len(candidates) < 2:
        return None
    keys = [table[slots[row], : counts[row]].tobytes() for row in candidates.tolist()]
    order = sorted(range(len(keys)), key=keys.__getitem__)  # rows that begin alike are neighbours
    rows = candidates[order]
    slots, counts = slots[rows], counts[rows]
    # Neighbours that share these columns are looked at one by one, as rows may be of any length.
    columns = min(int(counts.max()), _COLUMNS)
    first = table[slots, :columns]
    differ = first[1:] != first[:-1]
    shared = np.where(differ.any(1), differ.argmax(1), columns)
    shared = np.minimum(shared, np.minimum(counts[1:], counts[:-1]))
    for pair in (shared == columns).nonzero()[0].tolist():
        end = min(counts[pair], counts[pair + 1])
        unlike = table[slots[pair], columns:end] != table[slots[pair + 1], columns:end]
        shared[pair] = columns + (unlike.argmax() if unlike.any() else len(unlike))
    sets_found = _best_sets((shared * block_size).tolist())
    if not sets_found:
        return None
    return Prefixes(
        np.concatenate([rows[first:end] for first, end, _ in sets_found]).astype(np.int32),
        np.array([end - first for first, end, _ in sets_found], np.int32),
        np.array([tokens for *_, tokens in sets_found], np.int32),
    )


def _best_sets(shared: list[int]) -> list[tuple[int, int, int]]:
    """(first, end, tokens) of sets of neighbours, of which each shares shared[i] tokens with the next one.
    The longest run of neighbours that share a number of tokens is a set, or the sets within it are, whichever
    saves more."""
    best: list[tuple[int, int, int]] = []
    # Runs that go on: tokens, first row, what the sets within save, these sets.
    open_runs: list[tuple[int, int, int, list[tuple[int, int, int]]]] = []
    for end, tokens in enumerate([*shared, 0], 1):
        first, gain, sets = end - 1, 0, best[:0]
        while open_runs and open_runs[-1][0] > tokens:
            deeper, first, within, inner = open_runs.pop()
            gain, sets = gain + within, inner + sets
            whole = (end - first - 1) * deeper - _LEAST_GAIN
            if whole > 0 and whole >= gain:
                gain, sets = whole, [(first, end, deeper)]
        if not tokens:
            best += sets
        elif open_runs and open_runs[-1][0] == tokens:
            _, first, within, inner = open_runs.pop()
            open_runs.append((tokens, first, within + gain, inner + sets))
        else:
            open_runs.append((tokens, first, gain, sets))
    return best


class PrefixTiles:
    """How one rank cuts up the prefixes of its steps of up to `rows` rows; with its share of the heads."""

    def __init__(self, rows: int, num_heads: int, num_kv_heads: int) -> None:
        self._tile = QUERIES // (num_heads // num_kv_heads)  # rows of one
        self._most = max(1, PROGRAMS_PER_SM * device.sms() // num_kv_heads)  # that run at the same time
        self.items = max(rows // 2, self._most)
        # Sums of a row, one for each part: several parts only where all tiles run at the same time.
        self.cells = max(rows, self._tile * self._most)
        self.sizes = [self.items * PREFIX_WORDS, -(-rows // 8) * 8]  # words of items, and of the order
        self.words = sum(self.sizes)
        self._last: tuple[Prefixes, np.ndarray, RowParts] | None = None

    @staticmethod
    def fit(num_heads: int, num_kv_heads: int) -> bool:
        """Whether a tile has several rows."""
        return num_heads // num_kv_heads <= QUERIES // 2

    def split(
        self, prefixes: Prefixes | None, slots: np.ndarray, first_cell: int, words: NDArray[np.int32]
    ) -> RowParts:
        """Fill words int32 [self.words]: items [self.items, PREFIX_WORDS], of which unused ones have no
        rows, and the order of rows that they are of. Sums go to the cells from first_cell on. slots: of the
        step's rows; the same object `prefixes` means the same slots and cells as before. Tiles of the same
        part are neighbours, since one finds in L2 what the other reads."""
        if prefixes is None:
            words[1 : self.sizes[0] : PREFIX_WORDS] = 0
            none = np.zeros(len(slots), np.int32)
            return RowParts(none, none, none)
        if self._last is None or self._last[0] is not prefixes:
            new = np.zeros(self.words, np.int32)
            self._last = prefixes, new, self._split(prefixes, slots, first_cell, new)
        words[:] = self._last[1]
        return self._last[2]

    def _split(
        self, prefixes: Prefixes, slots: np.ndarray, first_cell: int, words: NDArray[np.int32]
    ) -> RowParts:
        items, order = words[: self.sizes[0]].reshape(-1, PREFIX_WORDS), words[self.sizes[0] :]
        rows, counts, tokens = prefixes
        order[: len(rows)] = rows
        tiles = -(-counts // self._tile)
        longest = int(tokens.max())
        most = max(1, min(self._most, MAX_PREFIX_PARTS, longest // _LEAST_PART))
        chunks = _rounded(-(-longest // np.arange(most, 0, -1)))
        needed = (-(-tokens // chunks[:, None]) * tiles).sum(1)
        fits = needed <= self._most
        chunk = int(chunks[fits.argmax()]) if fits.any() else _rounded(longest)
        parts = _rounded(-(-tokens // -(-tokens // chunk)))  # of equal length, in whole chunks
        split = -(-tokens // parts)
        first_row, first_sum = np.cumsum(counts) - counts, np.cumsum(counts * split) - counts * split
        first_sum += first_cell
        order_of_sets = np.argsort(-np.minimum(parts, tokens), kind="stable")
        each = (tiles * split)[order_of_sets]
        of_set = np.repeat(order_of_sets, each)
        number = np.arange(len(of_set)) - np.repeat(np.cumsum(each) - each, each)
        part, tile = number // tiles[of_set], number % tiles[of_set] * self._tile
        used = items[: len(of_set)]
        used[:, 0] = first_row[of_set] + tile
        used[:, 1] = np.minimum(counts[of_set] - tile, self._tile)
        used[:, 2] = part * parts[of_set]
        used[:, 3] = np.minimum(used[:, 2] + parts[of_set], tokens[of_set])
        used[:, 4] = first_sum[of_set] + tile * split[of_set] + part
        used[:, 5], used[:, 6] = split[of_set], slots[rows[first_row[of_set]]]
        cells = np.zeros(len(slots), np.int32)
        place = np.arange(len(rows)) - np.repeat(first_row, counts)
        cells[rows] = np.repeat(first_sum, counts) + place * np.repeat(split, counts)
        return RowParts(prefixes.of_rows(tokens, len(slots)), prefixes.of_rows(split, len(slots)), cells)


class RowParts(NamedTuple):
    """For each row, int32 [rows]: tokens of its prefix, the number of parts that read them, and the cell of
    the first one's sums; 0 where it shares none."""

    tokens: np.ndarray
    parts: np.ndarray
    cells: np.ndarray


def _rounded(tokens: np.ndarray | int) -> np.ndarray:
    return (np.asarray(tokens) + (_CHUNK - 1)) // _CHUNK * _CHUNK
