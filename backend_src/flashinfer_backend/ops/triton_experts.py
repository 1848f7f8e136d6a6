# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of a mixture of experts: which experts a token has, their products, and the weighted sum.

A pair is a token and one of its k experts; pair p is of token p // k. Pairs of the same expert are brought
together in tiles, so that a program multiplies several tokens by the weights that it reads. How many tiles
there are depends on the tokens, which the host does not know: programs are launched for the most that there
can be, and those without a tile end at once. So all of it can be captured.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashinfer_backend.core.tuned import ExpertTile
from flashinfer_backend.ops.fp8 import BLOCK
from flashinfer_backend.ops.weight import Weight

PLACED = 64  # pairs that a program places
SUMMED = 1024  # columns that a program sums
NEIGHBOURS = 8  # tiles whose programs are launched together for each block of weight rows
Scales = Literal["none", "rows", "blocks"]  # of the weights


@triton.jit
def _route(
    logits,
    chosen,
    weights,
    places,
    counts,
    E: tl.constexpr,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    RENORMALISE: tl.constexpr,
):
    row = tl.program_id(0)
    e, slot = tl.arange(0, WIDTH), tl.arange(0, SLOTS)
    left = tl.load(logits + row * E + e, mask=e < E, other=float("-inf"))
    left = tl.exp(left - tl.max(left, axis=0))
    left /= tl.sum(left, axis=0)
    best, value = tl.zeros([SLOTS], tl.int32), tl.zeros([SLOTS], tl.float32)
    for i in tl.static_range(CHOSEN):
        index = tl.argmax(tl.where(e < E, left, -1.0), axis=0)  # ties: the lowest
        best = tl.where(slot == i, index, best)
        value = tl.where(slot == i, tl.max(left, axis=0), value)
        left = tl.where(e == index, -1.0, left)
    if RENORMALISE:
        value /= tl.sum(value, axis=0)
    inside, pair = slot < CHOSEN, row * CHOSEN + slot
    tl.store(chosen + pair, best, mask=inside)
    tl.store(weights + pair, value, mask=inside)
    tl.store(places + pair, tl.atomic_add(counts + best, 1, mask=inside), mask=inside)


class Routes(NamedTuple):
    """Of each of T tokens and its k experts: the expert and its weight [T, k], and the place among the pairs
    of that expert [T, k], in any order; counts [E]: pairs of each expert."""

    chosen: Tensor
    weights: Tensor
    places: Tensor
    counts: Tensor


def route(logits: Tensor, experts_per_token: int, renormalise: bool) -> Routes:
    """ops.torch_ops.route of logits[T, E] float32."""
    tokens, count = logits.shape
    counts = torch.zeros(count, dtype=torch.int32, device=logits.device)
    chosen = torch.empty(tokens, experts_per_token, dtype=torch.int32, device=logits.device)
    places, weights = torch.empty_like(chosen), torch.empty_like(chosen, dtype=torch.float32)
    _route[(tokens,)](
        logits,
        chosen,
        weights,
        places,
        counts,
        E=count,
        CHOSEN=experts_per_token,
        WIDTH=triton.next_power_of_2(count),
        SLOTS=triton.next_power_of_2(experts_per_token),
        RENORMALISE=renormalise,
        num_warps=1,
    )
    return Routes(chosen, weights, places, counts)


@triton.jit(do_not_specialize=["pairs", "tiles"])
def _place(
    chosen,
    places,
    counts,
    order,
    experts,
    filled,
    pairs,
    tiles,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    e = tl.arange(0, WIDTH)
    count = tl.load(counts + e, mask=e < E, other=0)
    own = (count + TOKENS - 1) // TOKENS  # tiles of each expert
    end = tl.cumsum(own, axis=0)
    begin = end - own
    p = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    inside = p < pairs
    expert = tl.load(chosen + p, mask=inside, other=0)
    place = tl.load(places + p, mask=inside, other=0)
    first = tl.sum(tl.where(e[None, :] == expert[:, None], begin[None, :], 0), axis=1)
    tl.store(order + first * TOKENS + place, p, mask=inside)
    # The tile of the same number: the experts before its own are those whose tiles end at or before it.
    owner = tl.sum((end[None, :] <= p[:, None]).to(tl.int32), axis=1)
    of_owner = e[None, :] == owner[:, None]
    rest = tl.sum(tl.where(of_owner, count[None, :] + begin[None, :] * TOKENS, 0), axis=1) - p * TOKENS
    tl.store(experts + p, owner, mask=p < tiles)
    tl.store(filled + p, tl.minimum(tl.maximum(rest, 0), TOKENS), mask=p < tiles)


class Tiles(NamedTuple):
    """experts [tiles] and filled [tiles]: the expert of each tile and how many pairs it has, 0 where there is
    no tile; order [tiles, tokens]: its pairs."""

    experts: Tensor
    filled: Tensor
    order: Tensor


def most_tiles(pairs: int, experts: int, tokens: int) -> int:
    """Tiles of so many tokens that so many pairs can fill or begin."""
    return min(pairs, pairs // tokens + experts)


def place(routes: Routes, tokens: int) -> Tiles:
    """The pairs of each expert in tiles of up to `tokens` pairs."""
    pairs, count = routes.chosen.numel(), len(routes.counts)
    tiles = most_tiles(pairs, count, tokens)
    experts, filled = (torch.empty(tiles, dtype=torch.int32, device=routes.chosen.device) for _ in range(2))
    order = torch.empty(tiles, tokens, dtype=torch.int32, device=routes.chosen.device)
    _place[(triton.cdiv(max(pairs, tiles), PLACED),)](
        routes.chosen,
        routes.places,
        routes.counts,
        order,
        experts,
        filled,
        pairs,
        tiles,
        E=count,
        WIDTH=triton.next_power_of_2(count),
        TOKENS=tokens,
        PAIRS=PLACED,
        num_warps=4,
    )
    return Tiles(experts, filled, order)


@triton.jit(do_not_specialize=["tiles", "x_rows"])
def _product(
    x,
    x_scales,
    weight,
    scales,
    factors,
    experts,
    filled,
    order,
    out,
    tiles,
    x_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    PAIRS_A_ROW: tl.constexpr,
    GATED: tl.constexpr,
    SCALES: tl.constexpr,
    APART: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Neighbouring programs have the same weight rows of tiles that follow each other, often of one expert:
    # the weights come from L2 then, and so does x when the next weight rows want it again.
    BLOCKS: tl.constexpr = (N + ROWS - 1) // ROWS
    group = tl.program_id(0) // (NEIGHBOURS * BLOCKS)
    size = tl.minimum(tiles - group * NEIGHBOURS, NEIGHBOURS)
    within = tl.program_id(0) % (NEIGHBOURS * BLOCKS)
    tile, row = group * NEIGHBOURS + within % size, within // size * ROWS
    present = tl.load(filled + tile)
    if present == 0:
        return
    expert = tl.load(experts + tile).to(tl.int64)
    t, n, k = tl.arange(0, TOKENS), row + tl.arange(0, ROWS), tl.arange(0, INNER)
    there, inside = t < present, n < N
    pair = tl.load(order + tile * TOKENS + t, mask=there, other=0).to(tl.int64)
    x_row = pair // PAIRS_A_ROW
    HEIGHT: tl.constexpr = 2 * N if GATED else N  # weight rows of an expert
    own = weight + expert * HEIGHT * K + n[:, None] * K + k[None, :]
    source = x + x_row[:, None] * K + k[None, :]
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    up = tl.zeros([ROWS, TOKENS], tl.float32)
    for i in tl.range(0, K // INNER, num_stages=STAGES):
        # The weights are the left operand: few tokens then do not waste the tensor cores' 64 rows.
        x_block = tl.load(source + i * INNER, mask=there[:, None], other=0.0).T
        block = tl.load(own + i * INNER, mask=inside[:, None], other=0.0)
        if SCALES == "blocks":
            # A sum of its own for each group, as in triton_fp8. ROWS divides a block's rows, INNER is one.
            x_scale = tl.load(x_scales + i * x_rows.to(tl.int64) + x_row, mask=there, other=0.0)
            scale = scales + (expert * HEIGHT + row) // GROUP * APART + i
            acc += tl.dot(block, x_block) * (x_scale * tl.load(scale))[None, :]
        else:
            acc = tl.dot(block, x_block, acc)
        if GATED:
            second = tl.load(own + N * K + i * INNER, mask=inside[:, None], other=0.0)
            if SCALES == "blocks":
                up += tl.dot(second, x_block) * (x_scale * tl.load(scale + N // GROUP * APART))[None, :]
            else:
                up = tl.dot(second, x_block, up)
    if SCALES == "rows":
        x_scale = tl.load(x_scales + x_row, mask=there, other=0.0)[None, :]
        row_scales = scales + expert * HEIGHT + n
        acc *= tl.load(row_scales, mask=inside, other=0.0)[:, None] * x_scale
        if GATED:
            up *= tl.load(row_scales + N, mask=inside, other=0.0)[:, None] * x_scale
    if GATED:
        acc = acc * tl.sigmoid(acc) * up
    if factors is not None:
        acc *= tl.load(factors + pair, mask=there, other=0.0)[None, :]
    cells = out + pair[:, None] * N + n[None, :]
    tl.store(cells, acc.T.to(out.dtype.element_ty), mask=there[:, None] & inside[None, :])


def product(
    x: Tensor,
    x_scales: Tensor | None,
    weight: Weight,
    routes: Routes,
    tiles: Tiles,
    tile: ExpertTile,
    gated: bool,
) -> Tensor:
    """Each pair's row of x times the weight of its expert, transposed -> [T k, N].

    gated: x[T, K] has a row for each token, the weight is [E 2N, K], and the result is silu of its first N
    rows' product times that of the others. Else x[T k, K] has a row for each pair, the weight is [E N, K],
    and the result is multiplied by the pair's weight. With a weight in e4m3 x is, too, with scales [rows, 1]
    or of groups as triton_fp8.quantise_groups makes them; the result is in bfloat16 then.
    """
    data, scales = weight.data, getattr(weight, "scale", None)
    (tokens, chosen), experts = routes.chosen.shape, len(routes.counts)
    inner, rows = data.shape[1], len(data) // experts // (2 if gated else 1)
    kind: Scales = "none" if scales is None else "rows" if scales.dim() == 1 else "blocks"
    width, block = inner_block(tile, inner, kind), tile.gate_rows if gated else tile.down_rows
    dtype = x.dtype if scales is None else torch.bfloat16
    out = torch.empty(tokens * chosen, rows, dtype=dtype, device=x.device)
    most = len(tiles.experts)
    _product[(most * triton.cdiv(rows, block),)](
        x,
        x_scales,
        data,
        scales,
        None if gated else routes.weights,
        tiles.experts,
        tiles.filled,
        tiles.order,
        out,
        most,
        len(x),
        N=rows,
        K=inner,
        PAIRS_A_ROW=chosen if gated else 1,
        GATED=gated,
        SCALES=kind,
        APART=scales.stride(0) if scales is not None else 0,
        GROUP=BLOCK,
        TOKENS=tile.tokens,
        ROWS=block,
        INNER=width,
        NEIGHBOURS=NEIGHBOURS,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    return out


def inner_block(tile: ExpertTile, inner: int, scales: Scales) -> int:
    """Columns that a program multiplies at a time: the tile's, or fewer where they do not divide `inner`;
    with scales of blocks, one block's."""
    return BLOCK if scales == "blocks" else math.gcd(tile.inner, inner)


@triton.jit
def _sum(products, residual, out, columns, CHOSEN: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = n < columns
    total = tl.zeros([WIDTH], tl.float32)
    for i in tl.static_range(CHOSEN):
        total += tl.load(products + (row * CHOSEN + i) * columns + n, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        total += tl.load(residual + row * columns + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + n, total.to(out.dtype.element_ty), mask=inside)


def add_up(products: Tensor, residual: Tensor | None, tokens: int) -> Tensor:
    """The sum of each token's rows of products[T k, H], and residual[T, H] -> [T, H]."""
    columns = products.shape[1]
    out = torch.empty(tokens, columns, dtype=products.dtype, device=products.device)
    _sum[(tokens, triton.cdiv(columns, SUMMED))](
        products, residual, out, columns, CHOSEN=len(products) // tokens, WIDTH=SUMMED, num_warps=4
    )
    return out
