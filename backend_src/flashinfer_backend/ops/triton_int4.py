# SPDX-License-Identifier: Apache-2.0
"""A Triton kernel that writes weights of 4 bits out as a matrix of 16 bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashinfer_backend.ops.int4 import BLOCK, MIDDLE

_MIDDLE = tl.constexpr(MIDDLE)


@triton.constexpr_function
def _asm(bfloat16: bool, nibble: int) -> str:
    """Two words at a time: one nibble of each of $1 as 16-bit number, less MIDDLE. base: the bits of a number
    whose lowest bits of mantissa count ones, of 128 or of 1024."""
    kind, base = ("bf16", 0x4300) if bfloat16 else ("f16", 0x6400)
    shift = f"shr.b32 t, $1, {4 * nibble};" if nibble else "mov.b32 t, $1;"
    both, middle = base << 16 | base, (base + MIDDLE) << 16 | base + MIDDLE
    merge = f"lop3.b32 t, t, 0x000F000F, {both:#x}, 0xEA;"  # (a & b) | c
    return f"{{ .reg .b32 t, m; {shift} {merge} mov.b32 m, {middle:#x}; sub.{kind}x2 $0, t, m; }}"


@triton.jit
def _number(words, NIBBLE: tl.constexpr, BFLOAT16: tl.constexpr, NATIVE: tl.constexpr):
    # words int16 [ROWS, W] -> one nibble of each, less MIDDLE.
    if NATIVE:
        number = tl.inline_asm_elementwise(
            _asm(BFLOAT16, NIBBLE), "=r,r", [words], dtype=tl.bfloat16 if BFLOAT16 else tl.float16,
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        kind: tl.constexpr = tl.bfloat16 if BFLOAT16 else tl.float16
        number = ((words >> (4 * NIBBLE) & 15) - _MIDDLE).to(tl.float32).to(kind)
    return number


@triton.jit
def _load_group(scale, zero, group, n, inside, columns):
    # Of rows n: scales in float32, and MIDDLE less zero points.
    place = group.to(tl.int64) * columns + n
    factor = tl.load(scale + place, mask=inside, other=0.0).to(tl.float32)
    shift = 0.0 * factor
    if zero is not None:
        shift = _MIDDLE - tl.load(zero + place, mask=inside, other=0).to(tl.float32)
    return factor, shift


@triton.jit
def _load_groups(scale, zero, column, n, inside, columns, GROUP: tl.constexpr):
    # Those of the four quarters of a block that begins at `column`.
    s0, z0 = _load_group(scale, zero, column // GROUP, n, inside, columns)
    s1, z1, s2, z2, s3, z3 = s0, z0, s0, z0, s0, z0
    if GROUP <= 64:
        s2, z2 = _load_group(scale, zero, (column + 64) // GROUP, n, inside, columns)
        s3, z3 = s2, z2
    if GROUP <= 32:
        s1, z1 = _load_group(scale, zero, (column + 32) // GROUP, n, inside, columns)
        s3, z3 = _load_group(scale, zero, (column + 96) // GROUP, n, inside, columns)
    return s0, s1, s2, s3, z0, z1, z2, z3


@triton.jit
def _store_quarter(cells, words, scale, shift, mask, NIBBLE: tl.constexpr,
                   BFLOAT16: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    number = _number(words, NIBBLE, BFLOAT16, NATIVE).to(tl.float32)
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
    s0, s1, s2, s3, z0, z1, z2, z3 = _load_groups(scale, zero, column, n, inside, rows, GROUP)
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
        weight, scale, zero, out, rows,
        K=inner, GROUP=inner // scale.shape[0], ROWS=tile, BFLOAT16=dtype == torch.bfloat16, NATIVE=native,
        num_warps=4,
    )  # fmt: skip
    return out
