# SPDX-License-Identifier: Apache-2.0
"""The gate and up products with their activation in one Hopper kernel, for more tokens than Triton's take; of
16 bits, or of e4m3 with a scale for each token and each row of the weight.

cuda/gated_linear_kernel.cuh has the kernel; FlashInfer's build tools compile it once per machine. Without a
compiler, or on another GPU, `takes` says no and the caller uses cuBLAS. For how many tokens it is the faster
one, and how long its tiles take, was measured (core/tuned).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from flashinfer_backend.core.tuned import GatedLinear
from flashinfer_backend.ops import cuda_module, device
from flashinfer_backend.ops.fp8 import E4M3

_ELEMENTS = {torch.bfloat16: "nv_bfloat16", torch.float16: "nv_half", E4M3: "__nv_fp8_e4m3"}
TILES = tuple(range(64, 257, 16))  # tokens of a tile that the kernel can have


def spec(dtype: torch.dtype) -> Any:
    """FlashInfer's description of how the module for `dtype` is built; its name changes with the source."""
    element = _ELEMENTS[dtype]
    return cuda_module.spec("gated_linear", element.strip("_"), [f"GATED_LINEAR_TYPE={element}"])


@device.cached
def pays(tokens: int, fp8: bool = False) -> bool:
    """Whether the kernel is the fastest way for this number of tokens. fp8: with a weight in e4m3."""
    numbers = _numbers(fp8)
    return numbers is not None and numbers.fewest_tokens is not None and tokens >= numbers.fewest_tokens


def _numbers(fp8: bool) -> GatedLinear | None:
    return device.active().fp8_gated_linear if fp8 else device.active().gated_linear


def takes(weight: Tensor) -> bool:
    """Whether gated_linear, or of e4m3 gated_linear_scaled, can multiply by weight[2 I, K]: a Hopper GPU, I a
    multiple of 64, rows of K of 128 bytes."""
    rows, inner = weight.shape
    if weight.dtype not in _ELEMENTS or rows % 128 or inner * weight.itemsize % 128:
        return False
    return module(weight.dtype, weight.device) is not None


def gated_linear(x: Tensor, weight: Tensor) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T): x[T, K], weight[2 I, K] (gate's rows, then up's) -> [T, I].

    Contiguous, of one dtype; `takes(weight)` must be true. Products are summed in float32.
    """
    out = torch.empty(x.shape[0], weight.shape[0] // 2, dtype=x.dtype, device=x.device)
    sms = device.sms()
    tile = tile_tokens(x.shape[0], weight.shape[0], sms)
    module(x.dtype, x.device).gated_linear(out, x, weight, tile, sms)
    return out


def gated_linear_scaled(x: Tensor, weight: Tensor, x_scales: Tensor, scales: Tensor) -> Tensor:
    """The same of x[T, K] * x_scales[T, 1] and weight[2 I, K] * scales[2 I, 1] -> bfloat16 [T, I].

    x and weight in e4m3, contiguous; x_scales[T, 1] and scales[2 I] of float32; `takes(weight)` must be true.
    """
    out = torch.empty(x.shape[0], weight.shape[0] // 2, dtype=torch.bfloat16, device=x.device)
    sms = device.sms()
    tile = tile_tokens(x.shape[0], weight.shape[0], sms, fp8=True)
    module(x.dtype, x.device).gated_linear_scaled(out, x, weight, x_scales, scales, tile, sms)
    return out


@device.cached
def tile_tokens(tokens: int, rows: int, sms: int, fp8: bool = False) -> int:
    """Tokens of the fastest tile for weight[rows, K] on this number of SMs."""

    numbers = _numbers(fp8) or device.active().gated_linear

    def microseconds(tile: int) -> float:
        tiles = -(-tokens // tile) * (rows // 128)
        return -(-tiles // sms) * numbers.wave_us[tile]

    many = tokens > numbers.many_tokens
    allowed = [tile for tile in numbers.wave_us if not many or tile >= numbers.tile_of_many]
    return min(allowed, key=microseconds)


@functools.cache
def module(dtype: torch.dtype, place: torch.device) -> Any:
    """The compiled module, or None where there is none."""
    return cuda_module.load(
        lambda: spec(dtype).build_and_load(), place, "the gate and up products use cuBLAS"
    )
