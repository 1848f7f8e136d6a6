# SPDX-License-Identifier: Apache-2.0
"""Triton kernels: what each token's adapter adds to a product.

`shrink` is down @ x, `expand` is up @ that. Where ops.triton_linear computes the product, both are part of
its launch: further programs, in front of the others, shrink while those read the weights, and a count of
them that are done lets the others expand (`shrink_beside`, `await_shrink`). Elsewhere they are two kernels,
in front of the product and behind it. A step has one list of its adapters, so tokens need not be sorted.
`expand` takes the adapters of the list side by side, as one longer rank in which each token has zeros but
for its own: that is one product for several adapters, whose loads do not wait for each other.

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


@triton.jit
def _shrink_share(
    x, norm_weight, down, places, inner, tokens, tile, place, part, split,
    K: tl.constexpr, SHARE: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    # Of one adapter, for the tokens of a tile that have it: a module's part of down @ x.
    first, column = (place * PARTS + part) * RANK, split * SHARE  # row of all places' matrices
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


@triton.jit(do_not_specialize=["tokens", "most"], do_not_specialize_on_alignment=["places", "distinct"])
def _shrink(
    x, norm_weight, down, places, distinct, inner, tokens, most,
    K: tl.constexpr, SHARE: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr, THREADS: tl.constexpr, PREFETCH: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    # Programs of a tile of tokens are neighbours, one for each adapter of the list.
    tile, part, split = tl.program_id(0) // most, tl.program_id(1), tl.program_id(2)
    place = tl.load(distinct + 1 + tl.program_id(0) % most).to(tl.int64)
    if NATIVE:
        gdc_launch_dependents()
        if PREFETCH:
            BYTES: tl.constexpr = SHARE * (down.dtype.element_ty.primitive_bitwidth // 8)
            first = (tl.maximum(place, 0) * PARTS + part) * RANK
            prefetch_rows(down, first, split * SHARE, K, RANK, BYTES, THREADS)
        # Also where nothing is left to do: the next kernel takes it that what came before this one is done.
        gdc_wait()
    _shrink_share(
        x, norm_weight, down, places, inner, tokens, tile, place, part, split, K, SHARE, PARTS, RANK, TOKENS,
        COLUMNS,
    )  # fmt: skip


@triton.jit
def shrink_beside(
    x, norm_weight, down, places, distinct, inner, arrived, tokens, number, shrinkers, last,
    K: tl.constexpr, SHARE: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, THREADS: tl.constexpr, PREFETCH: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """What program `number` of `shrinkers` does in the launch of a product."""
    count = tl.load(distinct)
    tasks = tl.cdiv(tokens, TOKENS) * count * (PARTS * SPLITS)
    if NATIVE:
        gdc_launch_dependents()
        if PREFETCH:
            BYTES: tl.constexpr = SHARE * (down.dtype.element_ty.primitive_bitwidth // 8)
            for task in tl.range(number, tasks, shrinkers, num_stages=1):
                place = tl.load(distinct + 1 + task // (PARTS * SPLITS) % count).to(tl.int64)
                first = (place * PARTS + task // SPLITS % PARTS) * RANK
                prefetch_rows(down, first, task % SPLITS * SHARE, K, RANK, BYTES, THREADS)
        gdc_wait()
    for task in tl.range(number, tasks, shrinkers, num_stages=1):
        both = task // (PARTS * SPLITS)
        place = tl.load(distinct + 1 + both % count).to(tl.int64)
        _shrink_share(
            x, norm_weight, down, places, inner, tokens, both // count, place, task // SPLITS % PARTS,
            task % SPLITS, K, SHARE, PARTS, RANK, TOKENS, COLUMNS,
        )  # fmt: skip
    if NATIVE:
        count_arrival(arrived, last, "release", THREADS)


@triton.jit
def count_arrival(arrived, last, ORDER: tl.constexpr, THREADS: tl.constexpr):
    """Add 1, once all threads are here, or after `last` begin again at 0: so the next launch finds 0.
    ORDER: "release", so that who waits sees what this program wrote, or "relaxed", which costs no wait."""
    tl.debug_barrier()
    ADD: tl.constexpr = "@first red." + ORDER + ".gpu.global.inc.u32 [$1], $2; mov.u32 $0, 0; }"
    tl.inline_asm_elementwise(
        "{ .reg .pred first; .reg .b32 thread; mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0; " + ADD,
        "=r,l,r",
        [tl.full([THREADS], 0, tl.int64) + arrived.to(tl.int64), tl.full([THREADS], 0, tl.int32) + last],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def await_shrink(arrived, shrinkers, THREADS: tl.constexpr):
    """Until so many programs have arrived, which were started before this one."""
    tl.inline_asm_elementwise(
        "{ .reg .pred early; .reg .b32 found; again: ld.acquire.gpu.global.u32 found, [$1];"
        " setp.lt.u32 early, found, $2; @early bra again; mov.u32 $0, found; }", "=r,l,r",
        [tl.full([THREADS], 0, tl.int64) + arrived.to(tl.int64), tl.full([THREADS], 0, tl.int32) + shrinkers],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def prefetch_up(
    up, distinct, row, height, ROWS: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """Bring the listed adapters' rows from `row` on to L2: of each adapter they are one run of bytes."""
    BYTES: tl.constexpr = ROWS * RANK * (up.dtype.element_ty.primitive_bitwidth // 8)
    MOST: tl.constexpr = THREADS // WIDTH
    PIECES: tl.constexpr = MOST if BYTES // MOST >= 16 else BYTES // 16
    count, index = tl.load(distinct), tl.arange(0, WIDTH * PIECES)
    for begin in tl.range(0, count, WIDTH, num_stages=1):
        listed = begin + index // PIECES
        place = tl.load(distinct + 1 + listed, mask=listed < count, other=0).to(tl.int64)
        cells = up + place * (height * RANK) + row * RANK + index % PIECES * (ROWS * RANK // PIECES)
        tl.inline_asm_elementwise(
            "{ .reg .pred there; setp.ne.u32 there, $2, 0;"
            " @there cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }", "=r,l,r",
            [cells.to(tl.int64), tl.where(listed < count, BYTES // PIECES, 0)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def listed_places(distinct, begin, count, STEP: tl.constexpr, CHUNK: tl.constexpr):
    """The list's places from `begin` on, each for STEP columns; -1 behind the end."""
    listed = begin + tl.arange(0, CHUNK) // STEP
    return tl.load(distinct + 1 + listed, mask=listed < count, other=-1)


@triton.jit
def side_by_side(up, place, row, height, end, first, RANK: tl.constexpr, STEP: tl.constexpr):
    """[ROWS, CHUNK]: of the adapters at `place`, columns `first` and following of rows below `end`."""
    k = tl.arange(0, place.shape[0]) % STEP
    at = tl.max_constancy(tl.maximum(place, 0).to(tl.int64), STEP)
    cells = at[None, :] * (height * RANK) + row[:, None] * RANK + first + k[None, :]
    return tl.load(up + cells, mask=(row < end)[:, None] & (place >= 0)[None, :], other=0.0)


@triton.jit
def inner_sums(
    inner, t, known, first, part, tokens,
    PARTS: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """[TOKENS, STEP]: down @ x of tokens t, of ranks from `first` on; 0 where not known."""
    cells = inner + (t.to(tl.int64)[:, None] * PARTS + part) * RANK + first + tl.arange(0, STEP)[None, :]
    # Past L1, which does not see what other programs of this launch have written.
    sums = tl.load(cells, mask=known[:, None], other=0.0, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        plane = split * tokens.to(tl.int64) * (PARTS * RANK)
        sums += tl.load(cells + plane, mask=known[:, None], other=0.0, cache_modifier=".cg")
    return sums


@triton.jit
def add_expanded(
    acc, matrix, sums, place, mine, count, inner, up, distinct, t, row, part, tokens, height, end,
    PARTS: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, STEP: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """acc [TOKENS, ROWS] (SWAP: transposed) plus what the adapters of tokens t add to rows `row` of a product
    of `height` rows. Those from `end` on get zeros. All rows are of one part. mine: the tokens' places;
    count: of the list; matrix, sums, place: side_by_side, inner_sums and listed_places of its beginning,
    which the caller has loaded ahead."""
    CHUNK: tl.constexpr = place.shape[0]
    WIDTH: tl.constexpr = CHUNK // STEP  # adapters at a time
    chunks = tl.cdiv(count, WIDTH)
    turns = chunks * (RANK // STEP)
    # Not pipelined: the product before it needs the shared memory.
    for turn in tl.range(0, turns, num_stages=1):
        spread = tl.broadcast_to(sums.to(up.dtype.element_ty)[:, None, :], [t.shape[0], WIDTH, STEP])
        spread = tl.reshape(spread, [t.shape[0], CHUNK])
        spread = tl.where(mine[:, None] == place[None, :], spread, tl.zeros_like(spread))
        if SWAP:
            acc = tl.dot(matrix, spread.T, acc)
        else:
            acc = tl.dot(spread, matrix.T, acc)
        follows = turn + 1
        more = follows < turns
        first = follows // chunks * STEP
        place = listed_places(distinct, follows % chunks * WIDTH, tl.where(more, count, 0), STEP, CHUNK)
        matrix = side_by_side(up, place, row, height, end, first, RANK, STEP)
        sums = inner_sums(inner, t, (mine >= 0) & more, first, part, tokens, PARTS, RANK, SPLITS, STEP)
    return acc


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["places", "distinct"])
def _expand(
    product, inner, up, places, distinct, tokens, height, first_end, second_end,
    PARTS: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    STEP: tl.constexpr, CHUNK: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    # Each part has blocks of rows of its own.
    block, first = tl.program_id(1), tl.cdiv(first_end, ROWS)
    second = first + tl.cdiv(second_end - first_end, ROWS)
    part = (block >= first).to(tl.int32) + (block >= second).to(tl.int32)
    begin = tl.where(part == 0, 0, tl.where(part == 1, first_end, second_end))
    end = tl.where(part == 0, first_end, tl.where(part == 1, second_end, height))
    block -= tl.where(part == 0, 0, tl.where(part == 1, first, second))
    row = begin + block * ROWS + tl.arange(0, ROWS)
    count = tl.load(distinct)
    place = listed_places(distinct, 0, count, STEP, CHUNK)
    matrix = side_by_side(up, place, row, height, end, 0, RANK, STEP)
    if NATIVE:
        gdc_launch_dependents()
        gdc_wait()
    mine = tl.load(places + t, mask=t < tokens, other=-1)
    if tl.max(mine, axis=0) >= 0:
        acc = tl.zeros([TOKENS, ROWS], tl.float32)
        sums = inner_sums(inner, t, mine >= 0, 0, part, tokens, PARTS, RANK, SPLITS, STEP)
        acc = add_expanded(
            acc, matrix, sums, place, mine, count, inner, up, distinct, t, row, part, tokens, height, end,
            PARTS, RANK, SPLITS, STEP, False,
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


def chunk(low: LowRank, chosen: Chosen) -> dict[str, int]:
    """STEP: ranks of an adapter that `expand` takes at a time; CHUNK: those of the adapters side by side."""
    step = min(low.up.shape[2], 32)
    return {"STEP": step, "CHUNK": step if len(chosen.distinct) == 2 else CHUNK}


def share(columns: int, rank: int, splits: int) -> dict[str, int | bool]:
    """Of x's columns, what one of `splits` programs takes, COLUMNS at a time; whether all take as many."""
    block = max(32, min(256, 8192 // rank))
    own = triton.cdiv(triton.cdiv(columns, splits), block) * block
    return {"SHARE": own, "COLUMNS": block, "PREFETCH": splits > 1 and own * splits == columns}


def shrink(
    x: Tensor,
    low: LowRank,
    chosen: Chosen,
    norm_weight: Tensor | None = None,
    splits: int | None = None,
    native: bool = True,
) -> Added:
    """down @ x of each token's adapter, x[T, K] contiguous. norm_weight[K]: of a norm of x of which this is
    one factor; the tokens' factors are left to the product. splits: of x's columns; None: by the number of
    tokens. native: as in triton_linear."""
    (_, parts, rank, columns), tokens = low.down.shape, len(x)
    if splits is None:
        splits = _SPLITS if tokens <= _FEW else 1
    tile = min(MOST_TOKENS, max(16, triton.next_power_of_2(tokens)))
    inner = torch.empty(splits, tokens, parts, rank, dtype=torch.float32, device=x.device)
    most = len(chosen.distinct) - 1
    _shrink[(triton.cdiv(tokens, tile) * most, parts, splits)](
        x, norm_weight, low.down, *chosen, inner, tokens, most,
        K=columns, **share(columns, rank, splits), PARTS=parts, RANK=rank, TOKENS=tile, THREADS=128,
        NATIVE=native, launch_pdl=native,
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
        PARTS=parts, RANK=rank, SPLITS=splits, TOKENS=tile, ROWS=ROWS, **chunk(low, chosen), NATIVE=native,
        launch_pdl=native,
    )  # fmt: skip
    return product
