# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of 4-bit weights in Triton's interpreter, without a GPU: which element goes where.

In float16: the interpreter rounds bfloat16 otherwise. The instructions that make numbers of 4 bits on a GPU
have a plain counterpart there; tests/gpu/test_int4.py runs the real ones.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from flashinfer_backend.ops import int4
from flashinfer_backend.ops.tilings import MANY_TOKENS, untuned_int4

# group, symmetric, tokens, gated, split, norm, beside: bias, residual or neither. Tiles of 40 tokens subtract
# zero points from elements.
CASES = [
    (128, True, 5, False, 1, False, "bias"),
    (64, False, 20, True, 1, False, ""),
    (32, False, 3, False, 2, False, "residual"),
    (512, False, 16, False, 4, False, ""),
    (128, False, 7, True, 1, True, ""),
    (512, True, 3, False, 1, True, "bias"),
    (128, False, 40, False, 1, False, ""),
    (32, False, 40, True, 1, False, ""),
]
ROWS, INNER = 128, 512


def run_case(group, symmetric, tokens, gated, split, norm, beside) -> None:
    from flashinfer_backend.core.tuned import Tiling
    from flashinfer_backend.ops import triton_int4

    torch.manual_seed(0)
    values, scale, zero = int4.quantise(torch.randn(ROWS, INNER), INNER // group, symmetric)
    packed, scale = int4.pack(values), scale.half().contiguous()
    zeros = None if symmetric else zero.contiguous()
    x = torch.randn(tokens, INNER).half()
    norm_weight = torch.rand(INNER).half() + 0.5 if norm else None
    rows = ROWS // 2 if gated else ROWS
    bias = torch.randn(rows).half() if beside == "bias" else None
    residual = torch.randn(tokens, rows).half() if beside == "residual" else None
    tiling = Tiling(tokens=64 if tokens == 40 else 16, rows=64, inner=128, split=split, stages=2)
    matrix = int4.dequantise(packed, scale, zeros)
    wide = x.float()
    if norm_weight is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * norm_weight.float()
    expected = wide @ matrix.t()
    if gated:
        gate, up = expected.chunk(2, -1)
        expected = torch.nn.functional.silu(gate) * up
    for more in (bias, residual):
        if more is not None:
            expected = expected + more.float()
    found = triton_int4.linear(
        x, packed, scale, zeros, tiling, norm_weight, 1e-5, bias, residual, gated, native=False
    )
    error = (found.float() - expected).norm() / expected.norm()
    assert error < 1e-3, f"{group} {symmetric}: {error:.1e}"
    written = triton_int4.dequantise(packed, scale, zeros, torch.float16, native=False)
    assert torch.equal(written, matrix.half())


def test_kernels_in_the_interpreter():
    """In a process of its own: what is interpreted is decided when Triton is imported."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336), (1152, 896), (3584, 18944), (96, 256)])
def test_tilings_that_nobody_measured_fit(shape):
    """Or the product is left to cuBLAS: 96 rows are not whole tiles."""
    rows, inner = shape
    for tokens in (1, 16, 17, 64, MANY_TOKENS):
        tiling = untuned_int4(tokens, rows, inner, gated=False)
        assert (tiling is None) == (rows == 96)
        assert tiling is None or (tiling.fits(shape, False, tokens) and tiling.inner == int4.BLOCK)
    assert untuned_int4(MANY_TOKENS + 1, rows, inner, gated=False) is None


if __name__ == "__main__":
    for case in CASES:
        run_case(*case)
