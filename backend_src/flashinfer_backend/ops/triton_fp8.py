# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of FP8 products: e4m3 activations with their scales, the product of 128x128 blocks, and what
follows a product.

They compute what ops.fp8 and ops.weight define. All but the product let the next kernel start, and start,
before the kernel before has ended (programmatic dependent launch).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashinfer_backend.core.tuned import BlockTile
from flashinfer_backend.ops.fp8 import BLOCK, E4M3, LARGEST, SMALLEST_PEAK, padded
from flashinfer_backend.ops.triton_prefetch import wait_and_launch

NATIVE = True  # with what a GPU alone has, and Triton's interpreter does not know

# From so many rows on, a row with a norm is taken in pieces of so many groups, if its groups fill a power of
# two badly, which is this many times as many: threads of the rest would have nothing to do.
PIECES_FROM, PIECE, PIECES_SAVE = 512, 8, 1.25
_LARGEST, _SMALLEST_PEAK = tl.constexpr(LARGEST), tl.constexpr(SMALLEST_PEAK)


@triton.jit
def to_e4m3(x, scale, NATIVE: tl.constexpr):
    """ops.fp8.to_e4m3 of a block in float32."""
    if NATIVE:
        # The steps by which a GPU divides ordinary numbers, without its branch for others: with it, elements
        # wait for one another. By -x / scale, so that a zero keeps its sign. Infinite elements are bounded
        # first: these steps would make them NaN.
        bound = 2.0 * _LARGEST * scale
        x = tl.minimum(tl.maximum(x, -bound), bound)
        negative = tl.div_rn(-1.0, scale)
        scaled = x * negative
        scaled = tl.fma(tl.fma(scaled, scale, x), negative, scaled)
        scaled = -1.0 * tl.fma(tl.fma(scaled, scale, x), negative, scaled)
    else:  # the interpreter rounds a product before it adds
        scaled = tl.div_rn(x, scale)
    return tl.minimum(tl.maximum(scaled, -_LARGEST), _LARGEST).to(tl.float8e4nv)


@triton.jit
def _quantise_rows(
    x, norm_weight, elements, scales, static, eps,
    K: tl.constexpr, WIDTH: tl.constexpr, STATIC: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, WIDTH)
    inside = k < K
    if norm_weight is not None:
        weight = tl.load(norm_weight + k, mask=inside, other=0.0).to(tl.float32)
    wait_and_launch(NATIVE)
    values = tl.load(x + row * K + k, mask=inside, other=0.0).to(tl.float32)
    if norm_weight is not None:
        values *= tl.rsqrt(tl.sum(values * values, axis=0) / K + eps)
        values = (values * weight).to(x.dtype.element_ty).to(tl.float32)  # rounded as a norm's result
    scale = static
    if not STATIC:
        scale = tl.div_rn(tl.maximum(tl.max(tl.abs(values), axis=0), _SMALLEST_PEAK), _LARGEST)
    tl.store(elements + row * K + k, to_e4m3(values, scale, NATIVE), mask=inside)
    tl.store(scales + row, scale)


class Norm(NamedTuple):
    """RMSNorm of a row: weight[K], eps."""

    weight: Tensor
    eps: float


def quantise_rows(x: Tensor, static: float | None = None, norm: Norm | None = None) -> tuple[Tensor, Tensor]:
    """x[T, K], or its norm, -> e4m3 [T, K], float32 [T, 1]: ops.fp8.quantise_rows, or by one given scale."""
    tokens, inner = x.shape
    elements = torch.empty(tokens, inner, dtype=E4M3, device=x.device)
    scales = torch.empty(tokens, 1, dtype=torch.float32, device=x.device)
    width = triton.next_power_of_2(inner)
    _quantise_rows[(tokens,)](
        x, norm.weight if norm else None, elements, scales, static or 0.0, norm.eps if norm else 0.0,
        K=inner, WIDTH=width, STATIC=static is not None, NATIVE=NATIVE,
        num_warps=min(max(width // 1024, 1), 16), launch_pdl=NATIVE,
    )  # fmt: skip
    return elements, scales


@triton.jit
def _sum_of_parts(source, plane, inside, PARTS: tl.constexpr):
    value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        value += tl.load(source + part * plane.to(tl.int64), mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit(do_not_specialize=["plane"])
def _finish(
    product, x_scales, scales, bias, residual, out, columns, plane,
    PARTS: tl.constexpr, GATED: tl.constexpr, WIDTH: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    wait_and_launch(NATIVE)
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = n < columns
    source = product + row * columns + n
    if GATED:
        source += row * columns
    value = _sum_of_parts(source, plane, inside, PARTS)
    if scales is not None:
        x_scale = tl.load(x_scales + row)
        value *= x_scale * tl.load(scales + n, mask=inside, other=0.0)
    if GATED:
        up = _sum_of_parts(source + columns, plane, inside, PARTS)
        if scales is not None:
            up *= x_scale * tl.load(scales + columns + n, mask=inside, other=0.0)
        value = value * tl.sigmoid(value) * up
    if bias is not None:
        value += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + row * columns + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + n, value.to(out.dtype.element_ty), mask=inside)


def finish(
    product: Tensor,
    x_scales: Tensor | None = None,
    scales: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """product[T, N], or the sum of its parts [P, T, N], with what is given: times x_scales[T, 1] and
    scales[N], plus bias[N] and residual[T, N]; gated: silu of the first half of the columns times the second,
    [T, N / 2]. In bfloat16."""
    (tokens, columns), parts = product.shape[-2:], product.shape[0] if product.dim() == 3 else 1
    plane = tokens * columns
    columns //= 2 if gated else 1
    out = torch.empty(tokens, columns, dtype=torch.bfloat16, device=product.device)
    width = 1024
    _finish[(tokens, triton.cdiv(columns, width))](
        product, x_scales, scales, bias, residual, out, columns, plane,
        PARTS=parts, GATED=gated, WIDTH=width, NATIVE=NATIVE, num_warps=4, launch_pdl=NATIVE,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["tokens", "rows"])
def _quantise_groups(
    x, norm_weight, elements, scales, normed, tokens, rows, eps,
    K: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, PIECES: tl.constexpr, GROUP: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    # A program takes GROUPS neighbouring groups of ROWS rows, with a norm all: in PIECES, read twice, where
    # there are more than one. Rows beyond the tokens are zeros.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    lane = tl.arange(0, GROUP)[None, :]
    given, inside = (row < tokens)[:, None, None], (row < rows)[:, None, None]
    if norm_weight is not None and PIECES == 1:
        k = (first[:, None] * GROUP + lane)[None, :, :]
        weight = tl.load(norm_weight + k, mask=k < K, other=0.0).to(tl.float32)
    wait_and_launch(NATIVE)
    if PIECES > 1:
        wide = tl.zeros([ROWS, GROUPS, GROUP], tl.float32)
        for piece in tl.static_range(PIECES):
            k = ((first + piece * GROUPS)[:, None] * GROUP + lane)[None, :, :]
            part = tl.load(x + row[:, None, None] * K + k, mask=given & (k < K), other=0.0).to(tl.float32)
            wide += part * part
        squares = tl.sum(tl.sum(wide, axis=2), axis=1)
    for piece in tl.static_range(PIECES):
        group = first + piece * GROUPS
        k = (group[:, None] * GROUP + lane)[None, :, :]
        cells = row[:, None, None] * K + k
        values = tl.load(x + cells, mask=given & (k < K), other=0.0).to(tl.float32)
        if norm_weight is not None:
            if PIECES > 1:
                weight = tl.load(norm_weight + k, mask=k < K, other=0.0).to(tl.float32)
            else:
                squares = tl.sum(tl.sum(values * values, axis=2), axis=1)
            values *= tl.rsqrt(squares / K + eps)[:, None, None]
            rounded = (values * weight).to(x.dtype.element_ty)  # as a norm's result
            if normed is not None:
                tl.store(normed + cells, rounded, mask=given & (k < K))
            values = rounded.to(tl.float32)
        scale = tl.div_rn(tl.maximum(tl.max(tl.abs(values), axis=2), _SMALLEST_PEAK), _LARGEST)
        tl.store(elements + cells, to_e4m3(values, scale[:, :, None], NATIVE), mask=inside & (k < K))
        of_groups = scales + group[None, :] * rows.to(tl.int64) + row[:, None]
        tl.store(of_groups, scale, mask=(group < K // GROUP)[None, :] & (row < rows)[:, None])


Quantised = tuple[Tensor, Tensor]  # of quantise_groups and finish_quantised


def quantise_groups(x: Tensor, norm: Norm | None = None, normed: Tensor | None = None) -> Quantised:
    """ops.fp8.quantise_groups of x[T, K], or of its norm, with rows of zeros up to a multiple of 4, R:
    -> e4m3 [R, K], float32 [R, K / 128], column after column (strides 1, R). K a multiple of 128. The norm
    itself is written to `normed` [T, K] when given."""
    assert normed is None or norm
    tokens, inner = x.shape
    rows = padded(tokens)
    elements = torch.empty(rows, inner, dtype=E4M3, device=x.device)
    scales = torch.empty(inner // BLOCK, rows, dtype=torch.float32, device=x.device)
    groups, pieces = triton.next_power_of_2(inner // BLOCK), 1
    if norm and tokens >= PIECES_FROM and groups >= PIECES_SAVE * max(PIECE, inner // BLOCK):
        groups, pieces = PIECE, triton.cdiv(inner // BLOCK, PIECE)
    elif not norm:
        groups = min(groups, 16)
    of_program = max(1, 16 // groups) if pieces == 1 else 1
    columns = triton.cdiv(inner // BLOCK, groups * pieces)
    _quantise_groups[(triton.cdiv(rows, of_program), columns)](
        x, norm.weight if norm else None, elements, scales, normed, tokens, rows, norm.eps if norm else 0.0,
        K=inner, ROWS=of_program, GROUPS=groups, PIECES=pieces, GROUP=BLOCK, NATIVE=NATIVE,
        num_warps=min(max(groups * BLOCK // 1024, 4), 16), launch_pdl=NATIVE,
    )  # fmt: skip
    return elements, scales.t()


@triton.jit(do_not_specialize=["plane", "tokens", "rows"])
def _finish_quantised(
    product, elements, scales, plane, tokens, rows,
    COLUMNS: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    # A program takes GROUPS neighbouring groups of a row. Rows beyond the tokens are zeros.
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    n = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    real = group < COLUMNS // GROUP
    given = real[:, None] & (row < tokens)
    wait_and_launch(NATIVE)
    source = product + row * 2 * COLUMNS + n
    gate = _sum_of_parts(source, plane, given, PARTS)
    up = _sum_of_parts(source + COLUMNS, plane, given, PARTS)
    values = (gate * tl.sigmoid(gate) * up).to(tl.bfloat16).to(tl.float32)  # rounded as in finish
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(values), axis=1), _SMALLEST_PEAK), _LARGEST)
    tl.store(elements + row * COLUMNS + n, to_e4m3(values, scale[:, None], NATIVE), mask=real[:, None])
    tl.store(scales + group * rows.to(tl.int64) + row, scale, mask=real)


def finish_quantised(product: Tensor) -> Quantised:
    """quantise_groups of finish(product, gated=True), without what is between them: product[T, 2 K], or the
    sum of its parts [P, T, 2 K], -> e4m3 [R, K], float32 [R, K / 128]."""
    (tokens, columns), parts = product.shape[-2:], product.shape[0] if product.dim() == 3 else 1
    plane, columns, rows = tokens * columns, columns // 2, padded(tokens)
    elements = torch.empty(rows, columns, dtype=E4M3, device=product.device)
    scales = torch.empty(columns // BLOCK, rows, dtype=torch.float32, device=product.device)
    groups = min(triton.next_power_of_2(columns // BLOCK), 16)
    _finish_quantised[(rows, triton.cdiv(columns // BLOCK, groups))](
        product, elements, scales, plane, tokens, rows,
        COLUMNS=columns, PARTS=parts, GROUPS=groups, GROUP=BLOCK, NATIVE=NATIVE, num_warps=4,
        launch_pdl=NATIVE,
    )  # fmt: skip
    return elements, scales.t()


@triton.jit(do_not_specialize=["tokens", "x_rows"])
def _block_product(
    x, x_scales, weight, scales, out, tokens, x_rows,
    N: tl.constexpr, K: tl.constexpr, APART: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    GROUP: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Token blocks of the same weights are neighbours, so that the weights come from L2 the second time. The
    # weights are the left operand: few tokens then do not waste the tensor cores' 64 rows.
    token_blocks = tl.cdiv(tokens, TOKENS)
    row = tl.program_id(0) // token_blocks * ROWS
    token = tl.program_id(0) % token_blocks * TOKENS
    n = row + tl.arange(0, ROWS)
    t = (token + tl.arange(0, TOKENS)).to(tl.int64)
    k = tl.arange(0, GROUP)
    inside, present = n < N, t < tokens
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    SHARE: tl.constexpr = K // GROUP // SPLIT
    for i in tl.range(tl.program_id(1) * SHARE, (tl.program_id(1) + 1) * SHARE, num_stages=STAGES):
        block = tl.load(weight + n[:, None] * K + i * GROUP + k[None, :], mask=inside[:, None], other=0.0)
        x_block = tl.load(x + t[:, None] * K + i * GROUP + k[None, :], mask=present[:, None], other=0.0)
        x_scale = tl.load(x_scales + i * x_rows.to(tl.int64) + t, mask=present, other=0.0)
        scale = tl.load(scales + row // GROUP * APART + i)  # ROWS divides a block's rows
        # A sum of its own for each group: the tensor cores' sums of FP8 keep fewer bits than float32.
        acc += tl.dot(block, x_block.T) * (x_scale * scale)[None, :]
    part = tl.program_id(1) * tokens.to(tl.int64) * N
    cells = part + t[:, None] * N + n[None, :]
    tl.store(out + cells, acc.T.to(out.dtype.element_ty), mask=present[:, None] & inside[None, :])


def block_product(
    x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, tile: BlockTile, tokens: int
) -> Tensor:
    """The first `tokens` rows, T, of x[R, K] e4m3 with scales [R, K / 128], as quantise_groups makes them,
    times weight[N, K] e4m3 with scales [N / 128, K / 128] (N rounded up) transposed -> bfloat16 [T, N]; with
    tile.split, float32 parts of it [split, T, N], for `finish`."""
    inner, rows = weight.shape[1], weight.shape[0]
    split = tile.split if inner // BLOCK % tile.split == 0 else 1
    shape, dtype = ((tokens, rows), torch.bfloat16) if split == 1 else ((split, tokens, rows), torch.float32)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    _block_product[(triton.cdiv(rows, tile.rows) * triton.cdiv(tokens, tile.tile), split)](
        x, x_scales, weight, scales, out, tokens, len(x),
        N=rows, K=inner, APART=scales.stride(0), TOKENS=tile.tile, ROWS=tile.rows, GROUP=BLOCK, SPLIT=split,
        STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return out
