# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel of 4-bit weights in Triton's interpreter, without a GPU: which element goes where.

In float16: the interpreter rounds bfloat16 otherwise. The instructions that make numbers of 4 bits on a GPU
have a plain counterpart there; tests/gpu/test_int4.py runs the real ones.
"""

from __future__ import annotations

import torch
from interpreted import interpreted

from flashinfer_backend.ops import int4

ROWS, INNER = 100, 512
CASES = [(group, symmetric) for group in (32, 64, 128, INNER) for symmetric in (False, True)]


def run_case(group: int, symmetric: bool) -> None:
    from flashinfer_backend.ops import triton_int4

    torch.manual_seed(0)
    values, scale, zero = int4.quantise(torch.randn(ROWS, INNER), INNER // group, symmetric)
    packed, scale = int4.pack(values), scale.half().contiguous()
    zeros = None if symmetric else zero.contiguous()
    written = triton_int4.dequantise(packed, scale, zeros, torch.float16, native=False)
    assert torch.equal(written, int4.dequantise(packed, scale, zeros).half()), f"{group} {symmetric}"


def test_the_kernel_in_the_interpreter():
    interpreted(__file__)


if __name__ == "__main__":
    for case in CASES:
        run_case(*case)
