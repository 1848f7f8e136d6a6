# SPDX-License-Identifier: Apache-2.0
"""What a Triton kernel brings to L2 before it waits for the previous one."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def prefetch_rows(
    weight, row, column, stride, ROWS: tl.constexpr, ROW_BYTES: tl.constexpr, THREADS: tl.constexpr
):
    BYTES: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
    # One bulk prefetch per thread: a row's bytes are cut in pieces until there is one for each.
    PIECES: tl.constexpr = THREADS // ROWS if THREADS > ROWS else 1
    index = tl.arange(0, ROWS * PIECES)
    address = weight + (row + index // PIECES).to(tl.int64) * stride + column
    address += (index % PIECES) * (ROW_BYTES // BYTES // PIECES)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; // $0", "=r,l,r",
        [address.to(tl.int64), tl.full([ROWS * PIECES], ROW_BYTES // PIECES, tl.int32)], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip
