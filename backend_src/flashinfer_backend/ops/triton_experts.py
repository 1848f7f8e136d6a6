# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of a mixture of experts: the router, which experts a token has, their products, and the
weighted sum.

A pair is a token and one of its k experts; pair p is of token p // k. The last of them can be folded ones,
which all tokens have. Pairs of the same expert are brought together in tiles, so that a program multiplies
several tokens by the weights that it reads. How many tiles there are depends on the tokens, which the host
does not know: programs are launched for the most that there can be, and those without a tile end at once. So
all of it can be captured.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashinfer_backend.core.tuned import ExpertBlock, ExpertTile, Scales
from flashinfer_backend.ops import int4, mxfp4
from flashinfer_backend.ops.fp8 import BLOCK
from flashinfer_backend.ops.triton_prefetch import wait_and_launch
from flashinfer_backend.ops.weight import Int4, Mxfp4, Weight

NATIVE = True  # with what a GPU alone has, and Triton's interpreter does not know
FEW_TOKENS = 16  # up to which one program may choose and place; no tile has fewer
FEW_CELLS = 512  # logits up to which it does: with 16 tokens of 256 experts it took 30 us, the others take 6
PLACED = 16  # pairs that a program places
_ROUTER_ROWS, _ROUTER_ROWS_OF_FEW = 16, 2  # of a program
# With no more tokens than this, and no more elements in all of them, a program has few rows of the router and
# takes the tokens one after the other.
_ROUTED_APART, _ROUTED_ELEMENTS = 8, 16384
SUMMED = 1024  # columns that a program sums
_MIDDLE = tl.constexpr(int4.MIDDLE)
NEIGHBOURS = 8  # tiles whose programs are launched together for each block of weight rows


@triton.jit(do_not_specialize=["tokens"])
def _router(
    x, weight, bias, logits, tokens, N: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, INNER: tl.constexpr, STAGES: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    wait_and_launch(NATIVE)
    t, n = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, INNER)
    there, inside = (t < tokens)[:, None], n < N
    acc = tl.zeros([TOKENS, ROWS], tl.float32)
    for i in tl.range(0, tl.cdiv(K, INNER), num_stages=STAGES):
        column = (i * INNER + k)[None, :]
        x_block = tl.load(x + t[:, None].to(tl.int64) * K + column, mask=there & (column < K), other=0.0)
        block = tl.load(weight + n[:, None] * K + column, mask=inside[:, None] & (column < K), other=0.0)
        acc = tl.dot(x_block, block.T, acc)
    if bias is not None:
        acc += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(logits + t[:, None] * N + n[None, :], acc, mask=there & inside[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _router_of_few(
    x, weight, bias, logits, tokens, N: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    # Of up to TOKENS tokens: a program has its weights before the tokens' rows are there.
    n, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside, real = n < N, (k < K)[None, :]
    block = tl.load(weight + n[:, None] * K + k[None, :], mask=inside[:, None] & real, other=0.0)
    block = block.to(tl.float32)
    more = 0.0
    if bias is not None:
        more = tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    wait_and_launch(NATIVE)
    for t in tl.static_range(TOKENS):
        row = tl.load(x + t * K + k[None, :], mask=real & (t < tokens), other=0.0)
        total = tl.sum(block * row.to(tl.float32), axis=1) + more
        tl.store(logits + t * N + n, total, mask=inside & (t < tokens))


def router_logits(x: Tensor, router: Weight) -> Tensor:
    """x[T, H], contiguous, @ router[N, H].T, and its bias -> float32 [T, N]."""
    (tokens, inner), rows = x.shape, len(router.data)
    logits = torch.empty(tokens, rows, dtype=torch.float32, device=x.device)
    width = triton.next_power_of_2(inner)
    if tokens <= min(_ROUTED_APART, max(1, _ROUTED_ELEMENTS // width)):
        _router_of_few[(triton.cdiv(rows, _ROUTER_ROWS_OF_FEW),)](
            x, router.data, router.bias, logits, tokens, N=rows, K=inner,
            TOKENS=triton.next_power_of_2(tokens), ROWS=_ROUTER_ROWS_OF_FEW, WIDTH=width, NATIVE=NATIVE,
            num_warps=4, launch_pdl=NATIVE,
        )  # fmt: skip
        return logits
    _router[(triton.cdiv(tokens, FEW_TOKENS), triton.cdiv(rows, _ROUTER_ROWS))](
        x, router.data, router.bias, logits, tokens,
        N=rows, K=inner, TOKENS=FEW_TOKENS, ROWS=_ROUTER_ROWS, INNER=256, STAGES=6, NATIVE=NATIVE,
        num_warps=4, launch_pdl=NATIVE,
    )  # fmt: skip
    return logits


@triton.jit
def _choose(
    logits, row, tokens, E: tl.constexpr, CHOSEN: tl.constexpr, FOLDED: tl.constexpr, WIDTH: tl.constexpr,
    SLOTS: tl.constexpr, APART: tl.constexpr, GATE: tl.constexpr, RENORMALISE: tl.constexpr,
    FIRST: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    # Of each of these rows [R]: its experts and the weights of all that it has [R, SLOTS], and which of its
    # experts each of all is [R, WIDTH], or -1. NaN is chosen last: there are always as many, each once.
    e, slot = tl.arange(0, WIDTH)[None, :], tl.arange(0, SLOTS)[None, :]
    real = (row < tokens)[:, None] & (e < E)
    left = tl.load(logits + row[:, None] * APART + e, mask=real, other=float("-inf"))
    left = tl.exp(left - tl.max(left, axis=1)[:, None])
    total = tl.sum(left, axis=1)[:, None]
    share = left / total
    left = tl.where(e < E, tl.where(share == share, share, 0.0), -2.0)
    best = tl.zeros([row.shape[0], SLOTS], tl.int32)
    value = tl.zeros([row.shape[0], SLOTS], tl.float32)
    which = tl.full([row.shape[0], WIDTH], -1, tl.int32)
    for i in tl.static_range(CHOSEN):
        largest, index = tl.max(left, axis=1, return_indices=True)  # ties: the lowest
        best = tl.where(slot == i, index[:, None], best)
        value = tl.where(slot == i, largest[:, None], value)
        taken = e == index[:, None]
        which = tl.where(taken, i, which)
        left = tl.where(taken, -1.0, left)
    value = tl.where(total == total, value, total)
    if RENORMALISE:
        value /= tl.sum(tl.where(slot < CHOSEN, value, 0.0), axis=1)[:, None]
    value = tl.where((best >= FIRST) & (best < FIRST + OWN), value, 0.0)
    if FOLDED:
        gate = tl.full([row.shape[0]], 1.0, tl.float32)
        if GATE:
            gate = tl.sigmoid(tl.load(logits + row * APART + E, mask=row < tokens, other=0.0))
        value = tl.where(slot < CHOSEN, value, gate[:, None])
    return best, value, which


@triton.jit
def _tiles_of(count, p, TOKENS: tl.constexpr, WIDTH: tl.constexpr):
    # By each expert's pairs [WIDTH]: its first tile [WIDTH]; of the tiles p [P] the expert and what it has.
    own = (count + TOKENS - 1) // TOKENS
    end = tl.cumsum(own, axis=0)
    begin = end - own
    owner = tl.sum((end[None, :] <= p[:, None]).to(tl.int32), axis=1)  # whose tiles end at or before it
    of_owner = tl.arange(0, WIDTH)[None, :] == owner[:, None]
    rest = tl.sum(tl.where(of_owner, (count + begin * TOKENS)[None, :], 0), axis=1) - p * TOKENS
    return begin, owner, tl.minimum(tl.maximum(rest, 0), TOKENS)


@triton.jit(do_not_specialize=["tokens"])
def _route(
    logits, chosen, weights, places, counts, tokens,
    E: tl.constexpr, CHOSEN: tl.constexpr, FOLDED: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr,
    APART: tl.constexpr, GATE: tl.constexpr, RENORMALISE: tl.constexpr, FIRST: tl.constexpr,
    OWN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    wait_and_launch(NATIVE)
    row, slot = tl.program_id(0) + tl.arange(0, 1), tl.arange(0, SLOTS)[None, :]
    best, value, _ = _choose(
        logits, row, tokens, E, CHOSEN, FOLDED, WIDTH, SLOTS, APART, GATE, RENORMALISE, FIRST, OWN
    )
    inside, pair = slot < CHOSEN, row[:, None] * (CHOSEN + FOLDED) + slot
    tl.store(chosen + pair, best, mask=inside)
    tl.store(weights + pair, value, mask=slot < CHOSEN + FOLDED)
    tl.store(places + pair, tl.atomic_add(counts + best, 1, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["pairs", "tiles"])
def _place(
    chosen, places, counts, order, experts, filled, pairs, tiles,
    E: tl.constexpr, CHOSEN: tl.constexpr, FOLDED: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
    PAIRS: tl.constexpr, FIRST: tl.constexpr, OWN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    # The tiles of folded experts, which have all tokens, come before the others.
    wait_and_launch(NATIVE)
    e, p = tl.arange(0, WIDTH), tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    token, slot = p // (CHOSEN + FOLDED), p % (CHOSEN + FOLDED)
    tokens = pairs // (CHOSEN + FOLDED)
    full = (tokens + TOKENS - 1) // TOKENS
    count = tl.load(counts + e, mask=(e >= FIRST) & (e < FIRST + OWN), other=0)
    begin, owner, has = _tiles_of(count, p - FOLDED * full, TOKENS, WIDTH)
    inside = (p < pairs) & (slot < CHOSEN)
    expert = tl.load(chosen + p, mask=inside, other=0)
    place = tl.load(places + p, mask=inside, other=0)
    first = FOLDED * full + tl.sum(tl.where(e[None, :] == expert[:, None], begin[None, :], 0), axis=1)
    there = inside & (expert >= FIRST) & (expert < FIRST + OWN)
    if FOLDED:
        of_all, before = slot >= CHOSEN, p < FOLDED * full
        first = tl.where(of_all, (slot - CHOSEN) * full, first)
        place = tl.where(of_all, token, place)
        there = there | (of_all & (p < pairs))
        owner = tl.where(before, FIRST + OWN + p // full, owner)
        has = tl.where(before, tl.minimum(tokens - p % full * TOKENS, TOKENS), has)
    tl.store(order + first * TOKENS + place, p, mask=there)
    tl.store(experts + p, owner - FIRST, mask=p < tiles)
    tl.store(filled + p, has, mask=p < tiles)
    tl.debug_barrier()
    # Behind the counts is the number of programs that have read them. The last one leaves zeros.
    if tl.atomic_add(counts + E, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(counts + e, 0, mask=e < E)
        tl.store(counts + E, 0)


@triton.jit(do_not_specialize=["tokens", "tiles"])
def _route_and_place(
    logits, weights, order, experts, filled, tokens, tiles,
    E: tl.constexpr, CHOSEN: tl.constexpr, FOLDED: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr,
    APART: tl.constexpr, GATE: tl.constexpr, RENORMALISE: tl.constexpr, FIRST: tl.constexpr,
    OWN: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    # All of few tokens in one program, so that an expert's pairs are counted without memory for it. A token
    # has an expert once: its pair's place is the number of tokens before it that have the expert, and as no
    # expert has more than a tile holds, tiles are the experts that are chosen, behind those of folded ones.
    wait_and_launch(NATIVE)
    row, e, slot = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, SLOTS)[None, :]
    _, value, which = _choose(
        logits, row, tokens, E, CHOSEN, FOLDED, WIDTH, SLOTS, APART, GATE, RENORMALISE, FIRST, OWN
    )
    there, pair = (row < tokens)[:, None], row[:, None] * (CHOSEN + FOLDED)
    tl.store(weights + pair + slot, value, mask=there & (slot < CHOSEN + FOLDED))
    mine = (e >= FIRST) & (e < FIRST + OWN)
    taken = tl.where(there & (which >= 0) & mine[None, :], 1, 0)
    count = tl.sum(taken, axis=0)
    own = (count > 0).to(tl.int32)
    tile = FOLDED + tl.cumsum(own, axis=0) - own
    place = tile[None, :] * TOKENS + tl.cumsum(taken, axis=0) - taken
    tl.store(order + place, pair + which, mask=taken > 0)
    tl.store(experts + tile, e - FIRST, mask=count > 0)
    tl.store(filled + tile, count, mask=count > 0)
    p = tl.arange(0, TILES)
    tl.store(filled + p, 0, mask=(p >= FOLDED + tl.sum(own, axis=0)) & (p < tiles))
    if FOLDED:
        tl.store(experts + p, E + p, mask=p < FOLDED)
        tl.store(filled + p, tokens, mask=p < FOLDED)
        of_all = (slot >= CHOSEN) & (slot < CHOSEN + FOLDED)
        tl.store(order + (slot - CHOSEN) * TOKENS + row[:, None], pair + slot, mask=there & of_all)


class Tiles(NamedTuple):
    """Each token's k experts, folded ones last, brought together: weights [T, k], 0 of those that are
    elsewhere; experts [tiles] and filled [tiles], the expert of each tile and how many pairs it has, 0 where
    there is no tile; order [tiles, tokens]: its pairs. of_experts: how many experts are here."""

    weights: Tensor
    experts: Tensor
    filled: Tensor
    order: Tensor
    of_experts: int


def most_tiles(pairs: int, experts: int, tokens: int) -> int:
    """The most tiles of `tokens` tokens that `pairs` pairs can fill or begin."""
    return min(pairs, pairs // tokens + experts)


@functools.cache
def _counts(where: torch.device, experts: int) -> Tensor:
    """Pairs of each expert, and how many programs of _place have read these: zeros between _place and the
    next _route. Kernels of one stream take turns with it. Engines route tokens before they capture graphs."""
    return torch.zeros(experts + 1, dtype=torch.int32, device=where)


def _rows_of_one_program(tokens: int, width: int) -> int:
    """Rows of the one program that routes `tokens` tokens among `width` experts; 0: they are too many."""
    most = max(1, min(FEW_TOKENS, FEW_CELLS // width))
    return 0 if tokens > most else 1 if tokens == 1 else most


def route(
    logits: Tensor,
    experts_per_token: int,
    renormalise: bool,
    tile_tokens: int,
    own: tuple[int, int] | None = None,
    folded: tuple[int, int] | None = None,
) -> Tiles:
    """ops.torch_ops.route of logits[T, E] float32, and the pairs of each expert in tiles of up to tile_tokens
    pairs, in any order. own: the first of the experts that are here, and how many; None: all."""
    (tokens, columns), where = logits.shape, logits.device
    of_all, further = folded or (columns, 0)
    first, count = own or (0, of_all)
    each = experts_per_token + further
    tiles = most_tiles(tokens * experts_per_token, count, tile_tokens)
    tiles += further * triton.cdiv(tokens, tile_tokens)

    def words(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=where)

    weights = torch.empty(tokens, each, dtype=torch.float32, device=where)
    found = Tiles(weights, words(tiles), words(tiles), words(tiles, tile_tokens), count + further)
    routing: dict[str, Any] = {
        "E": of_all,
        "CHOSEN": experts_per_token,
        "FOLDED": further,
        "WIDTH": triton.next_power_of_2(of_all),
        "SLOTS": triton.next_power_of_2(each),
        "APART": logits.stride(0),
        "GATE": columns > of_all,
        "RENORMALISE": renormalise,
        "FIRST": first,
        "OWN": count,
        "NATIVE": NATIVE,
    }
    if rows := _rows_of_one_program(tokens, routing["WIDTH"]):
        _route_and_place[(1,)](
            logits, weights, found.order, found.experts, found.filled, tokens, tiles,
            **routing, TOKENS=tile_tokens, ROWS=rows,
            TILES=triton.next_power_of_2(most_tiles(rows * experts_per_token, count, tile_tokens) + further),
            num_warps=4, launch_pdl=NATIVE,
        )  # fmt: skip
        return found
    counts = _counts(where, of_all)
    chosen, places = words(tokens, each), words(tokens, each)
    try:
        _route[(tokens,)](
            logits, chosen, weights, places, counts, tokens, **routing, num_warps=1, launch_pdl=NATIVE
        )
        _place[(triton.cdiv(max(chosen.numel(), tiles), PLACED),)](
            chosen, places, counts, found.order, found.experts, found.filled, chosen.numel(), tiles,
            E=of_all, CHOSEN=experts_per_token, FOLDED=further, WIDTH=routing["WIDTH"], TOKENS=tile_tokens,
            PAIRS=PLACED, FIRST=first, OWN=count, NATIVE=NATIVE, num_warps=4, launch_pdl=NATIVE,
        )  # fmt: skip
    except BaseException:
        counts.zero_()  # the engine goes on with other requests
        raise
    return found


@triton.constexpr_function
def _asm(column: int) -> str:
    """Of two words at once: one column of each of $1 (packed as in ops.mxfp4) times $2, in bfloat16."""
    if column == 3:
        move = (
            "shl.b32 t, $1, 1; and.b32 t, t, 0x80008000;"
            "shr.b32 s, $1, 5; and.b32 s, s, 0x01000100; or.b32 t, t, s;"
            "shr.b32 s, $1, 4; and.b32 s, s, 0x00C000C0; or.b32 t, t, s;"
        )
    else:
        move = f"shl.b32 t, $1, {3 * column}; and.b32 t, t, 0x81C081C0;"
    return f"{{ .reg .b32 t, s, z; {move} mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, t, $2, z; }}"


@triton.jit
def _e2m1(words, scale, KIND: tl.constexpr, COLUMN: tl.constexpr, NATIVE: tl.constexpr):
    # Of words int16 [ROWS, W] one column each, times its scale. Exponent and mantissa are moved to those of a
    # wider number, which is 2 ** 126 times smaller (a subnormal stays one), so _powers has larger scales.
    if NATIVE:
        number = tl.inline_asm_elementwise(
            _asm(COLUMN), "=r,r,r", [words, scale], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        word = words.to(tl.int32)
        if COLUMN == 3:
            bits = ((word & 0x4000) << 17) | ((word & 0x2000) << 11) | ((word & 0x0C00) << 12)
        else:
            word = word << (3 * COLUMN)
            bits = ((word & 0x8000) << 16) | ((word & 0x01C0) << 16)
        number = (bits.to(tl.float32, bitcast=True) * scale).to(KIND)
    return number


@triton.jit
def _powers(scales, offsets, mask, GROUPS: tl.constexpr, ROWS: tl.constexpr, NATIVE: tl.constexpr):
    # Powers of two by their exponents in e8m0, times 2 ** 126, of words' first two columns and of their
    # last two: [ROWS, 8 GROUPS] each; 16 neighbours have one.
    # Behind a row's scales lie zeros (ops.weight.Mxfp4, block_shape), so only rows are masked: with a mask
    # by columns, Triton would load single bytes, and none ahead.
    exponent = tl.load(scales + offsets, mask=mask[:, None], other=0).to(tl.int32) + 126
    if NATIVE:
        power = (exponent << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        power = (exponent << 23).to(tl.float32, bitcast=True)
    first, last = tl.split(tl.reshape(power, [ROWS, GROUPS // 2, 2]))
    return _wider(first, GROUPS // 2, ROWS), _wider(last, GROUPS // 2, ROWS)


@triton.jit
def _wider(powers, BLOCKS: tl.constexpr, ROWS: tl.constexpr):
    # Each of powers [ROWS, BLOCKS] 16 times.
    return tl.reshape(tl.broadcast_to(powers[:, :, None], [ROWS, BLOCKS, 16]), [ROWS, BLOCKS * 16])


@triton.jit
def _quarter(words, scales, zeros, place, mask, NIBBLE: tl.constexpr, KIND: tl.constexpr):
    # Of int4: the elements in one nibble of words [ROWS, 32], whose rows have a scale each at `place` [ROWS].
    number = (words >> (4 * NIBBLE) & 15).to(tl.float32)
    scale = tl.load(scales + place, mask=mask, other=0.0).to(tl.float32)
    if zeros is None:
        number -= _MIDDLE
    else:
        number -= tl.load(zeros + place, mask=mask, other=0).to(tl.float32)[:, None]
    return (number * scale[:, None]).to(KIND)


@triton.jit(do_not_specialize=["tiles", "x_rows"])
def _product(
    x, x_scales, weight, scales, zeros, bias, factors, experts, filled, order, out, tiles, x_rows,
    N: tl.constexpr, K: tl.constexpr, PAIRS_A_ROW: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, SCALES: tl.constexpr, APART: tl.constexpr, GROUP: tl.constexpr, PACKED: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr, NEIGHBOURS: tl.constexpr,
    STAGES: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    wait_and_launch(NATIVE)
    KIND: tl.constexpr = x.dtype.element_ty
    # Neighbouring programs have the same weight rows of tiles that follow each other, often of one expert:
    # the weights come from L2 then, and so does x when the next weight rows want it again.
    BLOCKS: tl.constexpr = (N + ROWS - 1) // ROWS
    group = tl.program_id(0) // (NEIGHBOURS * BLOCKS)
    size = tl.minimum(tiles - group * NEIGHBOURS, NEIGHBOURS)
    within = tl.program_id(0) % (NEIGHBOURS * BLOCKS)
    tile, row = group * NEIGHBOURS + within % size, within // size * ROWS
    # All at once, before it is known whether the tile is there.
    t, n, k = tl.arange(0, TOKENS), row + tl.arange(0, ROWS), tl.arange(0, INNER)
    present, expert = tl.load(filled + tile), tl.load(experts + tile).to(tl.int64)
    pair = tl.load(order + tile * TOKENS + t).to(tl.int64)
    if present == 0:
        return
    there, inside = t < present, n < N
    pair = tl.where(there, pair, 0)
    x_row = pair // PAIRS_A_ROW
    HEIGHT: tl.constexpr = 2 * N if GATED else N  # weight rows of an expert
    own = weight + expert * HEIGHT * K + n[:, None] * K + k[None, :]
    source = x + x_row[:, None] * K + k[None, :]
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    up = tl.zeros([ROWS, TOKENS], tl.float32)
    # With blocks, INNER is one, and ROWS divides its rows: one scale for a product, which is loaded
    # a turn ahead. Each group has a sum of its own, as in triton_fp8.
    LAST: tl.constexpr = (K + INNER - 1) // INNER - 1
    if SCALES == "blocks":
        own_scales = scales + (expert * HEIGHT + row) // GROUP * APART
        x_scale = tl.load(x_scales + x_row, mask=there, other=0.0)
        scale = tl.load(own_scales)
        if GATED:
            up_scale = tl.load(own_scales + N // GROUP * APART)
    if SCALES == "mxfp4":
        # A word has four columns, QUARTER apart among PACKED: four products of a quarter of the columns.
        QUARTER: tl.constexpr = PACKED // 4
        WORDS: tl.constexpr = (K + PACKED - 1) // PACKED * QUARTER  # of a row
        GROUPS: tl.constexpr = INNER // GROUP
        h, g = tl.arange(0, INNER // 4), tl.arange(0, GROUPS)
        first_row = expert * HEIGHT + n[:, None]
        words_of = weight + first_row * WORDS + h[None, :]
        groups_of = scales + first_row * APART + g[None, :]
        column = h // QUARTER * PACKED + h % QUARTER
        quarter = x + x_row[:, None] * K + column[None, :]
        for i in tl.range(0, LAST + 1, num_stages=STAGES):
            real = (h < WORDS - i * (INNER // 4))[None, :]
            words = tl.load(words_of + i * (INNER // 4), mask=inside[:, None] & real, other=0)
            powers = _powers(groups_of, i * GROUPS, inside, GROUPS, ROWS, NATIVE)
            if GATED:
                beyond = N * WORDS + i * (INNER // 4)
                up_words = tl.load(words_of + beyond, mask=inside[:, None] & real, other=0)
                beyond = N * APART + i * GROUPS
                up_powers = _powers(groups_of, beyond, inside, GROUPS, ROWS, NATIVE)
            for q in tl.static_range(4):
                given = real
                if K % PACKED != 0:
                    given = (column < K - i * INNER - QUARTER * q)[None, :]
                x_block = tl.load(quarter + i * INNER + QUARTER * q, mask=there[:, None] & given, other=0.0).T
                acc = tl.dot(_e2m1(words, powers[q // 2], KIND, q, NATIVE), x_block, acc)
                if GATED:
                    up = tl.dot(_e2m1(up_words, up_powers[q // 2], KIND, q, NATIVE), x_block, up)
    elif SCALES == "int4":
        # Four columns in a word, 32 apart: four products of 32 columns each. Scales are [groups, rows].
        h = tl.arange(0, 32)
        first_row = expert * HEIGHT + n
        words_of = weight + first_row[:, None] * (K // 4) + h[None, :]
        quarter = x + x_row[:, None] * K + h[None, :]
        for i in tl.range(0, LAST + 1, num_stages=STAGES):
            words = tl.load(words_of + i * 32, mask=inside[:, None], other=0).to(tl.int32)
            if GATED:
                more = tl.load(words_of + N * (K // 4) + i * 32, mask=inside[:, None], other=0).to(tl.int32)
            for q in tl.static_range(4):
                x_block = tl.load(quarter + i * 128 + 32 * q, mask=there[:, None], other=0.0).T
                place = first_row + (i * 128 + 32 * q) // GROUP * APART
                acc = tl.dot(_quarter(words, scales, zeros, place, inside, q, KIND), x_block, acc)
                if GATED:
                    up = tl.dot(_quarter(more, scales, zeros, place + N, inside, q, KIND), x_block, up)
    else:
        for i in tl.range(0, LAST + 1, num_stages=STAGES):
            # The weights are the left operand: few tokens then do not waste the tensor cores' 64 rows.
            x_block = tl.load(source + i * INNER, mask=there[:, None], other=0.0).T
            block = tl.load(own + i * INNER, mask=inside[:, None], other=0.0)
            if GATED:
                up_block = tl.load(own + N * K + i * INNER, mask=inside[:, None], other=0.0)
            if SCALES == "blocks":
                ahead = tl.minimum(i + 1, LAST)
                next_x_scale = tl.load(x_scales + ahead * x_rows.to(tl.int64) + x_row, mask=there, other=0.0)
                next_scale = tl.load(own_scales + ahead)
                of_group = tl.dot(block, x_block)
                if GATED:
                    next_up_scale = tl.load(own_scales + N // GROUP * APART + ahead)
                    up_of_group = tl.dot(up_block, x_block)
                    up += up_of_group * (x_scale * up_scale)[None, :]
                    up_scale = next_up_scale
                acc += of_group * (x_scale * scale)[None, :]
                x_scale, scale = next_x_scale, next_scale
            else:
                acc = tl.dot(block, x_block, acc)
                if GATED:
                    up = tl.dot(up_block, x_block, up)
    if SCALES == "rows":
        x_scale = tl.load(x_scales + x_row, mask=there, other=0.0)[None, :]
        row_scales = scales + expert * HEIGHT + n
        acc *= tl.load(row_scales, mask=inside, other=0.0)[:, None] * x_scale
        if GATED:
            up *= tl.load(row_scales + N, mask=inside, other=0.0)[:, None] * x_scale
    if bias is not None:
        own_bias = bias + expert * HEIGHT + n
        acc += tl.load(own_bias, mask=inside, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(own_bias + N, mask=inside, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if LIMIT is None:
            acc = acc * tl.sigmoid(acc) * up
        else:
            # NaN stays: a row that went wrong must show.
            acc = tl.where(acc > LIMIT, LIMIT, acc)
            up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
            acc = acc * tl.sigmoid(ALPHA * acc) * (up + 1)
    if factors is not None:
        acc *= tl.load(factors + pair, mask=there, other=0.0)[None, :]
    cells = out + pair[:, None] * N + n[None, :]
    tl.store(cells, acc.T.to(out.dtype.element_ty), mask=there[:, None] & inside[None, :])


def product(
    x: Tensor,
    x_scales: Tensor | None,
    weight: Weight,
    tiles: Tiles,
    tile: ExpertTile,
    gated: bool,
    pairs_a_row: int,
    clip: tuple[float, float] | None = None,
) -> Tensor:
    """Each pair's row of x times the weight of its expert, transposed -> [T k, N].

    x[R, K] has a row for each token, or for each pair: for as many pairs as pairs_a_row says. gated: the
    weight is [E 2N, K], and the result is ops.torch_ops.gated of its first N rows' product and that of the
    others. Else the weight is [E N, K], and the result is multiplied by the pair's weight. The weight's bias
    is added before. With a weight in e4m3 x is also in e4m3, with scales [rows, 1] or of groups as
    triton_fp8.quantise_groups makes them; the result is in bfloat16 then. A weight of 4 bits is turned into
    x's type on the way.
    """
    data: Tensor = weight.data
    scales = getattr(weight, "scale", None)
    (tokens, chosen), experts = tiles.weights.shape, tiles.of_experts
    inner, rows = weight.shape[1], len(data) // experts // (2 if gated else 1)
    kind = scales_of(weight)
    block = tile.gate_up if gated else tile.down
    block_rows, block_inner = block_shape(block, inner, kind)
    group = inner // len(weight.scale) if kind == "int4" else mxfp4.GROUP if kind == "mxfp4" else BLOCK
    if kind == "mxfp4":
        data = data.view(torch.int16)
    dtype = torch.bfloat16 if kind in ("rows", "blocks") else x.dtype
    alpha, limit = clip or (None, None)
    out = torch.empty(tokens * chosen, rows, dtype=dtype, device=x.device)
    most = len(tiles.experts)
    _product[(most * triton.cdiv(rows, block_rows),)](
        x, x_scales, data, scales, weight.zero, weight.bias, None if gated else tiles.weights, tiles.experts,
        tiles.filled, tiles.order, out, most, len(x),
        N=rows, K=inner, PAIRS_A_ROW=pairs_a_row, GATED=gated, ALPHA=alpha, LIMIT=limit,
        SCALES=kind, APART=scales.stride(0) if scales is not None else 0, GROUP=group, PACKED=mxfp4.PACKED,
        TOKENS=tile.tokens, ROWS=block_rows, INNER=block_inner, NEIGHBOURS=NEIGHBOURS, STAGES=block.stages,
        NATIVE=NATIVE, num_warps=block.warps, launch_pdl=NATIVE,
    )  # fmt: skip
    return out


def scales_of(weight: Weight) -> Scales:
    """The kind of scales that a weight of 16 bits, in e4m3 or of 4 bits has."""
    if isinstance(weight.format, Mxfp4):
        return "mxfp4"
    if isinstance(weight.format, Int4):
        return "int4"
    scales = getattr(weight, "scale", None)
    return "none" if scales is None else "rows" if scales.dim() == 1 else "blocks"


def block_shape(block: ExpertBlock, inner: int, scales: Scales) -> tuple[int, int]:
    """Rows and columns of a weight [rows, inner] that a program multiplies at a time: the block's, but fewer
    columns where those do not divide `inner`; with scales of blocks columns of one, and rows of no more than
    one, also where the other product, by whose scales the tile was chosen, has none. Of int4 they are a block
    of ops.int4. Of MXFP4 the last ones can be fewer, and all have no more scales than a row's are padded to:
    what is read behind a row's scales is its own padding."""
    if scales == "int4":
        return block.rows, int4.BLOCK
    if scales == "mxfp4":
        return block.rows, min(max(mxfp4.PACKED, block.inner), mxfp4.ALIGNED * mxfp4.GROUP)
    if scales == "blocks":
        return min(block.rows, BLOCK), BLOCK
    return block.rows, math.gcd(block.inner, inner)


@triton.jit
def _sum(
    products, residual, weights, out, columns,
    CHOSEN: tl.constexpr, WIDTH: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    wait_and_launch(NATIVE)
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = n < columns
    total = tl.zeros([WIDTH], tl.float32)
    for i in tl.static_range(CHOSEN):
        there = inside
        if weights is not None:
            # NaN differs from zero, so its product counts.
            there = inside & (tl.load(weights + row * CHOSEN + i + 0 * n) != 0.0)
        total += tl.load(products + (row * CHOSEN + i) * columns + n, mask=there, other=0.0).to(tl.float32)
    if residual is not None:
        total += tl.load(residual + row * columns + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + n, total.to(out.dtype.element_ty), mask=inside)


def add_up(products: Tensor, residual: Tensor | None, tokens: int, weights: Tensor | None) -> Tensor:
    """The sum of each token's rows of products[T k, H], and residual[T, H] -> [T, H]. weights[T, k]: rows are
    left out where they are 0."""
    columns = products.shape[1]
    out = torch.empty(tokens, columns, dtype=products.dtype, device=products.device)
    _sum[(tokens, triton.cdiv(columns, SUMMED))](
        products, residual, weights, out, columns,
        CHOSEN=len(products) // tokens, WIDTH=SUMMED, NATIVE=NATIVE, num_warps=4, launch_pdl=NATIVE,
    )  # fmt: skip
    return out
