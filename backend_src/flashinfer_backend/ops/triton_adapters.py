# SPDX-License-Identifier: Apache-2.0
"""Triton kernels: what each token's adapter adds to a product.

Two kernels a product: `shrink`, down @ x, runs in front of it; `expand`, up @ that, runs behind it, or is
part of the product where ops.triton_linear computes that. A step has one list of its adapters, so tokens need
not be sorted. `expand` takes the adapters of the list side by side, as one longer rank in which each token
has zeros but for its own: that is one product for several adapters, whose loads do not wait for each other.

No call waits for the device or depends on values there, so all of it can be captured. Launches overlap the
previous kernel as in triton_linear: what is read before the wait, weights and the list, was there before the
step's embedding, which is launched without overlap.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashinfer_backend.ops.triton_prefetch import prefetch_rows
from flashinfer_backend.ops.weight import Added, Chosen, LowRank

MOST_TOKENS = 64  # of a tile
ROWS = 64  # of the product, of a program of `_expand`
CHUNK = 128  # of ranks of adapters side by side, at a time
_SPLITS = 8  # programs that share the columns of x
_FEW = 512  # tokens, up to which that many do


@triton.jit(do_not_specialize=["tokens", "most"], do_not_specialize_on_alignment=["places", "distinct"])
def _distinct(places, distinct, tokens, most, ROOM: tl.constexpr, TOKENS: tl.constexpr, LISTED: tl.constexpr):
    place = tl.arange(0, ROOM)
    there = tl.zeros([ROOM], tl.int32)
    for begin in range(0, tokens, TOKENS):
        token = begin + tl.arange(0, TOKENS)
        found = tl.load(places + token, mask=token < tokens, other=-1)
        there = tl.maximum(there, tl.max((found[None, :] == place[:, None]).to(tl.int32), axis=1))
    count = tl.sum(there, axis=0)
    tl.store(distinct, count)
    tl.store(distinct + tl.cumsum(there, axis=0), place, mask=there > 0)
    listed = tl.arange(0, LISTED)
    tl.store(distinct + 1 + listed, -1, mask=(listed >= count) & (listed < most))


@triton.jit(do_not_specialize=["tokens", "most"], do_not_specialize_on_alignment=["places", "distinct"])
def _shrink(
    x, norm_weight, down, places, distinct, inner, tokens, most,
    K: tl.constexpr, SHARE: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr, THREADS: tl.constexpr, PREFETCH: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    # Programs of a tile of tokens are neighbours, one for each adapter of the list.
    tile, part, split = tl.program_id(0) // most, tl.program_id(1), tl.program_id(2)
    place = tl.load(distinct + 1 + tl.program_id(0) % most).to(tl.int64)
    first = (tl.maximum(place, 0) * PARTS + part) * RANK  # row of all places' matrices
    column = split * SHARE
    if NATIVE:
        gdc_launch_dependents()
        if PREFETCH:
            BYTES: tl.constexpr = SHARE * (down.dtype.element_ty.primitive_bitwidth // 8)
            prefetch_rows(down, first, column, K, RANK, BYTES, THREADS)
        # Also where nothing is left to do: the next kernel takes it that what came before this one is done.
        gdc_wait()
    token = tile * TOKENS + tl.arange(0, TOKENS)
    mine = (tl.load(places + token, mask=token < tokens, other=-1) == place) & (place >= 0)
    if tl.max(mine.to(tl.int32), axis=0) > 0:
        rank, k = tl.arange(0, RANK), tl.arange(0, COLUMNS)
        rows = x + token.to(tl.int64)[:, None] * K
        matrix = down + (first + rank)[:, None] * K
        total = tl.zeros([TOKENS, RANK], tl.float32)
        for begin in tl.range(column, min(column + SHARE, K), COLUMNS, num_stages=3):
            at = begin + k
            inside = (at < K)[None, :]
            block = tl.load(rows + at[None, :], mask=mine[:, None] & inside, other=0.0)
            if norm_weight is not None:
                # The norm's scale is a factor of each token: the product applies it.
                scale = tl.load(norm_weight + at, mask=at < K, other=0.0).to(tl.float32)
                block = (block.to(tl.float32) * scale[None, :]).to(x.dtype.element_ty)
            total = tl.dot(block, tl.load(matrix + at[None, :], mask=inside, other=0.0).T, total)
        cells = ((split * tokens + token.to(tl.int64)) * PARTS + part) * RANK
        tl.store(inner + cells[:, None] + rank[None, :], total, mask=mine[:, None])


@triton.jit
def add_expanded(
    acc, inner, up, places, distinct, t, row, part, tokens, height, end,
    PARTS: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """acc [TOKENS, ROWS] (SWAP: transposed) plus what the adapters of tokens t add to rows `row` of a product
    of `height` rows. Those from `end` on get zeros. All rows are of one part."""
    mine = tl.load(places + t, mask=t < tokens, other=-1)
    STEP: tl.constexpr = RANK if RANK < 32 else 32
    WIDTH: tl.constexpr = CHUNK // STEP  # adapters at a time
    rank, index, k = tl.arange(0, STEP), tl.arange(0, WIDTH), tl.arange(0, CHUNK)
    count = tl.load(distinct)
    # No loop is pipelined: the product before them needs the shared memory.
    for first in tl.range(0, RANK, STEP, num_stages=1):
        cells = inner + (t.to(tl.int64)[:, None] * PARTS + part) * RANK + first + rank[None, :]
        sums = tl.load(cells, mask=(mine >= 0)[:, None], other=0.0)
        for split in tl.static_range(1, SPLITS):
            plane = split * tokens.to(tl.int64) * (PARTS * RANK)
            sums += tl.load(cells + plane, mask=(mine >= 0)[:, None], other=0.0)
        sums = sums.to(up.dtype.element_ty)
        for begin in tl.range(0, count, WIDTH, num_stages=1):
            listed = tl.load(distinct + 1 + begin + index, mask=begin + index < count, other=-2)
            own = (mine[:, None] == listed[None, :])[:, :, None]
            spread = tl.where(own, sums[:, None, :], tl.zeros_like(sums)[:, None, :])
            spread = tl.reshape(spread, [t.shape[0], CHUNK])
            there = begin + k // STEP < count
            place = tl.load(distinct + 1 + begin + k // STEP, mask=there, other=0).to(tl.int64)
            place = tl.max_constancy(place, STEP)
            matrix_cells = (
                place[None, :] * (height * RANK) + row[:, None] * RANK + first + (k % STEP)[None, :]
            )
            matrix = tl.load(up + matrix_cells, mask=(row < end)[:, None] & there[None, :], other=0.0)
            if SWAP:
                acc = tl.dot(matrix, spread.T, acc)
            else:
                acc = tl.dot(spread, matrix.T, acc)
    return acc


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["places", "distinct"])
def _expand(
    product, inner, up, places, distinct, tokens, height, first_end, second_end,
    PARTS: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    if NATIVE:
        gdc_launch_dependents()
        gdc_wait()
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    mine = tl.load(places + t, mask=t < tokens, other=-1)
    if tl.max(mine, axis=0) >= 0:
        # Each part has blocks of rows of its own.
        block, first = tl.program_id(1), tl.cdiv(first_end, ROWS)
        second = first + tl.cdiv(second_end - first_end, ROWS)
        part = (block >= first).to(tl.int32) + (block >= second).to(tl.int32)
        begin = tl.where(part == 0, 0, tl.where(part == 1, first_end, second_end))
        end = tl.where(part == 0, first_end, tl.where(part == 1, second_end, height))
        block -= tl.where(part == 0, 0, tl.where(part == 1, first, second))
        row = begin + block * ROWS + tl.arange(0, ROWS)
        acc = tl.zeros([TOKENS, ROWS], tl.float32)
        acc = add_expanded(
            acc, inner, up, places, distinct, t, row, part, tokens, height, end, PARTS, RANK, SPLITS, CHUNK,
            False,
        )  # fmt: skip
        cells = product + t.to(tl.int64)[:, None] * height + row[None, :]
        written = (mine >= 0)[:, None] & (row < end)[None, :]
        before = tl.load(cells, mask=written, other=0.0)
        added = acc.to(before.dtype).to(tl.float32)
        tl.store(cells, (before.to(tl.float32) + added).to(before.dtype), mask=written)


def group_adapters(places: Tensor, room: int) -> Chosen:
    """See ops.torch_ops.group_adapters."""
    tokens = len(places)
    most = max(1, min(tokens, room))
    distinct = torch.empty(1 + most, dtype=torch.int32, device=places.device)
    sizes = {"ROOM": triton.next_power_of_2(room), "TOKENS": 64, "LISTED": triton.next_power_of_2(room)}
    _distinct[(1,)](places, distinct, tokens, most, **sizes)
    return Chosen(places, distinct)


def shrink(
    x: Tensor, low: LowRank, chosen: Chosen, norm_weight: Tensor | None = None, native: bool = True
) -> Added:
    """down @ x of each token's adapter, x[T, K] contiguous. norm_weight[K]: of a norm of x of which this is
    one factor; the tokens' factors are left to the product. native: as in triton_linear."""
    (_, parts, rank, columns), tokens = low.down.shape, len(x)
    splits = _SPLITS if tokens <= _FEW else 1
    tile = min(MOST_TOKENS, max(16, triton.next_power_of_2(tokens)))
    block = max(32, min(256, 8192 // rank))
    share = triton.cdiv(triton.cdiv(columns, splits), block) * block
    inner = torch.empty(splits, tokens, parts, rank, dtype=torch.float32, device=x.device)
    most = len(chosen.distinct) - 1
    even = columns % (splits * block) == 0 and splits > 1
    _shrink[(triton.cdiv(tokens, tile) * most, parts, splits)](
        x, norm_weight, low.down, *chosen, inner, tokens, most,
        K=columns, SHARE=share, PARTS=parts, RANK=rank, TOKENS=tile, COLUMNS=block, THREADS=128,
        PREFETCH=even, NATIVE=native, launch_pdl=native,
    )  # fmt: skip
    return Added(inner, low, chosen)


def expand(product: Tensor, added: Added, native: bool = True) -> Tensor:
    """Add up @ what shrink() gave to product[T, N] contiguous, in place; returns product."""
    (inner, low, chosen), (tokens, height) = added, product.shape
    splits, _, parts, rank = inner.shape
    tile = min(MOST_TOKENS, max(16, triton.next_power_of_2(tokens)))
    first, second = (*low.ends, height, height)[:2]
    starts = (0, *low.ends[:-1])
    blocks = sum(triton.cdiv(end - start, ROWS) for start, end in zip(starts, low.ends, strict=True))
    _expand[(triton.cdiv(tokens, tile), blocks)](
        product, inner, low.up, *chosen, tokens, height, first, second,
        PARTS=parts, RANK=rank, SPLITS=splits, TOKENS=tile, ROWS=ROWS, CHUNK=CHUNK, NATIVE=native,
        launch_pdl=native,
    )  # fmt: skip
    return product
