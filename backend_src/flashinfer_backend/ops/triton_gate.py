# SPDX-License-Identifier: Apache-2.0
"""The output gate of attention in a Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashinfer_backend.ops.triton_prefetch import wait_and_launch

NATIVE = True  # with what a GPU alone has, and Triton's interpreter does not know
_COLUMNS = 1024  # of a program


@triton.jit
def _gate(x, gate, out, columns, gate_stride, COLUMNS: tl.constexpr, NATIVE: tl.constexpr):
    wait_and_launch(NATIVE)
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = n < columns
    factor = tl.sigmoid(tl.load(gate + row * gate_stride + n, mask=inside, other=0.0).to(tl.float32))
    value = tl.load(x + row * columns + n, mask=inside, other=0.0)
    result = value.to(tl.float32) * factor.to(value.dtype).to(tl.float32)  # rounded as torch does
    tl.store(out + row * columns + n, result.to(value.dtype), mask=inside)


def gated_by(x: Tensor, gate: Tensor) -> Tensor:
    """x[T, N], contiguous, times the sigmoid of gate[T, N], whose rows can have a stride."""
    tokens, columns = x.shape
    out = torch.empty_like(x)
    _gate[(tokens, triton.cdiv(columns, _COLUMNS))](
        x, gate, out, columns, gate.stride(0), COLUMNS=_COLUMNS, NATIVE=NATIVE, num_warps=4, launch_pdl=NATIVE
    )
    return out
