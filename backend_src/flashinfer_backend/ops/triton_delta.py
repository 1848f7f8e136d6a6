# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of gated delta net layers: ops.torch_delta.delta_net.

Decode rows take one kernel, which is bound by reading the states once; on Hopper delta_rows has a faster one.
What a token writes into a head's state is the product of its key and a vector. These are kept apart, in
DeltaStates.pending, until MOST_PENDING of them are written into the state at once. Prompts are computed in
chunks of 64 tokens: one kernel computes what does not depend on the states, for all chunks at once, another
goes through a row's chunks with its state in registers. No kernel needs the lengths of rows on the host.

FlashInfer 0.6.18 has kernels of the rule alone (gdn_prefill, gdn_decode). On Hopper they read states without
slots or transposed, prompts' queries, keys and values as three tensors with normed queries and keys, and of
drafts they keep a state for each token. Each process compiles them when it first calls them.
perf_configs/kernels/bench_delta.py --flashinfer times them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashinfer_backend.ops import delta_rows, device
from flashinfer_backend.ops.torch_delta import CHUNK, L2_EPS, DeltaRows, DeltaStates, DeltaWeights
from flashinfer_backend.ops.triton_prefetch import wait_and_launch

NATIVE = True  # with what a GPU alone has, and Triton's interpreter does not know
_CHANNELS = 128  # of a convolution's program
_TOKENS = 16  # the same; no fewer than inputs of the convolution
# Values of a head, of a program that goes through a row's chunks, and how long such a one takes: more columns
# read queries and keys less often, fewer let more programs share the work.
_STATE_COLUMNS = {32: 1.0, 64: 1.8}
_THREE_STAGES = 202 << 10  # bytes that a program of 64 columns takes with its loads in three stages
# A thread's that computes what chunks write: three programs then share an SM, though it spills some values.
_WRITES_REGISTERS = 168
_NORMED = 8  # heads of a program
SEARCHED = (16, 128, 1024, 8192)  # rows, of variants of the kernels that look for their row
# Tokens, of DeltaStates.pending: reading more would cost what writing states less often saves.
MOST_PENDING = 8

_EPS = tl.constexpr(L2_EPS)
_BLOCK = tl.constexpr(16)  # rows of a chunk whose inverse is computed one row after another


@triton.jit
def _find(starts, cuts, rows, tile, SIZE: tl.constexpr, ROWS: tl.constexpr):
    """The row of the tile-th of all tiles of SIZE tokens, and which of the row's it is; behind the last tile,
    a row of `rows` or more. Tiles begin at the start of a row and at its cut."""
    index = tl.arange(0, ROWS)
    inside = index < rows
    begin = tl.load(starts + index, mask=inside, other=0)
    cut = tl.load(cuts + index, mask=inside, other=0)
    end = tl.load(starts + index + 1, mask=inside, other=0)
    tiles = tl.cdiv(cut - begin, SIZE) + tl.cdiv(end - cut, SIZE)
    row = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), axis=0)
    return row, tile - tl.sum(tl.where(index < row, tiles, 0), axis=0)


@triton.jit
def _bounds(start, cut, end, tile, SIZE: tl.constexpr):
    """The first token of a row's tile, and the cut or the row's end, which its last one is before."""
    before = tl.cdiv(cut - start, SIZE)
    early = tile < before
    begin = tl.where(early, start + tile * SIZE, cut + (tile - before) * SIZE)
    return begin, tl.where(early, cut, end)


@triton.jit
def _silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def _unit(q, k):
    # q, k[Dk] as they come -> of length 1, the query times what scales scores.
    q, k = q.to(tl.float32), k.to(tl.float32)
    q = q * (tl.rsqrt(tl.sum(q * q, axis=0) + _EPS) * q.shape[0] ** -0.5)
    return q, k * tl.rsqrt(tl.sum(k * k, axis=0) + _EPS)


@triton.jit
def _next_token(state, q, k, v, decay, beta):
    # state[Dk, Dv], q, k[Dk] of _unit, v[Dv] -> the state behind the token, what it answers.
    state = state * tl.exp(decay)
    written = beta * (v - tl.sum(k[:, None] * state, axis=0))
    state += k[:, None] * written[None, :]
    return state, tl.sum(q[:, None] * state, axis=0)


@triton.jit
def _total_decay(decays, begin, place, head, PENDING: tl.constexpr):
    # Of a head's pending tokens, in log space.
    return tl.load(decays + (place - 1 + head) % PENDING, mask=begin < place, other=0.0)


@triton.jit
def _settled(
    state, total, keys, written, decays, begin, place, head, key, value,
    DV: tl.constexpr, PENDING: tl.constexpr,
):  # fmt: skip
    """The head's state[Dk, Dv] behind its pending tokens, those from `begin` to `place`. total: the decay
    since `begin`."""
    state *= tl.exp(total)
    for p in range(begin, place):
        at = (p + head) % PENDING
        k = tl.load(keys + p % PENDING * key.shape[0] + key) * tl.exp(total - tl.load(decays + at))
        state += k[:, None] * tl.load(written + at * DV + value)[None, :]
    return state


@triton.jit
def _normed(wide, square, gate, weight, eps, DIM: tl.constexpr, dtype):
    # square: of wide, summed. Rounded where ops.torch_delta.gated_norm rounds.
    normed = (wide * tl.rsqrt(square / DIM + eps)).to(dtype) * weight
    return (normed.to(tl.float32) * _silu(gate.to(tl.float32))).to(dtype)


@triton.jit
def _decay_and_beta(a, b, a_log, dt_bias):
    step = a.to(tl.float32) + dt_bias.to(tl.float32)
    # softplus; exp of more would overflow, and log(1 + exp(x)) is x long before
    step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
    return -tl.exp(a_log.to(tl.float32)) * step, tl.sigmoid(b.to(tl.float32))


@triton.jit
def _taps(
    x, inputs, weight, c, token, position, first, x_stride,
    AXIS: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr, LENGTH: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """What the convolution of channels c for the token at `position` adds up, for _convolved: its inputs that
    are of the step, those before them, and its weights. `token`, at the position `first`, and those behind it
    are rows of x, those before are in inputs, the slot's, whose tokens have KEPT values.

    AXIS: of the taps, and of the state that the result is not broadcast along. So it reaches the state's
    threads through shared memory: from the other axis, Triton would have each thread compute all that it
    needs, or give the state the layout of this tile, which suits it less.
    """
    tap, channel = tl.expand_dims(tl.arange(0, TAPS), 1 - AXIS), tl.expand_dims(c, AXIS)
    p = position - (WIDTH - 1) + tap
    used = (tap < WIDTH) & (channel >= 0)
    own = x + (token + (p - first)).to(tl.int64) * x_stride + channel
    past = inputs + p % LENGTH * KEPT + channel
    return (
        tl.load(own, mask=used & (p >= first), other=0.0),
        tl.load(past, mask=used & (p < first) & (p >= 0), other=0.0),
        tl.load(weight + channel * WIDTH + tap, mask=used, other=0.0),
    )


@triton.jit
def _convolved(own, past, weights, AXIS: tl.constexpr):
    # Rounded as results of this step's longer rows are.
    value = own + past.to(own.dtype)
    return _silu(tl.sum(value.to(tl.float32) * weights.to(tl.float32), axis=AXIS)).to(own.dtype)


@triton.jit
def _load_token(
    qkv, z, a, b, conv, inputs, start, token, place, qc, kc, vc, head, x_stride, z_stride, a_stride, b_stride,
    WIDTH: tl.constexpr, TAPS: tl.constexpr, LENGTH: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    # All that a token of the row that begins at `start` needs, as it lies in memory; and its own q, k and v.
    p = place + (token - start).to(tl.int32)
    x, gates = qkv + token * x_stride, z + token * z_stride + head * vc.shape[0] + tl.arange(0, vc.shape[0])
    needed = (
        _taps(qkv, inputs, conv, qc, start, p, place, x_stride, 0, WIDTH, TAPS, LENGTH, KEPT),
        _taps(qkv, inputs, conv, kc, start, p, place, x_stride, 0, WIDTH, TAPS, LENGTH, KEPT),
        _taps(qkv, inputs, conv, vc, start, p, place, x_stride, 1, WIDTH, TAPS, LENGTH, KEPT),
        tl.load(a + token * a_stride + head),
        tl.load(b + token * b_stride + head),
        tl.load(gates),
    )
    return needed, (tl.load(x + qc), tl.load(x + kc), tl.load(x + vc))


@triton.jit
def _parts(needed, log, bias):
    # q, k[Dk] of length 1, v[Dv], decay and beta of a token of _load_token.
    q, k, v, own_a, own_b, _ = needed
    decay, beta = _decay_and_beta(own_a, own_b, log, bias)
    v = _convolved(v[0], v[1], v[2], 1).to(tl.float32)
    q, k = _unit(_convolved(q[0], q[1], q[2], 0), _convolved(k[0], k[1], k[2], 0))
    return q, k, v, decay, beta


@triton.jit
def _output(result, gate, weight, eps, dtype):
    # The layer's for a token whose rule gave result[Dv], normed with `weight`.
    wide = result.to(dtype).to(tl.float32)
    return _normed(wide, tl.sum(wide * wide, axis=0), gate, weight, eps, result.shape[0], dtype)


@triton.jit
def _keep_token(target, raw, qc, kc, vc, head, SHARE: tl.constexpr):
    # What a token of _load_token leaves for the convolution of the next ones.
    q, k, v = raw
    if head % SHARE == 0:
        tl.store(target + qc, q)
        tl.store(target + kc, k)
    tl.store(target + vc, v)


@triton.jit(do_not_specialize_on_alignment=["slots", "starts", "first", "held", "begun"])
def _decode_rows(
    qkv, z, a, b, conv, a_log, dt_bias, norm, recurrent, inputs, keys, written, decays, begun,
    slots, starts, first, held, out, eps, x_stride, z_stride, a_stride, b_stride,
    HEADS: tl.constexpr, SHARE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
    TAPS: tl.constexpr, LENGTH: tl.constexpr, PENDING: tl.constexpr, DRAFTS: tl.constexpr,
    PADDED: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    # All of a layer for one head of a row. What a row reads of `inputs` no program writes in this step. A row
    # without drafts has one token. A loop over it would need more registers than there are.
    wait_and_launch(NATIVE)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, end = row, row + 1
    if DRAFTS or PADDED:
        start, end = tl.load(starts + row).to(tl.int64), tl.load(starts + row + 1).to(tl.int64)
    if PADDED:  # noqa: SIM102  (one condition would be computed in all variants)
        if start == end:
            return
    KEYS: tl.constexpr = HEADS // SHARE * DK
    C: tl.constexpr = 2 * KEYS + HEADS * DV
    KEPT: tl.constexpr = C + 2 * HEADS
    key, value = tl.arange(0, DK), tl.arange(0, DV)
    qc = head // SHARE * DK + key
    kc, vc = KEYS + qc, 2 * KEYS + head * DV + value
    log, bias = tl.load(a_log + head), tl.load(dt_bias + head)
    slot, place = tl.load(slots + row).to(tl.int64), tl.load(first + row)
    inputs += slot * (LENGTH * KEPT)
    out += head * DV + value
    cells = recurrent + (slot * HEADS + head) * (DK * DV) + key[:, None] * DV + value[None, :]
    if DRAFTS:
        begin = place - tl.load(held + row)
        state = tl.load(cells, mask=(key >= 0)[:, None] & (begin > 0), other=0.0)
        for p in range(begin, place):
            k = _taps(qkv, inputs, conv, kc, start, p, place, x_stride, 0, WIDTH, TAPS, LENGTH, KEPT)
            v = _taps(qkv, inputs, conv, vc, start, p, place, x_stride, 1, WIDTH, TAPS, LENGTH, KEPT)
            gates = inputs + p % LENGTH * KEPT + C + head
            decay, beta = _decay_and_beta(tl.load(gates), tl.load(gates + HEADS), log, bias)
            k, v = _convolved(k[0], k[1], k[2], 0), _convolved(v[0], v[1], v[2], 1)
            _, k = _unit(k, k)
            state, _ = _next_token(state, k, k, v.to(tl.float32), decay, beta)
        if (begin < place) | (begin == 0):
            tl.store(cells, state)
        weight = tl.load(norm + value)
        for token in range(start, end):
            needed, raw = _load_token(
                qkv, z, a, b, conv, inputs, start, token, place, qc, kc, vc, head,
                x_stride, z_stride, a_stride, b_stride, WIDTH, TAPS, LENGTH, KEPT,
            )  # fmt: skip
            q, k, v, decay, beta = _parts(needed, log, bias)
            state, result = _next_token(state, q, k, v, decay, beta)
            _, _, _, own_a, own_b, gate = needed
            result = _output(result, gate, weight, eps, out.dtype.element_ty)
            tl.store(out + token * (HEADS * DV), result)
            target = inputs + (place + (token - start).to(tl.int32)) % LENGTH * KEPT
            _keep_token(target, raw, qc, kc, vc, head, SHARE)
            tl.store(target + C + head, own_a)
            tl.store(target + C + HEADS + head, own_b)
    else:
        # What is computed first is loaded before the state, behind which it would wait.
        needed, raw = _load_token(
            qkv, z, a, b, conv, inputs, start, start, place, qc, kc, vc, head,
            x_stride, z_stride, a_stride, b_stride, WIDTH, TAPS, LENGTH, KEPT,
        )  # fmt: skip
        begun += slot * HEADS + head
        decays += (slot * HEADS + head) * PENDING
        written += (slot * HEADS + head) * (PENDING * DV)
        keys += (slot * (HEADS // SHARE) + head // SHARE) * (PENDING * DK)
        now, at = (place + head) % PENDING, tl.arange(0, PENDING)
        begin = tl.maximum(tl.load(begun, mask=place > 0, other=0), place - now)
        state = tl.load(cells, mask=(key >= 0)[:, None] & (begin > 0), other=0.0)
        pending = (at < now) & (place - now + at >= begin)
        decays_then = tl.load(decays + at, mask=pending, other=0.0)
        key_cells = (place - now + at) % PENDING * DK
        keys_then = tl.load(keys + key_cells[:, None] + key[None, :], mask=pending[:, None], other=0.0)
        written_then = tl.load(written + at[:, None] * DV + value[None, :], mask=pending[:, None], other=0.0)
        total = _total_decay(decays, begin, place, head, PENDING)
        weight = tl.load(norm + value)
        q, k, v, decay, beta = _parts(needed, log, bias)
        total += decay
        # What the state and the pending tokens answer, their decays up to this token applied.
        kept, left = tl.exp(total), tl.exp(tl.where(pending, total - decays_then, 0.0))
        found = tl.sum(k[:, None] * state, axis=0) * kept
        found += tl.sum((tl.sum(keys_then * k[None, :], axis=1) * left)[:, None] * written_then, axis=0)
        result = tl.sum(q[:, None] * state, axis=0) * kept
        result += tl.sum((tl.sum(keys_then * q[None, :], axis=1) * left)[:, None] * written_then, axis=0)
        own = beta * (v - found)
        result = _output(result + own * tl.sum(q * k, axis=0), needed[5], weight, eps, out.dtype.element_ty)
        if now == PENDING - 1:
            state = _settled(state, total, keys, written, decays, begin, place, head, key, value, DV, PENDING)
            tl.store(cells, state + k[:, None] * own[None, :])
            tl.store(begun, place + 1)
        else:
            tl.store(decays + now, total)
            tl.store(written + now * DV + value, own)
            if place == 0:
                tl.store(begun, 0)
        if head % SHARE == 0:
            tl.store(keys + place % PENDING * DK + key, k)
        tl.store(out + start * (HEADS * DV), result)
        _keep_token(inputs + place % LENGTH * KEPT, raw, qc, kc, vc, head, SHARE)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["slots", "starts", "first"])
def _convolve_rows(
    x, weight, inputs, slots, starts, first, out, rows, x_stride,
    C: tl.constexpr, KEPT: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    wait_and_launch(NATIVE)
    row, tile = _find(starts, starts, rows, tl.program_id(0), TOKENS, ROWS)  # without cuts
    if row >= rows:
        return
    slot, place = tl.load(slots + row).to(tl.int64), tl.load(first + row)
    start, end = tl.load(starts + row), tl.load(starts + row + 1)
    t = start + tile * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel = (c < C)[None, :]
    summed = tl.zeros([TOKENS, BLOCK], tl.float32)
    for j in tl.static_range(WIDTH):
        source = t - (WIDTH - 1) + j
        own = ((source >= start) & (source < end))[:, None] & channel
        cells = x + source.to(tl.int64)[:, None] * x_stride + c[None, :]
        value = tl.load(cells, mask=own, other=0.0).to(tl.float32)
        if tile == 0:  # before its first token a row has what its slot kept
            p = place + (source - start)
            kept = ((source < start) & (p >= 0))[:, None] & channel
            past = inputs + (slot * LENGTH + p % LENGTH)[:, None] * KEPT + c[None, :]
            value += tl.load(past, mask=kept, other=0.0).to(tl.float32)
        weights = tl.load(weight + c * WIDTH + j, mask=c < C, other=0.0)
        summed += value * weights.to(tl.float32)[None, :]
    target = out + t.to(tl.int64)[:, None] * C + c[None, :]
    tl.store(target, _silu(summed).to(out.dtype.element_ty), mask=(t < end)[:, None] & channel)


@triton.jit(do_not_specialize_on_alignment=["slots", "starts", "first", "cuts", "saves", "begun"])
def _keep_inputs(
    x, inputs, begun, slots, starts, first, cuts, saves, before, x_stride,
    C: tl.constexpr, KEPT: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr,
    BLOCK: tl.constexpr, HEADS: tl.constexpr, MOST_HEADS: tl.constexpr, PENDING: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    # A kernel of its own: the one before reads what is replaced here. At the row's end, and at its cut, where
    # recurrent states will have seen all. before[rows, heads]: what they have seen when the row begins.
    wait_and_launch(NATIVE)
    row = tl.program_id(0)
    c, j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :], tl.arange(0, TAPS)[:, None]
    place, start = tl.load(first + row), tl.load(starts + row)
    if start == tl.load(starts + row + 1):
        return
    cut = tl.load(cuts + row)
    for at in tl.static_range(2):
        slot = tl.load((slots if at == 0 else saves) + row).to(tl.int64)
        end = tl.load(starts + row + 1) if at == 0 else cut
        source = end - (WIDTH - 1) + j
        kept = (j < WIDTH - 1) & (source >= start) & (c < C)
        value = tl.load(x + source.to(tl.int64) * x_stride + c, mask=kept, other=0.0)
        p = place + (source - start)
        tl.store(inputs + (slot * LENGTH + p % LENGTH) * KEPT + c, value, mask=kept)
        if PENDING:
            head = tl.arange(0, MOST_HEADS)
            own = (head < HEADS) & (tl.program_id(1) == 0) & (end > start)
            cells = begun + slot * HEADS + head
            if at == 0:
                old = tl.load(cells, mask=own & (place > 0), other=0)
                tl.store(before + row * HEADS + head, old, mask=own)
            tl.store(cells, place + (end - start) + tl.zeros_like(head), mask=own)


@triton.jit
def _inverse(system, SIZE: tl.constexpr):
    """The inverse of 1 + system[SIZE, SIZE], float32, of which only what is below the diagonal counts: blocks
    of 16 rows on the diagonal one row after another, which is stable, then those of pairs of blocks."""
    BLOCKS: tl.constexpr = SIZE // _BLOCK
    i = tl.arange(0, SIZE)
    row, column = i[:, None], i[None, :]
    system = tl.where(row > column, system, 0.0)
    # [block of the row, block of the column, row, column]: those on the diagonal
    parts = tl.permute(tl.reshape(system, [BLOCKS, _BLOCK, BLOCKS, _BLOCK]), (0, 2, 1, 3))
    block = tl.arange(0, BLOCKS)
    diagonal = (block[:, None] == block[None, :])[:, :, None, None]
    inverse = -tl.sum(tl.where(diagonal, parts, 0.0), axis=1)
    j = tl.arange(0, _BLOCK)
    for n in range(1, _BLOCK):
        this = (j == n)[None, :, None]
        old = tl.sum(tl.where(this, inverse, 0.0), axis=1)
        new = old + tl.sum(old[:, :, None] * inverse, axis=1)
        inverse = tl.where(this, new[:, None, :], inverse)
    inverse += tl.where(j[:, None] == j[None, :], 1.0, 0.0)[None, :, :]
    spread = tl.where(diagonal, inverse[:, None, :, :], 0.0)
    whole = tl.reshape(tl.permute(spread, (0, 2, 1, 3)), [SIZE, SIZE])
    # A pair's lower left block is -(inverse of the lower) system (inverse of the upper).
    width = _BLOCK
    while width < SIZE:
        pair = (row // width == column // width + 1) & (row // (2 * width) == column // (2 * width))
        whole -= tl.dot(tl.dot(whole, tl.where(pair, system, 0.0)), whole)
        width *= 2
    return whole


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["starts", "cuts"])
def _chunk_writes(
    x, a, b, a_log, dt_bias, starts, cuts, u, w, scores, factors, rows, a_stride, b_stride,
    HEADS: tl.constexpr, SHARE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    # What a chunk writes into its state is u - w @ state; scores: of its queries for what it writes. factors:
    # of a token's query for the state before its chunk, of its key at the chunk's end, of the state there.
    wait_and_launch(NATIVE)
    row, chunk = _find(starts, cuts, rows, tl.program_id(0), SIZE, ROWS)
    if row >= rows:
        return
    KEYS: tl.constexpr = HEADS // SHARE * DK
    C: tl.constexpr = 2 * KEYS + HEADS * DV
    head = tl.program_id(1)
    i, key, value = tl.arange(0, SIZE), tl.arange(0, DK), tl.arange(0, DV)
    edges = tl.load(starts + row), tl.load(cuts + row), tl.load(starts + row + 1)
    begin, bound = _bounds(edges[0], edges[1], edges[2], chunk, SIZE)
    inside = begin + i < bound
    t = (begin + i).to(tl.int64)
    own = inside[:, None]
    q_cells = x + t[:, None] * C + head // SHARE * DK + key[None, :]
    q = tl.load(q_cells, mask=own, other=0.0)
    k = tl.load(q_cells + KEYS, mask=own, other=0.0)
    # Keys and queries stay as they are; the factors of their norms are those of rows and columns.
    wide = k.to(tl.float32)
    k_scale = tl.rsqrt(tl.sum(wide * wide, axis=1) + _EPS)
    wide = q.to(tl.float32)
    q_scale = tl.rsqrt(tl.sum(wide * wide, axis=1) + _EPS) * DK**-0.5
    decay, beta = _decay_and_beta(
        tl.load(a + t * a_stride + head, mask=inside, other=0.0),
        tl.load(b + t * b_stride + head, mask=inside, other=0.0),
        tl.load(a_log + head),
        tl.load(dt_bias + head),
    )
    decay, beta = tl.where(inside, decay, 0.0), tl.where(inside, beta, 0.0)
    total = tl.cumsum(decay, 0)
    earlier = i[:, None] >= i[None, :]
    between = tl.exp(tl.where(earlier, total[:, None] - total[None, :], 0.0))
    between = tl.where(earlier, between * k_scale[None, :], 0.0)
    system = tl.dot(k, tl.trans(k)) * between * (beta * k_scale)[:, None]
    score = (tl.dot(q, tl.trans(k)) * between * q_scale[:, None]).to(scores.dtype.element_ty)
    place = t * HEADS + head
    tl.store(scores + place[:, None] * SIZE + i[None, :], score, mask=own)
    inverse = _inverse(system, SIZE)
    v = tl.load(x + t[:, None] * C + 2 * KEYS + head * DV + value[None, :], mask=own, other=0.0)
    writes = tl.dot((inverse * beta[None, :]).to(v.dtype), v)
    tl.store(u + place[:, None] * DV + value[None, :], writes.to(u.dtype.element_ty), mask=own)
    keys = tl.dot((inverse * (beta * k_scale * tl.exp(total))[None, :]).to(k.dtype), k)
    tl.store(w + place[:, None] * DK + key[None, :], keys.to(w.dtype.element_ty), mask=own)
    whole = tl.sum(decay, axis=0)
    tl.store(factors + place * 3, q_scale * tl.exp(total), mask=inside)
    tl.store(factors + place * 3 + 1, k_scale * tl.exp(whole - total), mask=inside)
    tl.store(factors + place * 3 + 2, tl.exp(whole + tl.zeros_like(total)), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["slots", "starts", "first", "cuts", "saves"])
def _chunk_states(
    x, u, w, scores, factors, recurrent, keys, written, decays, before,
    slots, starts, first, cuts, saves, results,
    HEADS: tl.constexpr, SHARE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr, PENDING: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    wait_and_launch(NATIVE)
    KEYS: tl.constexpr = HEADS // SHARE * DK
    C: tl.constexpr = 2 * KEYS + HEADS * DV
    head, row = tl.program_id(1), tl.program_id(2)
    i, key, value = tl.arange(0, SIZE), tl.arange(0, DK), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    start, cut, end = tl.load(starts + row), tl.load(cuts + row), tl.load(starts + row + 1)
    if start == end:
        return
    slot = tl.load(slots + row).to(tl.int64)
    cells = recurrent + ((slot * HEADS + head) * DK + key)[:, None] * DV + value[None, :]
    place = tl.load(first + row)
    begin = place  # what the recurrent state has seen
    if PENDING:
        begin = tl.maximum(tl.load(before + row * HEADS + head), place - (place + head) % PENDING)
    state = tl.load(cells, mask=(key >= 0)[:, None] & (begin > 0), other=0.0)
    if PENDING:
        decays += (slot * HEADS + head) * PENDING
        written += (slot * HEADS + head) * (PENDING * DV)
        keys += (slot * (HEADS // SHARE) + head // SHARE) * (PENDING * DK)
        total = _total_decay(decays, begin, place, head, PENDING)
        state = _settled(state, total, keys, written, decays, begin, place, head, key, value, DV, PENDING)
    dtype = x.dtype.element_ty
    early = tl.cdiv(cut - start, SIZE)
    for chunk in tl.range(0, early + tl.cdiv(end - cut, SIZE), num_stages=STAGES):
        first_token, bound = _bounds(start, cut, end, chunk, SIZE)
        inside = first_token + i < bound
        own = inside[:, None]
        t = (first_token + i).to(tl.int64)
        cell = t * HEADS + head
        w_tile = tl.load(w + cell[:, None] * DK + key[None, :], mask=own, other=0.0)
        u_tile = tl.load(u + cell[:, None] * DV + value[None, :], mask=own, other=0.0)
        q_cells = x + t[:, None] * C + head // SHARE * DK + key[None, :]
        q = tl.load(q_cells, mask=own, other=0.0)
        k = tl.load(q_cells + KEYS, mask=own, other=0.0)
        score = tl.load(scores + cell[:, None] * SIZE + i[None, :], mask=own, other=0.0)
        asked = tl.load(factors + cell * 3, mask=inside, other=0.0)
        left = tl.load(factors + cell * 3 + 1, mask=inside, other=0.0)
        kept = tl.load(factors + (first_token.to(tl.int64) * HEADS + head) * 3 + 2)
        rounded = state.to(dtype)
        writes = u_tile.to(tl.float32) - tl.dot(w_tile, rounded)
        result = tl.dot(q, rounded) * asked[:, None]
        result = tl.dot(score, writes.to(dtype), result).to(dtype)
        tl.store(results + cell[:, None] * DV + value[None, :], result, mask=own)
        state = tl.dot(tl.trans(k), (writes * left[:, None]).to(dtype), state * kept)
        if chunk == early - 1:  # read here alone: the loop has few registers left
            other = tl.load(saves + row).to(tl.int64) - tl.load(slots + row)
            tl.store(cells + other * (HEADS * DK * DV), state)
    tl.store(cells, state)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["starts"])
def _gated_norm(
    results, z, norm, starts, out, rows, z_stride, eps,
    HEADS: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    # Of these rows' tokens; those behind the last row get zeros.
    wait_and_launch(NATIVE)
    token = tl.program_id(0).to(tl.int64)
    if token < tl.load(starts):
        return
    head, value = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, DV)[None, :]
    inside = (head < HEADS)[:, None] & (value >= 0)
    given = inside & (token < tl.load(starts + rows))
    cells = head[:, None] * DV + value
    result = tl.load(results + token * (HEADS * DV) + cells, mask=given, other=0.0)
    gate = tl.load(z + token * z_stride + cells, mask=given, other=0.0)
    wide = result.to(tl.float32)
    square = tl.sum(wide * wide, axis=1)[:, None]
    normed = _normed(wide, square, gate, tl.load(norm + value), eps, DV, result.dtype)
    tl.store(out + token * (HEADS * DV) + cells, normed, mask=inside)


def state_columns(heads: int, dv: int, sms: int) -> int:
    """Columns of a program of _chunk_states with which all are done first, where this many heads of rows have
    dv each. A program has an SM for itself."""
    fitting = [columns for columns in _STATE_COLUMNS if columns <= dv]
    return min(fitting, key=lambda columns: -(-heads * (dv // columns) // sms) * _STATE_COLUMNS[columns])


def delta_net(
    qkv: Tensor, z: Tensor, a: Tensor, b: Tensor, weights: DeltaWeights, states: DeltaStates, rows: DeltaRows
) -> Tensor:
    """See ops.torch_delta.delta_net. Tokens behind the last row get zeros.

    Raises ValueError for heads and convolutions that the kernels do not take."""
    (tokens, channels), width = qkv.shape, weights.conv.shape[1]
    heads, dk, dv = states.recurrent.shape[1:]
    if any(size < 32 or size & (size - 1) for size in (dk, dv)) or width > _TOKENS:
        raise ValueError(
            f"heads of {dk} and {dv} and a convolution of {width} inputs: on a GPU, heads of delta nets have"
            f" a power of two from 32 on, and convolutions at most {_TOKENS} inputs"
        )
    decodes, prompts = rows.decodes, len(rows.slots) - rows.decodes
    assert rows.first.is_contiguous() and (states.pending is None) == (rows.held is not None)
    recurrent, inputs, pending = states
    size = 0 if pending is None else pending.decays.shape[-1]
    keys, written, decays, begun = pending or 4 * [recurrent]  # which no kernel reads
    share = heads // ((channels - heads * dv) // (2 * dk))
    sizes = {"HEADS": heads, "SHARE": share, "DK": dk, "DV": dv}
    launch = {"NATIVE": NATIVE, "launch_pdl": NATIVE}
    conv = {"WIDTH": width, "LENGTH": inputs.shape[1]}
    taps = triton.next_power_of_2(width)
    out = torch.empty(tokens, heads * dv, dtype=qkv.dtype, device=qkv.device)
    strides = [x.stride(0) for x in (qkv, z, a, b)]
    if decodes and delta_rows.takes(weights, states):
        delta_rows.delta_rows((qkv, z, a, b), weights, states, rows, out)
    elif decodes:
        _decode_rows[decodes, heads](
            *(qkv, z, a, b, *weights[:4], recurrent, inputs, keys, written, decays, begun),
            *(*rows[:4], out, weights.eps, *strides),
            **(sizes | conv | launch),
            TAPS=taps,
            PENDING=size,
            DRAFTS=rows.held is not None,
            PADDED=rows.padded,
            num_warps=4 if dk * dv <= 128 * 128 else 8,
        )
    if not prompts:
        return out
    slots, starts, first = (x[decodes:] for x in rows[:3])
    cuts, saves = starts, slots  # of rows that keep nothing of their middle
    if rows.cuts is not None and rows.saves is not None:
        cuts, saves = rows.cuts[decodes:], rows.saves[decodes:]
    convolved = torch.empty(tokens, channels, dtype=qkv.dtype, device=qkv.device)
    blocks = triton.cdiv(channels, _CHANNELS)
    conv |= {"C": channels, "KEPT": channels + 2 * heads, "BLOCK": _CHANNELS}
    searched = next(size for size in SEARCHED if prompts <= size)
    most = tokens if rows.padded else tokens - decodes  # of prompts
    _convolve_rows[most // _TOKENS + prompts, blocks](
        *(qkv, weights.conv, inputs, slots, starts, first, convolved, prompts, strides[0]),
        **(conv | launch),
        TOKENS=_TOKENS,
        ROWS=searched,
    )
    before = torch.empty(prompts, heads, dtype=torch.int32, device=qkv.device)
    _keep_inputs[prompts, blocks](
        *(qkv, inputs, begun, slots, starts, first, cuts, saves, before, strides[0]),
        **(conv | launch),
        TAPS=taps,
        HEADS=heads,
        MOST_HEADS=triton.next_power_of_2(heads),
        PENDING=size,
    )
    u, w, scores, results = (
        torch.empty(tokens, heads, size, dtype=qkv.dtype, device=qkv.device) for size in (dv, dk, CHUNK, dv)
    )
    factors = torch.empty(tokens, heads, 3, dtype=torch.float32, device=qkv.device)
    tiles = most // CHUNK + (prompts if cuts is starts else 2 * prompts)
    _chunk_writes[tiles, heads](
        *(convolved, a, b, weights.a_log, weights.dt_bias, starts, cuts, u, w, scores, factors, prompts),
        *strides[2:],
        **(sizes | launch),
        SIZE=CHUNK,
        ROWS=searched,
        maxnreg=_WRITES_REGISTERS,
    )
    columns = state_columns(heads * (1 if rows.padded else prompts), dv, device.sms())
    _chunk_states[dv // columns, heads, prompts](
        *(convolved, u, w, scores, factors, recurrent, keys, written, decays, before),
        *(slots, starts, first, cuts, saves, results),
        **(sizes | launch),
        SIZE=CHUNK,
        COLUMNS=columns,
        STAGES=3 if device.shared_memory() >= _THREE_STAGES else 2,
        PENDING=size,
    )
    normed = min(_NORMED, triton.next_power_of_2(heads))
    _gated_norm[tokens, triton.cdiv(heads, normed)](
        *(results, z, weights.norm, starts, out, prompts, strides[1], weights.eps),
        HEADS=heads,
        DV=dv,
        BLOCK=normed,
        **launch,
    )
    return out
