# SPDX-License-Identifier: Apache-2.0
"""Products of few tokens with weights in e4m3 of 128x128 blocks in one Hopper kernel, which reads the weights
nearly as fast as memory gives them.

cuda/blocks_linear_kernel.cuh has the kernel; FlashInfer's build tools compile it once per machine. Without a
compiler, or on another GPU, `takes` says no and the caller uses Triton's kernels. For which weights and how
many tokens it is the faster one, the device's file says (core/tuned).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from flashinfer_backend.core.tuned import MOST_ROW_TOKENS, RowTile
from flashinfer_backend.ops import cuda_module

TOKENS = (8, 16, MOST_ROW_TOKENS)  # that the kernel can have


def spec() -> Any:
    """FlashInfer's description of how the module is built; its name changes with the source."""
    return cuda_module.spec("blocks_linear", "e4m3", [])


def takes(weight: Tensor) -> bool:
    """Whether the kernel runs where the weight is: on a Hopper GPU, if it could be built."""
    return module(weight.device) is not None


def blocks_linear(
    elements: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    tokens: int,
    tile: RowTile,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """The first `tokens` rows, T, of x[R, K] e4m3 with scales [R, K / 128], as triton_fp8.quantise_groups
    makes them, times weight[N, K] e4m3 with scales [N / 128, K / 128] transposed -> bfloat16 [T, N]; gated:
    silu of the first half of the columns times the second, [T, N / 2]. bias and residual, of the result's
    columns and shape, are added. T is at most 32; `tile.fits(weight.shape)` and `takes(weight)` must be true.
    """
    rows = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty(tokens, rows, dtype=torch.bfloat16, device=elements.device)
    size = next(size for size in TOKENS if tokens <= size)
    module(elements.device).blocks_linear(
        out, elements, x_scales.t(), weight, scales, bias, residual, gated, size, tile.groups, tile.split
    )
    return out


@functools.cache
def module(place: torch.device) -> Any:
    """The compiled module, or None where there is none."""
    return cuda_module.load(
        lambda: spec().build_and_load(), place, "products of FP8 blocks use Triton's kernels"
    )
