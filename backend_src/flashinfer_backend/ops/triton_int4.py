# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for weights of 4 bits: a product that makes numbers of them in registers, and a kernel that
writes them out as a matrix of 16 bits.

The product's frame is triton_linear's: split inner dimension, launches that overlap, what comes around the
product fused. The weights are the left operand: its elements may be in registers, so 4 bits become numbers
on their way from shared memory to the tensor cores. q - MIDDLE is exact in 16 bits, a group's products with x
are added up in float32, and the sum is multiplied by the scale. Zero points enter behind, as a multiple of
x's sum: a tensor that is loaded beside the elements keeps Triton from holding them in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashinfer_backend.core.tuned import Tiling
from flashinfer_backend.ops.int4 import BLOCK, MIDDLE
from flashinfer_backend.ops.triton_linear import _prefetch_rows, workspace

_MIDDLE = tl.constexpr(MIDDLE)
# Tokens of a tile from which on zero points are subtracted from the elements: these then pass through shared
# memory once more, but the tensor cores have no time left for sums of x.
SUBTRACT_FROM = 64


@triton.constexpr_function
def _base(bfloat16: bool) -> int:
    """The bits of a number whose lowest bits of mantissa count ones: of 128, or of 1024."""
    return 0x4300 if bfloat16 else 0x6400


@triton.constexpr_function
def _asm(bfloat16: bool, nibble: int, subtract: bool) -> str:
    """Two words at a time: one nibble of each of $1 as 16-bit number, less $2, or less MIDDLE."""
    kind, base = ("bf16", 0x4300) if bfloat16 else ("f16", 0x6400)  # _base
    shift = f"shr.b32 t, $1, {4 * nibble};" if nibble else "mov.b32 t, $1;"
    both, middle = base << 16 | base, (base + MIDDLE) << 16 | base + MIDDLE
    merge = f"lop3.b32 t, t, 0x000F000F, {both:#x}, 0xEA;"  # (a & b) | c
    less = "$2" if subtract else f"{middle:#x}"
    return f"{{ .reg .b32 t, m; {shift} {merge} mov.b32 m, {less}; sub.{kind}x2 $0, t, m; }}"


@triton.jit
def _number(words, zero, NIBBLE: tl.constexpr, BFLOAT16: tl.constexpr, SUBTRACT: tl.constexpr,
            NATIVE: tl.constexpr):  # fmt: skip
    # words int16 [ROWS, W] -> one nibble of each, less the zero points' bits in zero[ROWS], or less MIDDLE.
    if NATIVE:
        if SUBTRACT:
            number = tl.inline_asm_elementwise(
                _asm(BFLOAT16, NIBBLE, True),
                "=r,r,r",
                [words, tl.broadcast_to(zero[:, None], words.shape)],
                dtype=tl.bfloat16 if BFLOAT16 else tl.float16,
                is_pure=True,
                pack=2,
            )
        else:
            number = tl.inline_asm_elementwise(
                _asm(BFLOAT16, NIBBLE, False),
                "=r,r",
                [words],
                dtype=tl.bfloat16 if BFLOAT16 else tl.float16,
                is_pure=True,
                pack=2,
            )
    else:
        kind: tl.constexpr = tl.bfloat16 if BFLOAT16 else tl.float16
        number = words >> (4 * NIBBLE) & 15
        number -= zero[:, None] - _base(BFLOAT16) if SUBTRACT else _MIDDLE
        number = number.to(tl.float32).to(kind)
    return number


@triton.jit
def _load_group(scale, zero, group, n, inside, columns, BFLOAT16: tl.constexpr, SUBTRACT: tl.constexpr):
    # Of rows n: scales in float32, and MIDDLE less zero points, or the bits that _number subtracts.
    place = group.to(tl.int64) * columns + n
    factor = tl.load(scale + place, mask=inside, other=0.0).to(tl.float32)
    shift = factor
    if zero is not None:
        points = tl.load(zero + place, mask=inside, other=0)
        if SUBTRACT:
            shift = points.to(tl.int16) + _base(BFLOAT16)
        else:
            shift = _MIDDLE - points.to(tl.float32)
    return factor, shift


@triton.jit
def _load_groups(scale, zero, column, n, inside, columns, GROUP: tl.constexpr, BFLOAT16: tl.constexpr,
                 SUBTRACT: tl.constexpr):  # fmt: skip
    # Those of the four quarters of a block that begins at `column`.
    s0, z0 = _load_group(scale, zero, column // GROUP, n, inside, columns, BFLOAT16, SUBTRACT)
    s1, z1, s2, z2, s3, z3 = s0, z0, s0, z0, s0, z0
    if GROUP <= 64:
        s2, z2 = _load_group(scale, zero, (column + 64) // GROUP, n, inside, columns, BFLOAT16, SUBTRACT)
        s3, z3 = s2, z2
    if GROUP <= 32:
        s1, z1 = _load_group(scale, zero, (column + 32) // GROUP, n, inside, columns, BFLOAT16, SUBTRACT)
        s3, z3 = _load_group(scale, zero, (column + 96) // GROUP, n, inside, columns, BFLOAT16, SUBTRACT)
    return s0, s1, s2, s3, z0, z1, z2, z3


@triton.jit
def _dots(words, groups, x0, x1, x2, x3, GROUP: tl.constexpr, BFLOAT16: tl.constexpr,
          SUBTRACT: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    # Sums [ROWS, TOKENS] of numbers times x over a block's quarters, as _dots_of has them.
    _s0, _s1, _s2, _s3, z0, z1, z2, z3 = groups
    w0 = _number(words, z0, 0, BFLOAT16, SUBTRACT, NATIVE)
    w1 = _number(words, z1, 1, BFLOAT16, SUBTRACT, NATIVE)
    w2 = _number(words, z2, 2, BFLOAT16, SUBTRACT, NATIVE)
    w3 = _number(words, z3, 3, BFLOAT16, SUBTRACT, NATIVE)
    return _dots_of(w0, w1, w2, w3, x0, x1, x2, x3, GROUP)


@triton.jit
def _dots_of(w0, w1, w2, w3, x0, x1, x2, x3, GROUP: tl.constexpr):
    # Each quarter's product, or those of one group together.
    if GROUP >= 128:
        p0 = tl.dot(w0, x0.T)
        p0 = tl.dot(w1, x1.T, p0)
        p0 = tl.dot(w2, x2.T, p0)
        p0 = tl.dot(w3, x3.T, p0)
        p1, p2, p3 = p0, p0, p0
    elif GROUP == 64:
        p0 = tl.dot(w0, x0.T)
        p0 = tl.dot(w1, x1.T, p0)
        p2 = tl.dot(w2, x2.T)
        p2 = tl.dot(w3, x3.T, p2)
        p1, p3 = p0, p2
    else:
        p0 = tl.dot(w0, x0.T)
        p1 = tl.dot(w1, x1.T)
        p2 = tl.dot(w2, x2.T)
        p3 = tl.dot(w3, x3.T)
    return p0, p1, p2, p3


@triton.jit
def _add_scaled(acc, sums, s0, s1, s2, s3, GROUP: tl.constexpr):
    p0, p1, p2, p3 = sums
    acc += p0 * s0[:, None]
    if GROUP <= 32:
        acc += p1 * s1[:, None]
    if GROUP <= 64:
        acc += p2 * s2[:, None]
    if GROUP <= 32:
        acc += p3 * s3[:, None]
    return acc


@triton.jit
def _add_block(acc, words, groups, x_sums, x0, x1, x2, x3, SUMS: tl.constexpr, GROUP: tl.constexpr,
               BFLOAT16: tl.constexpr, SUBTRACT: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    # acc[ROWS, TOKENS] plus a block's product.
    s0, s1, s2, s3, z0, z1, z2, z3 = groups
    sums = _dots(words, groups, x0, x1, x2, x3, GROUP, BFLOAT16, SUBTRACT, NATIVE)
    acc = _add_scaled(acc, sums, s0, s1, s2, s3, GROUP)
    if SUMS:
        acc = _add_scaled(acc, x_sums, s0 * z0, s1 * z1, s2 * z2, s3 * z3, GROUP)
    return acc


@triton.jit
def _x_quarter(x, norm_weight, t, inside, column, square, K: tl.constexpr):
    # x[TOKENS, 32] from `column` on, with the norm's weight and sums of squares where there is a norm.
    k = column + tl.arange(0, 32)
    if norm_weight is None:
        quarter = tl.load(x + t[:, None] * K + k[None, :], mask=inside, other=0.0)
    else:
        wide = tl.load(x + t[:, None] * K + k[None, :], mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(norm_weight + k).to(tl.float32)
        quarter = (wide * weight[None, :]).to(x.dtype.element_ty)
        square += wide * wide
    return quarter, square


@triton.jit(do_not_specialize=["tokens"])
def _linear4(
    x,
    weight,
    scale,
    zero,
    norm_weight,
    bias,
    residual,
    out,
    partial,
    counters,
    tokens,
    rows,
    eps,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    GATED: tl.constexpr,
    BFLOAT16: tl.constexpr,
    PREFETCH: tl.constexpr,
    EARLY: tl.constexpr,
    STAGES: tl.constexpr,
    THREADS: tl.constexpr,
    SUBTRACT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    # As triton_linear._linear with the weights as left operand; see there.
    BLOCK: tl.constexpr = 128
    SUMS: tl.constexpr = zero is not None and not SUBTRACT
    token_blocks = tl.cdiv(tokens, TOKENS)
    row = tl.program_id(0) // token_blocks * ROWS
    token = tl.program_id(0) % token_blocks * TOKENS
    split = tl.program_id(1)
    SHARE: tl.constexpr = K // SPLIT
    first = split * SHARE
    if PREFETCH > 0:
        ROW_BYTES: tl.constexpr = PREFETCH // ROWS if PREFETCH // ROWS < SHARE // 2 else SHARE // 2
        _prefetch_rows(weight, row, first // 4, K // 4, ROWS, ROW_BYTES, THREADS)
        if GATED:
            _prefetch_rows(weight, rows + row, first // 4, K // 4, ROWS, ROW_BYTES, THREADS)
    t = token + tl.arange(0, TOKENS)
    n = row + tl.arange(0, ROWS)
    everywhere = n >= 0
    columns = 2 * rows if GATED else rows
    inside = (t < tokens)[:, None]
    # A block ahead: these loads are not part of the loop's pipeline.
    groups = _load_groups(scale, zero, first, n, everywhere, columns, GROUP, BFLOAT16, SUBTRACT)
    up_groups = groups
    if GATED:
        up_groups = _load_groups(scale, zero, first, rows + n, everywhere, columns, GROUP, BFLOAT16, SUBTRACT)
    if NATIVE:
        if EARLY:
            gdc_launch_dependents()
        gdc_wait()
    word_cells = weight + n[:, None] * (K // 4) + tl.arange(0, BLOCK // 4)[None, :]
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    up = tl.zeros([ROWS, TOKENS], tl.float32)
    square = tl.zeros([TOKENS, 32], tl.float32)
    ones = tl.full([ROWS, BLOCK // 4], 1.0, x.dtype.element_ty)
    for i in tl.range(0, SHARE // BLOCK, num_stages=STAGES):
        column = first + i * BLOCK
        x0, square = _x_quarter(x, norm_weight, t, inside, column, square, K)
        x1, square = _x_quarter(x, norm_weight, t, inside, column + 32, square, K)
        x2, square = _x_quarter(x, norm_weight, t, inside, column + 64, square, K)
        x3, square = _x_quarter(x, norm_weight, t, inside, column + 96, square, K)
        ahead = tl.minimum(column + BLOCK, first + SHARE - BLOCK)
        words = tl.load(word_cells + column // 4)
        next_groups = groups
        if GROUP < K:
            next_groups = _load_groups(scale, zero, ahead, n, everywhere, columns, GROUP, BFLOAT16, SUBTRACT)
        # Sums of x, for zero points: the tensor cores have time, and each row of acc gets its copy.
        x_sums = acc
        if SUMS:
            x_sums = _dots_of(ones, ones, ones, ones, x0, x1, x2, x3, GROUP)
        acc = _add_block(acc, words, groups, x_sums, x0, x1, x2, x3, SUMS, GROUP, BFLOAT16, SUBTRACT, NATIVE)
        groups = next_groups
        if GATED:
            words = tl.load(word_cells + rows * (K // 4) + column // 4)
            next_groups = up_groups
            if GROUP < K:
                next_groups = _load_groups(
                    scale, zero, ahead, rows + n, everywhere, columns, GROUP, BFLOAT16, SUBTRACT
                )
            up = _add_block(
                up, words, up_groups, x_sums, x0, x1, x2, x3, SUMS, GROUP, BFLOAT16, SUBTRACT, NATIVE
            )
            up_groups = next_groups
    if NATIVE and not EARLY:
        gdc_launch_dependents()
    acc = acc.T
    up = up.T
    cells = t[:, None].to(tl.int64) * rows + n[None, :]
    last = True
    if SPLIT > 1:
        # The program that arrives last adds the parts in index order: the sum never depends on timing.
        plane = tokens.to(tl.int64) * rows
        tl.store(partial + split * plane + cells, acc, mask=inside)
        tl.debug_barrier()
        last = tl.atomic_add(counters + tl.program_id(0), 1, sem="acq_rel") == SPLIT - 1
        if last:
            tl.store(counters + tl.program_id(0), 0)
            acc = tl.zeros([TOKENS, ROWS], tl.float32)
            for part in tl.static_range(SPLIT):
                acc += tl.load(partial + part * plane + cells, mask=inside, other=0.0, cache_modifier=".cg")
    if last:
        if norm_weight is not None:
            factor = tl.rsqrt(tl.sum(square, axis=1) / K + eps)[:, None]
            acc = acc * factor
            up = up * factor
        if GATED:
            acc = acc * tl.sigmoid(acc) * up
        if residual is not None:
            acc += tl.load(residual + cells, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            acc += tl.load(bias + n).to(tl.float32)[None, :]
        tl.store(out + cells, acc.to(out.dtype.element_ty), mask=inside)


def linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    tiling: Tiling,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    out: Tensor | None = None,
    native: bool = True,
) -> Tensor:
    """x[T, K] times a weight [N, K] of 4 bits transposed, with what is given applied -> [T, N], in `out` when
    given.

    weight int16 [N, K / 4], scale [groups, N] in any floating type and zero uint8 [groups, N] as ops.int4 has
    them; K a multiple of 128. The rest is as in triton_linear.linear: no norm_weight or gated with split > 1.
    tiling.fits says which weights it can take; its inner should be 128, its swap and fuse_norm mean nothing.
    native: with instructions of the GPU, which Triton's interpreter does not know.
    """
    tokens, inner = x.shape
    rows = weight.shape[0] // 2 if gated else weight.shape[0]
    if out is None:
        out = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    space = workspace(x.device) if tiling.split > 1 else None
    _linear4[(rows // tiling.rows * triton.cdiv(tokens, tiling.tokens), tiling.split)](
        x,
        weight,
        scale,
        zero,
        norm_weight,
        bias,
        residual,
        out,
        space.partial if space else None,
        space.counters if space else None,
        tokens,
        rows,
        eps,
        K=inner,
        GROUP=inner // scale.shape[0],
        TOKENS=tiling.tokens,
        ROWS=tiling.rows,
        SPLIT=tiling.split,
        GATED=gated,
        BFLOAT16=x.dtype == torch.bfloat16,
        PREFETCH=tiling.prefetch if native else 0,
        EARLY=tiling.early,
        STAGES=tiling.stages,
        THREADS=32 * tiling.warps,
        SUBTRACT=zero is not None and tiling.tokens >= SUBTRACT_FROM,
        NATIVE=native,
        num_warps=tiling.warps,
        launch_pdl=native,
    )
    return out


@triton.jit
def _store_quarter(cells, words, scale, shift, mask, NIBBLE: tl.constexpr,
                   BFLOAT16: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    number = _number(words, shift, NIBBLE, BFLOAT16, False, NATIVE).to(tl.float32)
    number = (number + shift[:, None]) * scale[:, None]
    tl.store(cells, number.to(cells.dtype.element_ty), mask=mask)


@triton.jit
def _dequantise(
    weight, scale, zero, out, rows, K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    BFLOAT16: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    # A program takes a block of 128 columns of some rows.
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * 128
    inside = n < rows
    k = tl.arange(0, 32)
    place = n[:, None].to(tl.int64) * K + column
    words = tl.load(weight + place // 4 + k[None, :], mask=inside[:, None], other=0)
    s0, s1, s2, s3, z0, z1, z2, z3 = _load_groups(
        scale, zero, column, n, inside, rows, GROUP, BFLOAT16, False
    )
    if zero is None:
        z0, z1, z2, z3 = 0.0 * s0, 0.0 * s1, 0.0 * s2, 0.0 * s3
    mask = inside[:, None]
    cells = out + place + k[None, :]
    _store_quarter(cells, words, s0, z0, mask, 0, BFLOAT16, NATIVE)
    _store_quarter(cells + 32, words, s1, z1, mask, 1, BFLOAT16, NATIVE)
    _store_quarter(cells + 64, words, s2, z2, mask, 2, BFLOAT16, NATIVE)
    _store_quarter(cells + 96, words, s3, z3, mask, 3, BFLOAT16, NATIVE)


def dequantise(
    weight: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype, native: bool = True
) -> Tensor:
    """ops.int4.dequantise, rounded to bfloat16 or float16: [N, K]. K a multiple of 128."""
    rows, inner = weight.shape[0], weight.shape[1] * 4
    out = torch.empty(rows, inner, dtype=dtype, device=weight.device)
    tile = 64
    _dequantise[(triton.cdiv(rows, tile), inner // BLOCK)](
        weight,
        scale,
        zero,
        out,
        rows,
        K=inner,
        GROUP=inner // scale.shape[0],
        ROWS=tile,
        BFLOAT16=dtype == torch.bfloat16,
        NATIVE=native,
        num_warps=4,
    )
    return out
