# SPDX-License-Identifier: Apache-2.0
"""The gate and up products with their activation in one Hopper kernel, for more tokens than Triton's take.

cuda/gated_linear_kernel.cuh has the kernel; FlashInfer's build tools compile it once per machine. Without a
compiler, or on another GPU, `takes` says no and the caller uses cuBLAS.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_CUDA = Path(__file__).parent / "cuda"
_SOURCE, _KERNEL = _CUDA / "gated_linear.cu", _CUDA / "gated_linear_kernel.cuh"
_ELEMENTS = {torch.bfloat16: "nv_bfloat16", torch.float16: "nv_half"}

FEWEST_TOKENS = 65  # below, Triton's product makes the faster decode step
# Tokens of a tile -> time of a wave of such tiles, one on each SM: microseconds for K = 4096 on an H200
# (docs/performance.md). Only their ratios count.
_WAVE_US = {
    64: 18.0,
    80: 20.0,
    96: 20.6,
    112: 22.8,
    128: 24.0,
    144: 28.0,
    160: 30.0,
    176: 32.5,
    192: 37.0,
    208: 39.0,
    224: 42.0,
    240: 45.0,
    256: 47.0,
}
# Of many tokens, small tiles move the same weights too often: their power comes off the clock.
_MANY_TOKENS, _TILE_OF_MANY = 2048, 192


def spec(dtype: torch.dtype) -> Any:
    """FlashInfer's description of how the module for `dtype` is built; its name changes with the source."""
    from flashinfer.jit import gen_jit_spec

    digest = hashlib.sha256(_SOURCE.read_bytes() + _KERNEL.read_bytes()).hexdigest()[:8]
    element = _ELEMENTS[dtype]
    return gen_jit_spec(
        f"flashinfer_backend_gated_linear_{element}_{digest}",
        [_SOURCE],
        extra_cuda_cflags=["-gencode=arch=compute_90a,code=sm_90a", f"-DGATED_LINEAR_TYPE={element}"],
    )


def takes(weight: Tensor) -> bool:
    """Whether gated_linear can multiply by weight[2 I, K]: a Hopper GPU, I and K multiples of 64, 16 bits."""
    rows, inner = weight.shape
    if rows % 128 or inner % 64 or weight.dtype not in _ELEMENTS:
        return False
    return _module(weight.dtype, weight.device) is not None


def gated_linear(x: Tensor, weight: Tensor) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T): x[T, K], weight[2 I, K] (gate's rows, then up's) -> [T, I].

    Contiguous, of one dtype; `takes(weight)` must be true. Products are summed in float32.
    """
    out = torch.empty(x.shape[0], weight.shape[0] // 2, dtype=x.dtype, device=x.device)
    sms = _sms(x.device)
    tile = tile_tokens(x.shape[0], weight.shape[0], sms)
    _module(x.dtype, x.device).gated_linear(out, x, weight, tile, sms)
    return out


@functools.lru_cache(maxsize=4096)
def tile_tokens(tokens: int, rows: int, sms: int) -> int:
    """Tokens of a tile that takes the least time for weight[rows, K] on so many SMs."""

    def microseconds(tile: int) -> float:
        tiles = -(-tokens // tile) * (rows // 128)
        return -(-tiles // sms) * _WAVE_US[tile]

    allowed = [tile for tile in _WAVE_US if tokens <= _MANY_TOKENS or tile >= _TILE_OF_MANY]
    return min(allowed, key=microseconds)


@functools.cache
def _sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _module(dtype: torch.dtype, device: torch.device) -> Any:
    """The compiled module, or None where there is none."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    try:
        return spec(dtype).build_and_load()
    except Exception as error:  # FlashInfer's builder raises what its tools raise
        reason = str(error).strip().splitlines()
        logger.warning(
            "the gate and up products use cuBLAS: their own kernel could not be built (%s: %s); it needs "
            "nvcc and ninja, as FlashInfer's kernels do",
            type(error).__name__,
            reason[-1] if reason else "no message",
        )
        return None
