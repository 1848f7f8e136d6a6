# SPDX-License-Identifier: Apache-2.0
"""Which tiling each product takes for how many tokens; None is cuBLAS. From measurement on an H200.

docs/performance.md has the times. Chosen inside a whole decode step of Llama-3.1-8B's shape, where what
counts is also how a product overlaps its neighbours; perf_configs/kernels/bench_step.py shows the result.
"""

from __future__ import annotations

from torch import Tensor

from flashinfer_backend.ops.triton_linear import Tiling
from flashinfer_backend.ops.weight import Role

# Largest number of tokens -> tiling of each product.
_TABLE: list[tuple[int, dict[Role, Tiling]]] = [
    (
        8,
        {
            "qkv": Tiling(16, 64, 256, stages=3),
            "o": Tiling(16, 64, 256, split=2, stages=4, prefetch=131072),
            "down": Tiling(16, 64, 256, split=2, stages=3),
            "gate_up": Tiling(16, 64, 256, stages=3),
            "head": Tiling(16, 128, 128, stages=4, warps=8),
        },
    ),
    (
        16,
        {
            "qkv": Tiling(16, 64, 256, stages=4),
            "o": Tiling(16, 64, 256, split=2, stages=4),
            "down": Tiling(16, 64, 256, split=2, stages=3),
            "gate_up": Tiling(16, 64, 256, stages=3),
            "head": Tiling(16, 128, 128, stages=4, warps=8),
        },
    ),
    (
        32,
        {
            "qkv": Tiling(32, 64, 256, stages=4),
            "o": Tiling(32, 64, 128, split=2, stages=6),
            "down": Tiling(32, 64, 256, split=2, stages=3),
            "gate_up": Tiling(32, 128, 128, stages=3, warps=8),
            "head": Tiling(32, 64, 128, stages=4, fuse_norm=False),
        },
    ),
    (
        64,
        {
            "qkv": Tiling(64, 64, 128, stages=6, prefetch=0, fuse_norm=False),
            "o": Tiling(64, 32, 128, stages=6, swap=False),
            "down": Tiling(64, 64, 128, split=2, stages=5),
            "gate_up": Tiling(64, 128, 64, stages=4, warps=8, prefetch=65536, fuse_norm=False),
            "head": Tiling(64, 128, 128, stages=4, warps=8, fuse_norm=False),
        },
    ),
    # Beyond, cuBLAS is ahead but for the activation's own pass; on Hopper gated_linear.py has that product.
    (256, {"gate_up": Tiling(128, 128, 64, stages=4, warps=8, swap=False, fuse_norm=False)}),
]


def choose(role: Role, tokens: int, weight: Tensor) -> Tiling | None:
    """The tiling for weight[N, K], or None where cuBLAS is faster or the shape does not fit."""
    for limit, tilings in _TABLE:
        if tokens <= limit:
            tiling = tilings.get(role)
            return tiling if tiling and tiling.fits(weight, gated=role == "gate_up") else None
    return None
