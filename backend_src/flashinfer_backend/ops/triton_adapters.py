# SPDX-License-Identifier: Apache-2.0
"""Triton kernels: what each token's adapter adds to a product.

A program has a tile of tokens and one of the adapters that they have: the others' rows are zeros in its dot
products, and are not written. So tokens need not be sorted; a tile costs as many passes as it has adapters.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashinfer_backend.ops.weight import LowRank

_TOKENS = 16  # of a tile: the fewest that a dot product takes
_COLUMNS = 128  # of x, at a time
_ROWS = 128  # of the product, of a program
_PROGRAMS = 128  # that the first kernel has at least, where x has columns enough


@triton.jit
def _own(chosen, tile, nth, count, TOKENS: tl.constexpr):
    """A tile's tokens, which of them have its `nth` adapter counted from the last place, and that place; -1
    where it has fewer."""
    token = tile * TOKENS + tl.arange(0, TOKENS)
    place = tl.load(chosen + token, mask=token < count, other=-1)
    left = place
    current = tl.max(left, axis=0)
    for _ in range(nth):
        left = tl.where(left == current, -1, left)
        current = tl.max(left, axis=0)
    return token, place == current, current


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["chosen"])
def _shrink(
    x,
    down,
    chosen,
    inner,
    count,
    columns,
    PASSES: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program, part, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token, mine, place = _own(chosen, program // PASSES, program % PASSES, count, TOKENS)
    if place >= 0:
        rank, column = tl.arange(0, RANK), tl.arange(0, COLUMNS)
        matrix = down + (place.to(tl.int64) * PARTS + part) * RANK * columns
        rows = x + token.to(tl.int64)[:, None] * columns
        total = tl.zeros((TOKENS, RANK), tl.float32)
        for begin in range(split * COLUMNS, columns, SPLITS * COLUMNS):
            at = begin + column
            left = tl.load(rows + at[None, :], mask=mine[:, None] & (at < columns)[None, :], other=0.0)
            right = tl.load(
                matrix + rank[:, None] * columns + at[None, :], mask=(at < columns)[None, :], other=0.0
            )
            total = tl.dot(left, tl.trans(right), total)
        target = ((split * count + token.to(tl.int64)) * PARTS + part) * RANK
        tl.store(inner + target[:, None] + rank[None, :], total, mask=mine[:, None])


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["chosen"])
def _expand(
    product,
    up,
    chosen,
    inner,
    count,
    width,
    first_end,
    second_end,
    PASSES: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):
    program = tl.program_id(0)
    token, mine, place = _own(chosen, program // PASSES, program % PASSES, count, TOKENS)
    if place >= 0:
        rank, row = tl.arange(0, RANK), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        inside = row < width
        own = up + place.to(tl.int64) * width * RANK + row[:, None] * RANK + rank[None, :]
        matrix = tl.load(own, mask=inside[:, None], other=0.0)
        of = (row >= first_end).to(tl.int32) + (row >= second_end).to(tl.int32)  # the part of each row
        total = tl.zeros((TOKENS, ROWS), tl.float32)
        for part in range(PARTS):
            sums = tl.zeros((TOKENS, RANK), tl.float32)
            for split in range(SPLITS):
                source = ((split * count + token.to(tl.int64)) * PARTS + part) * RANK
                sums += tl.load(inner + source[:, None] + rank[None, :], mask=mine[:, None], other=0.0)
            kept = tl.where((of == part)[:, None], matrix, 0.0)
            total = tl.dot(sums.to(matrix.dtype), tl.trans(kept), total)
        target = product + token.to(tl.int64)[:, None] * width + row[None, :]
        written = mine[:, None] & inside[None, :]
        before = tl.load(target, mask=written, other=0.0)
        added = total.to(before.dtype).to(tl.float32)
        tl.store(target, (before.to(tl.float32) + added).to(before.dtype), mask=written)


def add_adapters(product: Tensor, x: Tensor, adapters: LowRank, chosen: Tensor) -> Tensor:
    """See ops.torch_ops.add_adapters. Products of up to three modules."""
    (places, parts, rank, columns), (count, width) = adapters.down.shape, product.shape
    tiles, passes = -(-count // _TOKENS), min(_TOKENS, places)
    steps = -(-columns // _COLUMNS)
    splits = 1 << max(0, min(steps, _PROGRAMS // (tiles * parts)).bit_length() - 1)  # few variants of kernels
    inner = torch.empty(splits, count, parts, rank, dtype=torch.float32, device=x.device)
    constants = {"PASSES": passes, "PARTS": parts, "RANK": rank, "SPLITS": splits, "TOKENS": _TOKENS}
    first, second = (*adapters.ends[:-1], width, width)[:2]
    _shrink[tiles * passes, parts, splits](
        x, adapters.down, chosen, inner, count, columns, COLUMNS=_COLUMNS, **constants
    )
    _expand[tiles * passes, -(-width // _ROWS)](
        product, adapters.up, chosen, inner, count, width, first, second, ROWS=_ROWS, **constants
    )
    return product
