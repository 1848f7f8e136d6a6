# SPDX-License-Identifier: Apache-2.0
"""Products with weights in FP8 on Hopper: x in bfloat16 is quantised as the weight's format says, then
multiplied by cuBLAS or, with blocks, by a Triton kernel.

cuBLAS multiplies elements without scales, and those are applied with what follows the product anyway: bias,
residual, activation. torch._scaled_mm applies scales of tokens and rows by itself, too, but for few tokens it
was no faster than bfloat16 (measured: docs/formats.md).

No call waits for the device or depends on values there, so all of it can be captured.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from flashinfer_backend.ops import triton_fp8
from flashinfer_backend.ops.weight import Fp8Block, Fp8Static, Weight

# The tensor cores add up without float32's last bits, as in vLLM and TensorRT-LLM.
FAST_ACCUMULATION = True


def product(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """x @ weight.T, with what is given: bias[N] and residual[T, N] added; gated: silu of the first half of
    the columns times the second, [T, N / 2]. x[T, K] bfloat16, contiguous, T > 0. See the format's product.
    """
    format = weight.format
    if isinstance(format, Fp8Block):
        result = triton_fp8.block_product(*triton_fp8.quantise_groups(x), weight.data, weight.scale)
        plain = bias is None and residual is None and not gated
        return result if plain else triton_fp8.finish(result, None, None, bias, residual, gated)
    rows, static = slice(None), None
    if isinstance(format, Fp8Static):
        (rows, static), *others = format.parts(weight)
        if others:  # x is quantised for each
            results = [_scaled(x, weight, *part) for part in format.parts(weight)]
            return triton_fp8.finish(torch.cat(results, dim=-1), None, None, bias, residual, gated)
    return _scaled(x, weight, rows, static, bias, residual, gated)


def _scaled(
    x: Tensor,
    weight: Weight,
    rows: slice,
    static: float | None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    elements, scales = triton_fp8.quantise_rows(x, static)
    result = unscaled(elements, weight.data[rows])
    return triton_fp8.finish(result, scales, weight.scale[rows], bias, residual, gated)


def unscaled(elements: Tensor, weight: Tensor) -> Tensor:
    """elements[T, K] @ weight[N, K].T of e4m3 -> bfloat16 [T, N], whose range holds any such sum."""
    one = _one(elements.device)
    return torch._scaled_mm(
        elements,
        weight.t(),
        scale_a=one,
        scale_b=one,
        out_dtype=torch.bfloat16,
        use_fast_accum=FAST_ACCUMULATION,
    )


@functools.cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=device)
