# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of gated delta net layers; see ops.torch_delta, which has what they compute.

Rows of one token have kernels of their own, bound by reading and writing the states once. Longer rows are
computed in chunks of 64 tokens: one kernel computes what does not depend on the states, for all chunks at
once, another goes through a row's chunks with its state in registers. No kernel needs the lengths of rows on
the host.

FlashInfer's kernels of these layers (flashinfer.gdn_prefill, gdn_decode) are written in CuTe DSL: they need
the package nvidia-cutlass-dsl, and every process compiles them when it first uses them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashinfer_backend.ops import device
from flashinfer_backend.ops.torch_delta import CHUNK, L2_EPS

NATIVE = True  # with what a GPU alone has, and Triton's interpreter does not know
_CHANNELS = 128  # of a convolution's program
_TOKENS = 16
_STATE_COLUMNS = 32  # values of a head, of a program that has their part of its state
_NORMED = 8  # heads of a program
_SEARCHED = (16, 128, 1024, 8192)  # rows, of variants of the kernels that look for their row

_EPS = tl.constexpr(L2_EPS)
_BLOCK = tl.constexpr(16)  # rows of a chunk whose inverse is computed one row after another


@triton.jit
def _begin(NATIVE: tl.constexpr):
    # Programmatic dependent launch: the next kernel may start, and this one waits for those before it.
    if NATIVE:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _find(starts, rows, tile, SIZE: tl.constexpr, ROWS: tl.constexpr):
    """The row of the tile-th of all tiles of SIZE tokens, and which of the row's it is; behind the last tile,
    a row of `rows` or more."""
    index = tl.arange(0, ROWS)
    inside = index < rows
    begin = tl.load(starts + index, mask=inside, other=0)
    tiles = tl.cdiv(tl.load(starts + index + 1, mask=inside, other=0) - begin, SIZE)
    row = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), axis=0)
    return row, tile - tl.sum(tl.where(index < row, tiles, 0), axis=0)


@triton.jit
def _silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def _convolve_tokens(
    x,
    weight,
    states,
    slots,
    out,
    x_stride,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    PAST: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    # Rows of one token.
    _begin(NATIVE)
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    j = tl.arange(0, PAST)[None, :]  # 0: the oldest input
    inside = (c < C)[:, None] & (j < WIDTH - 1)
    slot = tl.load(slots + row).to(tl.int64)
    state = states + (slot * C + c)[:, None] * (WIDTH - 1) + j
    past = tl.load(state, mask=inside, other=0.0)
    weights = tl.load(weight + c[:, None] * WIDTH + j, mask=inside, other=0.0)
    newest = tl.load(x + row * x_stride + c, mask=c < C, other=0.0)
    last_weight = tl.load(weight + c * WIDTH + WIDTH - 1, mask=c < C, other=0.0)
    summed = tl.sum(past.to(tl.float32) * weights.to(tl.float32), axis=1)
    summed += newest.to(tl.float32) * last_weight.to(tl.float32)
    tl.store(out + row * C + c, _silu(summed).to(out.dtype.element_ty), mask=c < C)
    tl.debug_barrier()  # all threads have what is replaced now
    tl.store(state - 1, past, mask=inside & (j > 0))
    tl.store(states + (slot * C + c) * (WIDTH - 1) + WIDTH - 2, newest.to(past.dtype), mask=c < C)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["slots", "starts"])
def _convolve_rows(
    x,
    weight,
    states,
    slots,
    starts,
    out,
    rows,
    x_stride,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    _begin(NATIVE)
    row, tile = _find(starts, rows, tl.program_id(0), TOKENS, ROWS)
    if row >= rows:
        return
    slot = tl.load(slots + row).to(tl.int64)
    start, end = tl.load(starts + row), tl.load(starts + row + 1)
    t = start + tile * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel = (c < C)[None, :]
    state = states + (slot * C + c)[None, :] * (WIDTH - 1)
    summed = tl.zeros([TOKENS, BLOCK], tl.float32)
    for j in tl.static_range(WIDTH):
        source = t - (WIDTH - 1) + j
        own = ((source >= start) & (source < end))[:, None] & channel
        cells = x + source.to(tl.int64)[:, None] * x_stride + c[None, :]
        value = tl.load(cells, mask=own, other=0.0).to(tl.float32)
        if tile == 0:  # before its first token a row has what its slot kept
            kept = (source < start)[:, None] & channel
            past = tl.load(state + (source - start)[:, None] + WIDTH - 1, mask=kept, other=0.0)
            value += past.to(tl.float32)
        weights = tl.load(weight + c * WIDTH + j, mask=c < C, other=0.0)
        summed += value * weights.to(tl.float32)[None, :]
    target = out + t.to(tl.int64)[:, None] * C + c[None, :]
    tl.store(target, _silu(summed).to(out.dtype.element_ty), mask=(t < end)[:, None] & channel)


@triton.jit(do_not_specialize_on_alignment=["slots", "starts"])
def _keep_inputs(
    x,
    states,
    slots,
    starts,
    x_stride,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    PAST: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    # A kernel of its own: the one before reads what is replaced here.
    _begin(NATIVE)
    row = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    j = tl.arange(0, PAST)[None, :]
    inside = (c < C)[:, None] & (j < WIDTH - 1)
    slot = tl.load(slots + row).to(tl.int64)
    start, end = tl.load(starts + row), tl.load(starts + row + 1)
    source = end - (WIDTH - 1) + j
    state = states + (slot * C + c)[:, None] * (WIDTH - 1)
    value = tl.load(
        x + source.to(tl.int64) * x_stride + c[:, None], mask=inside & (source >= start), other=0.0
    )
    past = tl.load(state + (source - start) + WIDTH - 1, mask=inside & (source < start), other=0.0)
    kept = tl.where(source >= start, value.to(past.dtype), past)
    tl.debug_barrier()  # all threads have what is replaced now
    tl.store(state + j, kept, mask=inside)


@triton.jit(do_not_specialize=["count"])
def _gates(
    a,
    b,
    a_log,
    dt_bias,
    decay,
    beta,
    count,
    a_stride,
    b_stride,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    _begin(NATIVE)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    token, head = (i // HEADS).to(tl.int64), i % HEADS
    step = tl.load(a + token * a_stride + head, mask=inside, other=0.0).to(tl.float32)
    step += tl.load(dt_bias + head).to(tl.float32)
    # softplus; exp of more would overflow, and log(1 + exp(x)) is x long before
    step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
    tl.store(decay + i, -tl.exp(tl.load(a_log + head).to(tl.float32)) * step, mask=inside)
    wide = tl.load(b + token * b_stride + head, mask=inside, other=0.0).to(tl.float32)
    tl.store(beta + i, tl.sigmoid(wide), mask=inside)


@triton.jit
def _next_token(state, q, k, v, decay, beta):
    # state[Dk, Dv] float32, q, k[Dk] as they come, v[Dv] -> the state behind the token, what it answers.
    DIM: tl.constexpr = q.shape[0]
    q, k = q.to(tl.float32), k.to(tl.float32)
    q = q * (tl.rsqrt(tl.sum(q * q, axis=0) + _EPS) * DIM**-0.5)
    k = k * tl.rsqrt(tl.sum(k * k, axis=0) + _EPS)
    state = state * tl.exp(decay)
    written = beta * (v.to(tl.float32) - tl.sum(k[:, None] * state, axis=0))
    state += k[:, None] * written[None, :]
    return state, tl.sum(q[:, None] * state, axis=0)


@triton.jit
def _delta_tokens(
    q,
    k,
    v,
    decay,
    beta,
    states,
    slots,
    out,
    q_stride,
    k_stride,
    v_stride,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    COLUMNS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    # Rows of one token.
    _begin(NATIVE)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key, value = tl.arange(0, DK), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    slot = tl.load(slots + row).to(tl.int64)
    cells = states + ((slot * HEADS + head) * DK + key)[:, None] * DV + value[None, :]
    state, result = _next_token(
        tl.load(cells),
        tl.load(q + row * q_stride + head // SHARE * DK + key),
        tl.load(k + row * k_stride + head // SHARE * DK + key),
        tl.load(v + row * v_stride + head * DV + value),
        tl.load(decay + row * HEADS + head),
        tl.load(beta + row * HEADS + head),
    )
    tl.store(cells, state)
    tl.store(out + (row * HEADS + head) * DV + value, result.to(out.dtype.element_ty))


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


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["starts"])
def _chunk_writes(
    q,
    k,
    v,
    decay,
    beta,
    starts,
    u,
    w,
    scores,
    factors,
    rows,
    q_stride,
    k_stride,
    v_stride,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    # What a chunk writes into its state is u - w @ state; scores: of its queries for what it writes.
    _begin(NATIVE)
    row, chunk = _find(starts, rows, tl.program_id(0), SIZE, ROWS)
    if row >= rows:
        return
    head = tl.program_id(1)
    i, key, value = tl.arange(0, SIZE), tl.arange(0, DK), tl.arange(0, DV)
    t = tl.load(starts + row) + chunk * SIZE + i
    inside = t < tl.load(starts + row + 1)
    t = t.to(tl.int64)
    shared = head // SHARE * DK + key[None, :]
    k_tile = tl.load(k + t[:, None] * k_stride + shared, mask=inside[:, None], other=0.0)
    q_tile = tl.load(q + t[:, None] * q_stride + shared, mask=inside[:, None], other=0.0)
    # Keys and queries stay as they are; the factors of their norms are those of rows and columns.
    wide = k_tile.to(tl.float32)
    k_scale = tl.rsqrt(tl.sum(wide * wide, axis=1) + _EPS)
    wide = q_tile.to(tl.float32)
    q_scale = tl.rsqrt(tl.sum(wide * wide, axis=1) + _EPS) * DK**-0.5
    gates = t * HEADS + head
    total = tl.cumsum(tl.load(decay + gates, mask=inside, other=0.0), 0)
    share = tl.load(beta + gates, mask=inside, other=0.0)
    earlier = i[:, None] >= i[None, :]
    between = tl.exp(tl.where(earlier, total[:, None] - total[None, :], 0.0))
    between = tl.where(earlier, between * k_scale[None, :], 0.0)
    system = tl.dot(k_tile, tl.trans(k_tile)) * between * (share * k_scale)[:, None]
    own = tl.dot(q_tile, tl.trans(k_tile)) * between * q_scale[:, None]
    tl.store(
        scores + gates[:, None] * SIZE + i[None, :], own.to(scores.dtype.element_ty), mask=inside[:, None]
    )
    inverse = _inverse(system, SIZE)
    dtype = k_tile.dtype
    v_tile = tl.load(v + t[:, None] * v_stride + head * DV + value[None, :], mask=inside[:, None], other=0.0)
    values = tl.dot((inverse * share[None, :]).to(dtype), v_tile)
    tl.store(u + gates[:, None] * DV + value[None, :], values.to(u.dtype.element_ty), mask=inside[:, None])
    kept = (share * k_scale * tl.exp(total))[None, :]
    keys = tl.dot((inverse * kept).to(dtype), k_tile)
    tl.store(w + gates[:, None] * DK + key[None, :], keys.to(w.dtype.element_ty), mask=inside[:, None])
    tl.store(factors + gates * 2, q_scale * tl.exp(total), mask=inside)
    left = tl.sum(tl.where(i == SIZE - 1, total, 0.0), axis=0) - total
    tl.store(factors + gates * 2 + 1, k_scale * tl.exp(left), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["slots", "starts"])
def _chunk_states(
    q,
    k,
    decay,
    u,
    w,
    scores,
    factors,
    states,
    slots,
    starts,
    out,
    q_stride,
    k_stride,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    _begin(NATIVE)
    head, row = tl.program_id(1), tl.program_id(2)
    i, key, value = tl.arange(0, SIZE), tl.arange(0, DK), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    start, end = tl.load(starts + row), tl.load(starts + row + 1)
    slot = tl.load(slots + row).to(tl.int64)
    cells = states + ((slot * HEADS + head) * DK + key)[:, None] * DV + value[None, :]
    state = tl.load(cells)
    shared = head // SHARE * DK + key[None, :]
    dtype = k.dtype.element_ty
    for begin in tl.range(start, end, SIZE, num_stages=STAGES):
        inside = begin + i < end
        own = inside[:, None]
        t = (begin + i).to(tl.int64)
        gates = t * HEADS + head
        w_tile = tl.load(w + gates[:, None] * DK + key[None, :], mask=own, other=0.0)
        u_tile = tl.load(u + gates[:, None] * DV + value[None, :], mask=own, other=0.0)
        q_tile = tl.load(q + t[:, None] * q_stride + shared, mask=own, other=0.0)
        k_tile = tl.load(k + t[:, None] * k_stride + shared, mask=own, other=0.0)
        score = tl.load(scores + gates[:, None] * SIZE + i[None, :], mask=own, other=0.0)
        asked = tl.load(factors + gates * 2, mask=inside, other=0.0)
        left = tl.load(factors + gates * 2 + 1, mask=inside, other=0.0)
        kept = tl.exp(tl.sum(tl.load(decay + gates, mask=inside, other=0.0), axis=0))
        rounded = state.to(dtype)
        written = u_tile.to(tl.float32) - tl.dot(w_tile, rounded)
        result = tl.dot(q_tile, rounded) * asked[:, None]
        result = tl.dot(score, written.to(dtype), result)
        tl.store(out + gates[:, None] * DV + value[None, :], result.to(out.dtype.element_ty), mask=own)
        state = tl.dot(tl.trans(k_tile), (written * left[:, None]).to(dtype), state * kept)
    tl.store(cells, state)


@triton.jit
def _gated_norm(
    x,
    gate,
    weight,
    out,
    gate_stride,
    eps,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    _begin(NATIVE)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (head < HEADS)[:, None] & (column < DIM)
    cells = head[:, None] * DIM + column
    value = tl.load(x + token * (HEADS * DIM) + cells, mask=inside, other=0.0)
    gates = tl.load(gate + token * gate_stride + cells, mask=inside, other=0.0).to(tl.float32)
    weights = tl.load(weight + column, mask=column < DIM, other=0.0)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / DIM + eps)
    # Rounded where ops.torch_delta.gated_norm rounds.
    normed = (wide * scale[:, None]).to(value.dtype) * weights
    result = normed.to(tl.float32) * _silu(gates)
    tl.store(out + token * (HEADS * DIM) + cells, result.to(out.dtype.element_ty), mask=inside)


def _launch() -> dict[str, bool]:
    return {"NATIVE": NATIVE, "launch_pdl": NATIVE}


def _searched(rows: int) -> int:
    return next(size for size in _SEARCHED if rows <= size)


def causal_conv(
    x: Tensor, weight: Tensor, conv_states: Tensor, slots: Tensor, starts: Tensor, decodes: int = 0
) -> Tensor:
    """See ops.torch_delta.causal_conv. x's rows can have a stride. Tokens behind the last row get zeros."""
    (tokens, channels), width, rows = x.shape, weight.shape[1], len(slots) - decodes
    make = torch.empty if not rows else torch.zeros
    out = make(tokens, channels, dtype=x.dtype, device=x.device)
    blocks = triton.cdiv(channels, _CHANNELS)
    sizes = {"C": channels, "WIDTH": width, "BLOCK": _CHANNELS}
    past = triton.next_power_of_2(width - 1)
    stride = x.stride(0)
    if decodes:
        _convolve_tokens[decodes, blocks](
            x, weight, conv_states, slots, out, stride, **sizes, PAST=past, **_launch()
        )
    if rows:
        own = slots[decodes:], starts[decodes:]
        tiles = (tokens - decodes) // _TOKENS + rows
        _convolve_rows[tiles, blocks](
            *(x, weight, conv_states, *own, out, rows, stride),
            **sizes,
            TOKENS=_TOKENS,
            ROWS=_searched(rows),
            **_launch(),
        )
        _keep_inputs[rows, blocks](x, conv_states, *own, stride, **sizes, PAST=past, **_launch())
    return out


def delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """See ops.torch_delta.delta_gates. Rows of a and b can have a stride."""
    decay, beta = (torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2))
    count, block = a.numel(), 256
    _gates[(triton.cdiv(count, block),)](
        *(a, b, a_log, dt_bias, decay, beta, count, a.stride(0), b.stride(0)),
        HEADS=a.shape[1],
        BLOCK=block,
        **_launch(),
    )
    return decay, beta


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: Tensor,
    starts: Tensor,
    decodes: int = 0,
) -> Tensor:
    """See ops.torch_delta.gated_delta_rule. Tokens of q, k and v can have a stride; Dk and Dv are powers of
    two from 16 on. Tokens behind the last row get zeros."""
    tokens, heads, rows = v.shape[0], v.shape[1], len(slots) - decodes
    dk, dv = states.shape[2:]
    make = torch.empty if not rows else torch.zeros
    out = make(tokens, heads, dv, dtype=v.dtype, device=v.device)
    sizes = {"HEADS": heads, "SHARE": heads // k.shape[1], "DK": dk, "DV": dv}
    columns = min(_STATE_COLUMNS, dv)
    strides = q.stride(0), k.stride(0), v.stride(0)
    if decodes:
        _delta_tokens[decodes, heads, dv // columns](
            *(q, k, v, decay, beta, states, slots, out, *strides), **sizes, COLUMNS=columns, **_launch()
        )
    if not rows:
        return out
    own = slots[decodes:], starts[decodes:]
    u, w, scores = (
        torch.empty(tokens, heads, size, dtype=v.dtype, device=v.device) for size in (dv, dk, CHUNK)
    )
    factors = torch.empty(tokens, heads, 2, dtype=torch.float32, device=v.device)
    _chunk_writes[(tokens - decodes) // CHUNK + rows, heads](
        *(q, k, v, decay, beta, own[1], u, w, scores, factors, rows, *strides),
        **sizes,
        SIZE=CHUNK,
        ROWS=_searched(rows),
        **_launch(),
    )
    if rows * heads * (dv // columns) > 2 * device.sms():  # fewer programs read queries and keys less often
        columns = min(2 * columns, dv)
    _chunk_states[dv // columns, heads, rows](
        *(q, k, decay, u, w, scores, factors, states, *own, out, *strides[:2]),
        **sizes,
        SIZE=CHUNK,
        COLUMNS=columns,
        STAGES=2,
        **_launch(),
    )
    return out


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ops.torch_delta.gated_norm: x[T, heads, D], contiguous, and gate[T, heads, D], whose tokens can
    have a stride."""
    tokens, heads, dim = x.shape
    out = torch.empty_like(x)
    block = min(_NORMED, triton.next_power_of_2(heads))
    _gated_norm[tokens, triton.cdiv(heads, block)](
        *(x, gate, weight, out, gate.stride(0), eps),
        HEADS=heads,
        DIM=dim,
        COLUMNS=triton.next_power_of_2(dim),
        BLOCK=block,
        **_launch(),
    )
    return out
