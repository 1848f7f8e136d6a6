# SPDX-License-Identifier: Apache-2.0
"""Attention sinks behind a kernel that does not know them: https://arxiv.org/abs/2309.17453."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["rows"])
def _apply_sinks(out, lse, sinks, indptr, rows, HEADS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr):
    # Other programs may be writing the rows that are not planned here.
    token = tl.program_id(0)
    if (token < tl.load(indptr)) | (token >= tl.load(indptr + rows)):
        return
    heads = tl.arange(0, ROWS)
    inside = heads < HEADS
    place = token.to(tl.int64) * HEADS + heads
    sink = tl.load(sinks + heads, mask=inside, other=0.0)
    # A sink is one more term of the softmax's sum, whose logarithm lse is: sum / (sum + exp(sink)).
    share = tl.sigmoid(tl.load(lse + place, mask=inside, other=0.0) * 0.6931471805599453 - sink)
    cells = place[:, None] * DIM + tl.arange(0, DIM)[None, :]
    value = tl.load(out + cells, mask=inside[:, None], other=0.0).to(tl.float32)
    tl.store(out + cells, (value * share[:, None]).to(out.dtype.element_ty), mask=inside[:, None])


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor, indptr: Tensor) -> None:
    """Scale out[T, Hq, D] in place for rows from indptr[0] up to indptr[-1] (int32, on the device), as if
    each head's sink had been a score of a value that is zero. lse float32 [T, Hq]: log2 of the sum of the
    exponents of each row's scores; sinks float32 [Hq]."""
    tokens, heads, dim = out.shape
    _apply_sinks[(tokens,)](
        out, lse, sinks, indptr, len(indptr) - 1,
        HEADS=heads, ROWS=triton.next_power_of_2(heads), DIM=dim, num_warps=4,
    )  # fmt: skip
