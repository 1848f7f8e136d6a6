# SPDX-License-Identifier: Apache-2.0
"""Decode attention in Triton: a few query tokens per row over the paged cache, long rows split in chunks.

Of a row with drafts, the query heads of its tokens that share a key/value head are rows of one product, or of
some programs' (`tokens_together`). Its length is known on the device alone (`Lengths`): the host plans for an
upper bound, and with a window from a lower one on. A chunk outside of what is there adds nothing, nor does
one whose keys a query does not see: its peak is -inf and its sum 0.

A cache of e4m3 has a scale for keys, which is a part of the scale of the scores, and one for values, by which
the result is multiplied. Its elements become float16, which is exact and takes a quarter of the instructions
of bfloat16; so do queries, made smaller first, so that none is beyond float16's range.

ldmatrix transposes elements of 16 bits alone. So values of e4m3 are loaded as pairs, of an even and an odd
dim, and each half of the dims has a product of its own; the halves are joined behind the loop. One by one,
values would be read from shared memory a byte at a time: 1.7 times the instructions.

The host splits rows into work items of about equal length (split.split_rows); a program takes one item for
one key/value head and all query heads that share it. The program that finishes a split row last adds up
the row's chunks in index order, so the result does not depend on timing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashinfer_backend.attention.split import Lengths, choose_config
from flashinfer_backend.ops.fp8 import E4M3

_SMALLER = 256
_QUERIES = 16  # query rows of a program with several tokens, at most: with 32, registers run out
FEW_ROWS = 4  # up to which SMs are idle: a program has the heads of one token
_TUNED = 16 * 128  # numbers of the results for which forms are tuned: more have more warps
_MERGED = 32768  # numbers of parts that are added up at a time, at most: they can take shared memory


@triton.jit
def _merge(
    out, part_out, part_max, part_sum, sinks, first, count, head, before, fed,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    v_scale,
    FEEDS: tl.constexpr, EACH: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, MERGE: tl.constexpr,
    shared_first, shared, SHARED: tl.constexpr,
):  # fmt: skip
    """Add up `count` parts from `first` on and write the heads that share `head`, of `fed` tokens from `out`
    on, which are behind the first `before` of a row. With SHARED, before them `shared` parts from
    shared_first on."""
    GROUP_SIZE: tl.constexpr = HEADS // KV_HEADS
    query = tl.arange(0, QUERIES)
    dims = tl.arange(0, DIM)
    inside = ((query < EACH * GROUP_SIZE) & (before * GROUP_SIZE + query < FEEDS * GROUP_SIZE))[None, :]
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, DIM], tl.float32)
    parts = count
    if SHARED:
        parts = count + shared
    for base in tl.range(0, parts, MERGE):
        part = base + tl.arange(0, MERGE)
        valid = (part < parts)[:, None] & inside
        place = first + part
        if SHARED:
            place = tl.where(part < shared, shared_first + part, place - shared)
        cell = (place * KV_HEADS + head).to(tl.int64)[:, None] * (FEEDS * GROUP_SIZE)
        cell += before * GROUP_SIZE + query[None, :]
        # All loads bypass L1 (.cg): other programs wrote these cells during this kernel.
        peaks = tl.load(part_max + cell, mask=valid, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(part_sum + cell, mask=valid, other=0.0, cache_modifier=".cg")
        values = tl.load(
            part_out + cell[:, :, None] * DIM + dims[None, None, :],
            mask=valid[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        new_peak = tl.maximum(peak, tl.max(peaks, axis=0))
        decay = tl.exp2(peak - new_peak)
        weights = tl.exp2(peaks - new_peak[None, :])
        total = total * decay + tl.sum(totals * weights, axis=0)
        acc = acc * decay[:, None] + tl.sum(values * weights[:, :, None], axis=0)
        peak = new_peak
    cells = query // GROUP_SIZE * HEADS + head * GROUP_SIZE + query % GROUP_SIZE
    if sinks is not None:
        own = query < EACH * GROUP_SIZE
        total += _sink(sinks + head * GROUP_SIZE + query % GROUP_SIZE, own, peak)
    result = acc / total[:, None]
    if v_scale is not None:
        result *= v_scale
    tl.store(
        out + cells[:, None] * DIM + dims[None, :],
        result.to(out.dtype.element_ty),
        mask=(query < min(fed, EACH) * GROUP_SIZE)[:, None],
    )


@triton.jit
def _sink(place, mask, peak):
    # What the heads' sinks add to sums of 2 ** (score - peak), scores in powers of two.
    return tl.exp2(tl.load(place, mask=mask, other=0.0) * 1.4426950408889634 - peak)


@triton.jit
def _load_pairs(cache, offset, dims, valid):
    # int16 [tokens, DIM / 2] of e4m3: an even dim in the low byte, the odd one behind it in the high byte.
    place = (cache + offset).to(tl.pointer_type(tl.int16))
    return tl.load(place[:, None] + dims[None, :], mask=valid[:, None], other=0)


@triton.jit
def _halves(pairs, NATIVE: tl.constexpr):
    # int16 of two e4m3 -> that of the low byte and that of the high byte, both in float16.
    if NATIVE:
        # Two pairs are a register. With their low bytes side by side, each half is one conversion.
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 l, h; prmt.b32 t, $2, 0, 0x3120; mov.b32 {l, h}, t;"
            " cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        low = pairs.to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        high = (pairs >> 8).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return low, high


@triton.jit(do_not_specialize=["ahead"])
def _decode(
    q, k_cache, v_cache, out, items, table, part_out, part_max, part_sum, counters, sinks, table_stride,
    scale_log2, cap_log2, v_scale, lengths, ahead,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, FEEDS: tl.constexpr, EACH: tl.constexpr,
    RAGGED: tl.constexpr, BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr, PREFETCH: tl.constexpr, QUERIES: tl.constexpr, MERGE: tl.constexpr,
    SMALLER: tl.constexpr, NATIVE: tl.constexpr, WINDOW: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    # Items and table were complete before the previous kernel started (what writes them lets nothing start
    # before it has ended); q, and the newest token's key and value, are that kernel's.
    # Programs of the same keys follow each other.
    TURNS: tl.constexpr = (FEEDS + EACH - 1) // EACH
    item = tl.program_id(0) // (KV_HEADS * TURNS)
    head, turn = tl.program_id(0) // TURNS % KV_HEADS, tl.program_id(0) % TURNS
    row = tl.load(items + item * 8)
    gdc_launch_dependents()
    if row < 0:
        return
    start = tl.load(items + item * 8 + 1)
    end = tl.load(items + item * 8 + 2)
    first = tl.load(items + item * 8 + 3)
    count = tl.load(items + item * 8 + 4)
    slot = tl.load(items + item * 8 + 5)
    place, fed, before = row, 1, turn * EACH  # of the row's tokens this program has those behind `before`
    if FEEDS > 1:
        fed = tl.load(items + item * 8 + 6)
        place = before + (tl.load(items + item * 8 + 7) if RAGGED else row * FEEDS)
    if RAGGED and TURNS > 1:  # noqa: SIM102  (one condition would be computed in all variants)
        if before >= fed:
            return
    shared, shared_first = 0, 0
    if SHARED:
        shared = tl.load(items + item * 8 + 6)
        shared_first = tl.load(items + item * 8 + 7)
    if lengths is not None:
        # This too was written before the previous kernel started. The length of padding is 0.
        length = tl.maximum(tl.load(lengths + slot) + ahead, 1)
    TOKEN: tl.constexpr = KV_HEADS * DIM
    BYTES: tl.constexpr = k_cache.dtype.element_ty.primitive_bitwidth // 8
    GROUP_SIZE: tl.constexpr = HEADS // KV_HEADS
    blocks = table + slot.to(tl.int64) * table_stride
    dims = tl.arange(0, DIM)
    tokens = tl.arange(0, TILE)
    if PREFETCH > 0:
        # Older tokens' keys and values do not depend on the previous kernel: pull them into L2 meanwhile.
        early = start + tl.arange(0, PREFETCH)
        early = tl.minimum(early, end - 1)
        early_block = tl.load(blocks + early // BLOCK_SIZE).to(tl.int64)
        early_place = (early_block * BLOCK_SIZE + early % BLOCK_SIZE) * TOKEN + head * DIM
        size = tl.full([PREFETCH], DIM * BYTES, tl.int32)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; // $0", "=r,l,r",
            [(k_cache + early_place).to(tl.int64), size], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; // $0", "=r,l,r",
            [(v_cache + early_place).to(tl.int64), size], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    if lengths is not None:  # only here: what is pulled into L2 need not wait for the length
        end = tl.minimum(end, length)
        if WINDOW:  # blocks that no query sees may be those of another row by now
            start = tl.maximum(start, length - fed + 1 - WINDOW)
    # Numbers of blocks are read one step before their keys are: loads that wait for others halve the stages.
    # Steps begin with a block or a part of one, so that of a token's place its block alone changes.
    PIECE: tl.constexpr = min(TILE, BLOCK_SIZE)
    pieces, within = tl.arange(0, TILE // PIECE) * PIECE, tl.arange(0, PIECE) * TOKEN
    aligned, last_column = start // PIECE * PIECE, (end - 1) // BLOCK_SIZE
    next_block = tl.load(blocks + tl.minimum((aligned + pieces) // BLOCK_SIZE, last_column))
    own_tokens = tl.maximum(end - start, 0).to(tl.uint32)
    gdc_wait()
    group = tl.arange(0, GROUP)
    if FEEDS == 1:
        q_offset = (place.to(tl.int64) * HEADS + head * GROUP_SIZE + group)[:, None] * DIM + dims[None, :]
        inside = (group < GROUP_SIZE)[:, None]
    else:  # the heads of the first token, then those of the next one
        heads_of = group // GROUP_SIZE * HEADS + head * GROUP_SIZE + group % GROUP_SIZE
        q_offset = (place.to(tl.int64) * HEADS + heads_of)[:, None] * DIM + dims[None, :]
        here = tl.minimum((fed if RAGGED else FEEDS) - before, EACH)
        inside = (group < here * GROUP_SIZE)[:, None]
        sees = tl.minimum(tl.maximum(length - fed + 1 + before + group // GROUP_SIZE, 1), length)
    query = tl.load(q + q_offset, mask=inside, other=0.0)
    if BYTES == 1:
        query = (query.to(tl.float32) / SMALLER).to(tl.float16)
    peak = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    half_dims = tl.arange(0, DIM // 2)
    if BYTES == 1:
        even = tl.zeros([GROUP, DIM // 2], tl.float32)
        odd = tl.zeros([GROUP, DIM // 2], tl.float32)
    else:
        acc = tl.zeros([GROUP, DIM], tl.float32)
    for base in tl.range(aligned, tl.where(end > start, end, aligned), TILE, num_stages=STAGES):
        index = base + tokens
        valid = (index - start).to(tl.uint32) < own_tokens
        begin = next_block.to(tl.int64) * (BLOCK_SIZE * TOKEN) + head * DIM
        if BLOCK_SIZE > PIECE:
            begin += base % BLOCK_SIZE * TOKEN
        next_block = tl.load(blocks + tl.minimum((base + TILE + pieces) // BLOCK_SIZE, last_column))
        offset = tl.multiple_of((begin[:, None] + within[None, :]).reshape(TILE), DIM)
        # A score of what is not valid is not used; its value, times 0, is, and may be no number.
        key = tl.load(k_cache + offset[:, None] + dims[None, :])
        score = tl.dot(query, key.to(query.dtype).T) * scale_log2
        if cap_log2 is not None:  # tanh
            score = (2 * tl.sigmoid(2 * score) - 1) * cap_log2
        if FEEDS == 1:
            score = tl.where(valid[None, :], score, float("-inf"))
        else:
            score = tl.where(valid[None, :] & (index[None, :] < sees[:, None]), score, float("-inf"))
            if WINDOW:
                score = tl.where(index[None, :] >= (sees - WINDOW)[:, None], score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, axis=1))
        highest = new_peak
        if FEEDS > 1:  # no NaN of a query that has seen no key yet
            highest = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp2(score - highest[:, None])
        decay = tl.exp2(peak - highest)
        total = total * decay + tl.sum(weight, axis=1)
        if BYTES == 1:
            v_even, v_odd = _halves(_load_pairs(v_cache, offset, half_dims, valid), NATIVE)
            even = tl.dot(weight.to(query.dtype), v_even, even * decay[:, None])
            odd = tl.dot(weight.to(query.dtype), v_odd, odd * decay[:, None])
        else:
            value = tl.load(v_cache + offset[:, None] + dims[None, :], mask=valid[:, None], other=0.0)
            acc = tl.dot(weight.to(query.dtype), value, acc * decay[:, None])
        peak = new_peak
    if BYTES == 1:
        acc = tl.join(even, odd).reshape(GROUP, DIM)
    if SHARED:
        # A row's only part takes in what the row shares without a way through memory.
        for part in tl.range(0, tl.where(count == 1, shared, 0)):
            from_part = ((shared_first + part) * KV_HEADS + head).to(tl.int64) * GROUP_SIZE + group
            own = group < GROUP_SIZE
            part_peak = tl.load(part_max + from_part, mask=own, other=float("-inf"), cache_modifier=".cg")
            part_total = tl.load(part_sum + from_part, mask=own, other=0.0, cache_modifier=".cg")
            sums = part_out + from_part[:, None] * DIM + dims[None, :]
            part_acc = tl.load(sums, mask=own[:, None], other=0.0, cache_modifier=".cg")
            new_peak = tl.maximum(peak, part_peak)
            decay, weight = tl.exp2(peak - new_peak), tl.exp2(part_peak - new_peak)
            total = total * decay + part_total * weight
            acc = acc * decay[:, None] + part_acc * weight[:, None]
            peak = new_peak
    if count == 1:
        if sinks is not None:
            own_sinks = sinks + head * GROUP_SIZE + group % GROUP_SIZE
            total += _sink(own_sinks, group < EACH * GROUP_SIZE, peak)
        result = acc / total[:, None]
        if v_scale is not None:
            result *= v_scale
        tl.store(out + q_offset, result.to(out.dtype.element_ty), mask=inside)
    else:
        mine = (item * KV_HEADS + head).to(tl.int64)
        ALL: tl.constexpr = FEEDS * GROUP_SIZE
        query_cell = before * GROUP_SIZE + group
        real = (group < EACH * GROUP_SIZE) & (query_cell < ALL)
        cell = query_cell[:, None] * DIM + dims[None, :]
        tl.store(part_out + mine * (ALL * DIM) + cell, acc, mask=real[:, None])
        tl.store(part_max + mine * ALL + query_cell, peak, mask=real)
        tl.store(part_sum + mine * ALL + query_cell, total, mask=real)
        tl.debug_barrier()
        counter = counters + (row * KV_HEADS + head) * TURNS + turn
        seen = tl.atomic_add(counter, 1, sem="acq_rel")
        if seen == count - 1:
            tl.store(counter, 0)
            _merge(
                out + place.to(tl.int64) * (HEADS * DIM), part_out, part_max, part_sum, sinks, first, count,
                head, before, (fed if RAGGED else FEEDS) - before, HEADS, KV_HEADS, v_scale, FEEDS, EACH,
                QUERIES, DIM, MERGE, shared_first, shared, SHARED,
            )  # fmt: skip


class DecodeWorkspace:
    """Partial results of split rows: at most `parts` work items, times the most query tokens that a row of
    them has, of `rows` rows."""

    def __init__(
        self, rows: int, parts: int, num_heads: int, num_kv_heads: int, dim: int, device: torch.device
    ):
        cells = parts * num_heads
        self.out = torch.empty(cells * dim, dtype=torch.float32, device=device)
        self.peak = torch.empty(cells, dtype=torch.float32, device=device)
        self.total = torch.empty(cells, dtype=torch.float32, device=device)
        # The kernel leaves the counters at zero. Each of a row's tokens may have its own: parts count tokens.
        self.counters = torch.zeros(max(rows, parts) * num_kv_heads, dtype=torch.int32, device=device)


def tokens_together(feeds: int, group_size: int, rows: int) -> int:
    """Of `feeds` query tokens of a row, how many one program has. Each further program reads the same keys
    and values again, mostly from L2."""
    most = 1 if rows <= FEW_ROWS else max(1, _QUERIES // triton.next_power_of_2(group_size))
    return min(feeds, most)


def decode(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    out: Tensor,
    items: Tensor,
    table: Tensor,
    workspace: DecodeWorkspace,
    sm_scale: float,
    kv_scales: tuple[float, float] = (1.0, 1.0),
    native: bool = True,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    rows: int | None = None,
    lengths: Lengths | None = None,
    window: int | None = None,
    shared: bool = False,
) -> None:
    """q, out [tokens, Hq, D]; cache (K, V) each [blocks, P, Hkv, D], in q's type or in e4m3, whose elements
    times kv_scales are keys and values; items int32 [n, ITEM_WORDS] on the device; table int32 [slots,
    columns], the blocks of each slot that the items name. native: with what a GPU alone has, and Triton's
    interpreter does not know. soft_cap, sinks float32 [Hq]: as in contract.Scores. rows: as many as the items
    are of; by default one a token. lengths: where rows end, if they end before the items say so, or have
    several query tokens. window: the latest tokens that a query sees, its own included, where the items do
    not begin with them because of `lengths`; None: all. shared: items begin behind what rows share with
    others, and say which cells of the workspace have its sums; not with `lengths`.
    """
    k_cache, v_cache = cache
    in_e4m3 = k_cache.dtype == E4M3
    k_scale, v_scale = (kv_scales[0] * _SMALLER, kv_scales[1]) if in_e4m3 else (1.0, None)
    log2_e = 1.4426950408889634
    scale = sm_scale * k_scale
    tokens, heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    rows = tokens if rows is None else rows
    config = choose_config(rows, in_e4m3)
    feeds = 1 if lengths is None else lengths.queries
    group_size = heads // kv_heads
    each = tokens_together(feeds, group_size, rows)
    queries = triton.next_power_of_2(each * group_size)
    group = max(16, queries)
    warps = min(8, config.warps * max(1, group * dim // _TUNED))
    # Parts are added up in turns: of several tokens a program as many as make 128 numbers a thread, for which
    # there are registers.
    wider = queries // triton.next_power_of_2(group_size)
    merge = max(config.merge // wider, min(config.merge, 4096 * warps // (queries * dim)))
    _decode[(items.shape[0] * kv_heads * triton.cdiv(feeds, each),)](
        q,
        k_cache,
        v_cache,
        out,
        items,
        table,
        workspace.out,
        workspace.peak,
        workspace.total,
        workspace.counters,
        sinks,
        table.stride(0),
        scale * log2_e if soft_cap is None else scale / soft_cap,
        None if soft_cap is None else soft_cap * log2_e,
        v_scale,
        None if lengths is None else lengths.lengths,
        0 if lengths is None else lengths.ahead,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        FEEDS=feeds,
        EACH=each,
        RAGGED=lengths is not None and lengths.ragged,
        BLOCK_SIZE=k_cache.shape[1],
        GROUP=group,
        TILE=config.block,
        STAGES=config.stages,
        PREFETCH=config.prefetch,
        QUERIES=queries,
        MERGE=max(1, min(merge, _MERGED // (queries * dim))),
        SMALLER=_SMALLER if in_e4m3 else 1,
        NATIVE=native,
        WINDOW=0 if lengths is None or window is None else window,
        SHARED=shared,
        num_warps=warps,
        # What was measured is for 16 query rows a product.
        maxnreg=config.registers if group == 16 else None,
        launch_pdl=True,
    )
