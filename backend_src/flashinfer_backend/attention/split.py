# SPDX-License-Identifier: Apache-2.0
"""Decode rows of unequal length as work items of about equal length, for the Triton decode kernel."""

from __future__ import annotations

import math

import numpy as np

ITEM_WORDS = 8  # row, start, end, first item of the row, items of the row, unused: one 32-byte sector
MAX_PARTS = 64  # items of one row
_CHUNK = 64  # tokens; items start at multiples of it


def max_items(rows: int, num_kv_heads: int) -> int:
    """Work items that `rows` rows are split into at most: enough to give every SM two or four programs."""
    return rows + -((264 if rows <= 48 else 528) // -num_kv_heads)


def split_rows(kv_lens: np.ndarray, items: int, out: np.ndarray) -> None:
    """Fill out[items, ITEM_WORDS] int32 with chunks of the rows of lengths kv_lens (int32 [rows], > 0).

    items must be above len(kv_lens). A row's chunks are consecutive items; unused items have row -1.
    """
    rows, longest = len(kv_lens), int(kv_lens.max())
    # Reading a part takes time in proportion to its length, adding up the parts to their number: the best
    # number of parts grows with the root of the length.
    most = min(MAX_PARTS, max(4, math.isqrt(longest // 6)))
    chunk = max(-(int(kv_lens.sum(dtype=np.int64)) // (rows - items)), -(longest // -most))
    chunk = max(_CHUNK, (chunk + _CHUNK - 1) // _CHUNK * _CHUNK)
    counts = (kv_lens + chunk - 1) // chunk
    firsts = np.cumsum(counts) - counts
    used = int(counts.sum())
    row = np.repeat(np.arange(rows, dtype=np.int32), counts)
    # Equal parts of a row, in whole chunks; none can be empty, as a part is no longer than `chunk`.
    part = ((kv_lens + counts - 1) // counts + _CHUNK - 1) // _CHUNK * _CHUNK
    start = (np.arange(used, dtype=np.int32) - firsts[row]) * part[row]
    out[used:items, 0] = -1
    out[:used, 0] = row
    out[:used, 1] = start
    out[:used, 2] = np.minimum(start + part[row], kv_lens[row])
    out[:used, 3] = firsts[row]
    out[:used, 4] = counts[row]
