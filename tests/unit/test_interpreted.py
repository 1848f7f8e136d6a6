# SPDX-License-Identifier: Apache-2.0
"""What tests in Triton's interpreter rely on: faults of kernels are seen."""

import pytest
import torch
from interpreted import interpreted


def test_faults_are_seen() -> None:
    interpreted(__file__)


if __name__ == "__main__":
    import triton
    import triton.language as tl

    @triton.jit
    def add(x, y, out, FIRST: tl.constexpr, SECOND: tl.constexpr):
        total = tl.load(x + tl.arange(0, FIRST)) + tl.load(y + tl.arange(0, SECOND))
        tl.store(out + tl.arange(0, FIRST), total)

    numbers = torch.full((4,), 1 << 30, dtype=torch.int32)
    out = torch.empty_like(numbers)
    add[(1,)](numbers, numbers - 1, out, FIRST=4, SECOND=4)
    assert out.tolist() == [(1 << 31) - 1] * 4
    with pytest.raises(Exception, match="does not fit int32"):
        add[(1,)](numbers, numbers, out, FIRST=4, SECOND=4)
    with pytest.raises(Exception, match="incompatible"):
        add[(1,)](numbers, numbers - 1, out, FIRST=4, SECOND=2)
