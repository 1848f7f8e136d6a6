# SPDX-License-Identifier: Apache-2.0
"""How weights of 4 bits are quantised and packed; and the Triton kernel that writes them out in Triton's
interpreter, without a GPU: which element goes where.

In float16: the interpreter rounds bfloat16 otherwise. The instructions that make numbers of 4 bits on a GPU
have a plain counterpart there; tests/gpu/test_int4.py runs the real ones.
"""

import pytest
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


@pytest.mark.parametrize("columns", [4, 12, 96, 192, 256])
def test_packing_comes_back(columns):
    values = torch.randint(0, 16, (24, columns), dtype=torch.uint8, generator=torch.manual_seed(columns))
    packed_values = int4.pack(values)
    assert packed_values.shape == (24, columns // 4)
    assert torch.equal(int4.unpack(packed_values), values)
    assert torch.equal(int4.unpack(packed_values[8:16]), values[8:16])


def test_words_hold_columns_a_quarter_of_a_block_apart():
    """What the kernel counts on. Whole blocks can be cut off."""
    values = torch.arange(256).div(16, rounding_mode="floor").to(torch.uint8).expand(2, 256)
    values = (values + torch.tensor([[0], [3]])) & 15
    words = int4.pack(values.to(torch.uint8)).long() & 0xFFFF
    for block in (0, 1):
        for word in (0, 1, 31):
            parts = [int(words[1, 32 * block + word]) >> 4 * i & 15 for i in range(4)]
            assert parts == [int(values[1, 128 * block + 32 * i + word]) for i in range(4)]
    assert torch.equal(int4.unpack(int4.pack(values.to(torch.uint8))[:, 32:].contiguous()), values[:, 128:])


@pytest.mark.parametrize("symmetric", [True, False])
def test_quantising_is_within_half_a_step(symmetric):
    x = torch.randn(16, 256, generator=torch.manual_seed(0))
    x[3] = 0
    values, scale, zero = int4.quantise(x, 4, symmetric)
    found = int4.dequantise(int4.pack(values), scale, zero)
    step = scale.t().repeat_interleave(64, dim=1)
    # The largest numbers of a symmetric group are half a step beyond 7 steps.
    assert ((found - x).abs() <= step * (0.5001 if symmetric else 1.0001)).all()
    assert (found[3] == 0).all()


if __name__ == "__main__":
    for case in CASES:
        run_case(*case)
