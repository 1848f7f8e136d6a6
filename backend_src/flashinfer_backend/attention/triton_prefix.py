# SPDX-License-Identifier: Apache-2.0
"""Attention of decode rows to what their sequences begin with in common, read once for many rows.

A program takes a tile of rows that share blocks, the query heads of one key/value head in each of them, and a
part of the shared tokens. All of these queries are the rows of one product. It leaves the sums of each row as
a part that the decode kernel adds up with the row's own (triton_decode.py, `shared`).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashinfer_backend.attention.prefixes import PREFIX_WORDS, QUERIES
from flashinfer_backend.attention.triton_decode import DecodeWorkspace

TILE, STAGES = 64, 3  # tokens of a step of the loop, and how many steps are on their way


class SharedWork(NamedTuple):
    """A step's shared prefixes on the device: items int32 [n, PREFIX_WORDS], and the order of rows that they
    name."""

    items: Tensor
    order: Tensor


@triton.jit
def _prefix(
    q, k_cache, v_cache, items, order, table, part_out, part_max, part_sum, table_stride, scale_log2,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    item = items + tl.program_id(0) // KV_HEADS * WORDS
    head = tl.program_id(0) % KV_HEADS
    first, count, start, end = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    cell, stride, slot = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
    gdc_launch_dependents()
    GROUP_SIZE: tl.constexpr = HEADS // KV_HEADS
    TOKEN: tl.constexpr = KV_HEADS * DIM
    blocks = table + slot.to(tl.int64) * table_stride
    dims, tokens, query_row = tl.arange(0, DIM), tl.arange(0, TILE), tl.arange(0, QUERIES)
    place, query_head = query_row // GROUP_SIZE, query_row % GROUP_SIZE
    inside = place < count
    # Work and table were complete before the previous kernel started, as in the decode kernel. Blocks are
    # read one step before their keys are: loads that wait for others would halve the stages.
    row = tl.load(order + first + place, mask=inside, other=0).to(tl.int64)
    early = start + tokens
    next_block = tl.load(blocks + early // BLOCK_SIZE, mask=(early < end) & (count > 0), other=0)
    # Also without rows: the decode kernel waits for this one alone, and reads what was written before it.
    gdc_wait()
    if count == 0:
        return
    q_offset = (row * HEADS + head * GROUP_SIZE + query_head)[:, None] * DIM + dims[None, :]
    query = tl.load(q + q_offset, mask=inside[:, None], other=0.0)
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, DIM], tl.float32)
    for base in tl.range(start, end, TILE, num_stages=STAGES):
        index = base + tokens
        valid, later = index < end, index + TILE
        block = next_block.to(tl.int64)
        next_block = tl.load(blocks + later // BLOCK_SIZE, mask=later < end, other=0)
        offset = (block * BLOCK_SIZE + index % BLOCK_SIZE) * TOKEN + head * DIM
        key = tl.load(k_cache + offset[:, None] + dims[None, :], mask=valid[:, None], other=0.0)
        score = tl.dot(query, key.T) * scale_log2
        score = tl.where(valid[None, :], score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, axis=1))
        weight = tl.exp2(score - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weight, axis=1)
        value = tl.load(v_cache + offset[:, None] + dims[None, :], mask=valid[:, None], other=0.0)
        acc = tl.dot(weight.to(query.dtype), value, acc * decay[:, None])
        peak = new_peak
    mine = ((cell + place * stride).to(tl.int64) * KV_HEADS + head) * GROUP_SIZE + query_head
    tl.store(part_out + mine[:, None] * DIM + dims[None, :], acc, mask=inside[:, None])
    tl.store(part_max + mine, peak, mask=inside)
    tl.store(part_sum + mine, total, mask=inside)


def prefix_parts(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    work: SharedWork,
    table: Tensor,
    workspace: DecodeWorkspace,
    sm_scale: float,
) -> None:
    """q [rows, Hq, D]; cache (K, V) each [blocks, P, Hkv, D], in q's type; table int32 [slots, columns]. The
    sums go to the cells of `workspace` that the items name (prefixes.PrefixTiles)."""
    _, heads, dim = q.shape
    kv_heads = cache[0].shape[2]
    _prefix[(work.items.shape[0] * kv_heads,)](
        q,
        *cache,
        work.items,
        work.order,
        table,
        workspace.out,
        workspace.peak,
        workspace.total,
        table.stride(0),
        sm_scale * 1.4426950408889634,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        BLOCK_SIZE=cache[0].shape[1],
        QUERIES=QUERIES,
        TILE=TILE,
        STAGES=STAGES if dim <= 128 else 2,
        WORDS=PREFIX_WORDS,
        num_warps=QUERIES // 16,
        launch_pdl=True,
    )
