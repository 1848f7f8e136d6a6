# SPDX-License-Identifier: Apache-2.0
"""What the Triton decode kernel is told of rows: as work items of about equal length, and where they end."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from torch import Tensor

from flashinfer_backend.attention.prefixes import RowParts
from flashinfer_backend.core.tuned import DecodeAttention, Steps, find, steps
from flashinfer_backend.ops import device

# row, start, end, first item of the row, items of the row, slot, and two more, together a 32-byte sector:
# query tokens of the row and the first of them, or parts of what it shares and the first one's cell
ITEM_WORDS = 8
MAX_PARTS = 64  # items of one row
_CHUNK = 64  # tokens; items start at multiples of it


class Lengths(NamedTuple):
    """Where rows end, as the device knows it. lengths: int32 [slots], the last one is 0 and padding's; a row
    has `ahead` tokens more. queries: the most query tokens of a row, which are its last ones. ragged: q has
    as many of each row as its items say; else it has `queries` of each, and those behind them are padding."""

    lengths: Tensor
    queries: int = 1
    ahead: int = 0
    ragged: bool = False


def config_steps(fp8: bool) -> Steps[DecodeAttention]:
    """The decode kernel's forms by rising rows, over a cache of 16 bits or of e4m3 (core/tuned)."""
    return steps(device.active().decode_attention, "e4m3" if fp8 else "16 bits")


@device.cached
def choose_config(rows: int, fp8: bool) -> DecodeAttention:
    """The one that is tuned for this number of rows."""
    found = find(device.active().decode_attention, "e4m3" if fp8 else "16 bits", rows)
    assert found is not None  # tuned.Tuned checks it
    return found


@device.cached
def max_items(rows: int, num_kv_heads: int, fp8: bool) -> int:
    """Work items that `rows` rows are split into at most: enough to give every SM a few programs.
    fp8: of a cache of e4m3."""
    programs = choose_config(rows, fp8).programs_per_sm * device.sms()
    return rows + -(programs // -num_kv_heads)


def most_items(rows: int, num_kv_heads: int, fp8: bool) -> int:
    """The most that max_items gives for 1 to `rows` rows: fewer may be split for more programs."""
    below = [limit for limit, _ in config_steps(fp8) if limit is not None and limit < rows]
    return max(max_items(some, num_kv_heads, fp8) for some in (*below, rows))


def planned_window(window: int | None, drafts: int) -> int | None:
    """Of the upper bounds that the host has of rows with up to `drafts` drafts, a window that surely has all
    that their queries see: those of the step before may all be wrong, a row's first query stands before its
    drafts, and the bounds count as many keys again that a proposer looks at. A row's first part has keys of
    each query, which the kernel relies on."""
    assert 3 * drafts < _CHUNK
    return None if window is None else window + 3 * drafts


def split_rows(
    kv_lens: np.ndarray,
    slots: np.ndarray,
    items: int,
    out: np.ndarray,
    window: int | None = None,
    q_lens: np.ndarray | None = None,
    shared: RowParts | None = None,
) -> None:
    """Fill out[items, ITEM_WORDS] int32 with chunks of rows of lengths kv_lens > 0, whose blocks are in the
    block table's rows `slots` (both int32 [rows]).

    items must be above the number of rows. A row's chunks are consecutive items, and rows of longer chunks
    come first: programs start in this order, and none of the last ones should be a long one. Unused items
    have row -1. window: the latest tokens of a row that are read; None: all. q_lens: int32 [rows], query
    tokens of each row; by default the items do not say. shared: what is read for several rows at once, and
    left out here; without window and q_lens.
    """
    behind = None if shared is None else shared.tokens
    if window is not None:
        behind = np.maximum(kv_lens - window, 0)
    if behind is not None:
        kv_lens = kv_lens - behind
    rows, longest = len(kv_lens), int(kv_lens.max())
    # Reading a part takes time in proportion to its length, adding up the parts to their number: the best
    # number of parts grows with the root of the length.
    most = min(MAX_PARTS, max(4, math.isqrt(longest // 6)))
    chunk = max(-(int(kv_lens.sum(dtype=np.int64)) // (rows - items)), -(longest // -most))
    chunk = max(_CHUNK, (chunk + _CHUNK - 1) // _CHUNK * _CHUNK)
    # Equal parts of a row, in whole chunks; none can be empty, as a part is no longer than `chunk`.
    counts = (kv_lens + (chunk - 1)) // chunk
    parts = ((kv_lens + counts - 1) // counts + (_CHUNK - 1)) // _CHUNK * _CHUNK
    order = np.argsort(-np.minimum(parts, kv_lens), kind="stable")
    counts, parts, kv_lens = counts[order], parts[order], kv_lens[order]
    ends = np.cumsum(counts, dtype=np.int32)
    whole = np.empty((rows, ITEM_WORDS), np.int32)  # what the items of a row have in common
    whole[:, 0], whole[:, 1], whole[:, 2], whole[:, 5] = order, parts, kv_lens, slots[order]
    whole[:, 3], whole[:, 4] = ends - counts, counts
    if q_lens is not None:
        whole[:, 6], whole[:, 7] = q_lens[order], (np.cumsum(q_lens) - q_lens)[order]
    if shared is not None:
        whole[:, 6], whole[:, 7] = shared.parts[order], shared.cells[order]
    used = int(ends[-1])
    each = out[:used]
    each[:] = whole if used == rows else np.repeat(whole, counts, axis=0)
    part = each[:, 1].copy()
    each[:, 1] = (np.arange(used, dtype=np.int32) - each[:, 3]) * part
    each[:, 2] = np.minimum(each[:, 1] + part, each[:, 2])
    if behind is not None:
        each[:, 1:3] += behind[each[:, 0], None]
    out[used:items, 0] = -1
