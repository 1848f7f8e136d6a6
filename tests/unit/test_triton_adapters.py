# SPDX-License-Identifier: Apache-2.0
"""The kernels of adapters in Triton's interpreter, without a GPU; tests/gpu/test_adapters.py runs the real
ones."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from flashinfer_backend.ops import torch_ops
from flashinfer_backend.ops.weight import LowRank

# Tokens, columns of x, rows of the product's modules, places, rank.
SHAPES = [
    (1, 64, (96,), 1, 16),
    (5, 200, (128, 32, 32), 3, 16),
    (37, 160, (200, 200), 4, 32),
    (20, 1100, (40,), 20, 16),
]


def check(
    count: int, columns: int, rows: tuple[int, ...], places: int, rank: int, where: str, dtype: torch.dtype
) -> None:
    from flashinfer_backend.ops import triton_adapters

    generator = torch.Generator().manual_seed(count)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(where, dtype) * 0.25

    ends = tuple(torch.tensor(rows).cumsum(0).tolist())
    adapters = LowRank(values(places, len(rows), rank, columns), values(places, ends[-1], rank), ends)
    chosen = torch.randint(-1, places, (count,), generator=generator).int()
    chosen[0] = places - 1
    x, product = values(count, columns), values(count, ends[-1])
    wanted = torch_ops.add_adapters(product.clone(), x, adapters, chosen.to(where))
    found = triton_adapters.add_adapters(product.clone(), x, adapters, chosen.to(where))
    none = (chosen < 0).to(where)
    assert torch.equal(found[none], product[none]), "tokens without an adapter"
    # A sum rounded to 16 bits may fall to either neighbour.
    limits = {torch.float32: (1e-4, 0.0), torch.bfloat16: (0.1, 1 / 128)}
    absolute, relative = limits[dtype]
    error = (found.float() - wanted.float()).abs()
    assert (error <= absolute + relative * wanted.float().abs()).all(), error.max()
    assert (wanted - product).abs().max() > 1, "the adapters add too little"


def test_kernels_in_the_interpreter() -> None:
    """In a process of its own: what is interpreted is decided when Triton is imported."""
    pytest.importorskip("triton")
    code = "import torch\nfrom test_triton_adapters import SHAPES, check\n"
    code += "for shape in SHAPES:\n    check(*shape, 'cpu', torch.float32)"
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.path.dirname(__file__)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
