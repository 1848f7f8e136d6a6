# SPDX-License-Identifier: Apache-2.0
"""Which interface of cuBLAS a product takes; that it computes the same is tested on a GPU."""

from __future__ import annotations

import pytest
import torch

from flashinfer_backend.ops import cublas, device
from tables import measured


@pytest.mark.parametrize(
    ("shape", "tokens", "expected"),
    [
        ((4096, 4096), 64, False),  # the Triton kernel's
        ((4096, 4096), 65, True),
        ((4096, 4096), 112, True),
        ((4096, 4096), 113, False),  # goes with 128
        ((4096, 14336), 241, True),  # goes with 256
        ((4096, 14336), 257, False),
        ((6144, 4096), 272, True),
        ((6144, 4096), 1024, False),
        ((4096, 14336), 1025, False),  # not measured
        ((4096, 11008), 96, False),
    ],
)
def test_choice_follows_the_next_measured_size(shape: tuple[int, int], tokens: int, expected: bool) -> None:
    with device.use(measured()):
        assert cublas.takes_lt(*shape, tokens) is expected
    if not torch.cuda.is_available():
        assert not cublas.takes_lt(*shape, tokens)
