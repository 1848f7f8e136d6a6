# SPDX-License-Identifier: Apache-2.0
"""Products with weights in FP8 on Hopper: x in bfloat16 is quantised as the weight's format says, then
multiplied by Triton kernels, cuBLAS or, gate and up for many tokens, a CUDA kernel (gated_linear.py).

Few tokens take triton_linear where tilings.py has an entry: scales and what follows the product are part of
it, and what comes before, norm and quantising, if the tiling says so. Else, with a scale for each row of the
weight, cuBLAS multiplies elements without scales, and those are applied with what follows the product anyway:
residual, activation. Its own scales of tokens and rows were no faster than bfloat16 for few tokens, and save
a pass over the result for many where nothing follows (measured: docs/formats.md). Weights with blocks have a
Triton kernel of their own and, for up to 32 tokens, a CUDA kernel (blocks_linear.py), where the device's file
has tiles for it; from as many tokens on as that says, cuBLAS applies scales of groups and blocks. Between the
two products of an MLP with such weights, the activation is quantised as it is computed.

No call waits for the device or depends on values there, so all of it can be captured.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from flashinfer_backend.core.tuned import RowTile
from flashinfer_backend.ops import blocks_linear, device, fp8, gated_linear, triton_fp8
from flashinfer_backend.ops.tilings import choose, choose_blocks, choose_rows
from flashinfer_backend.ops.triton_fp8 import Norm, Quantised
from flashinfer_backend.ops.triton_linear import linear
from flashinfer_backend.ops.weight import Fp8Block, Fp8Static, Weight

# The tensor cores add up without float32's last bits, as in vLLM and TensorRT-LLM.
FAST_ACCUMULATION = True


def product(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    norm: Norm | None = None,
    quantised: Quantised | None = None,
) -> Tensor:
    """x @ weight.T, with what is given: x normed first; bias[N] and residual[T, N] added; gated: silu of the
    first half of the columns times the second, [T, N / 2]. x[T, K] bfloat16, contiguous, T > 0. quantised: x
    without a norm, for a weight of blocks. See the format's product.
    """
    assert quantised is None or norm is None
    format = weight.format
    by_blocks = isinstance(format, Fp8Block)
    parts = format.parts(weight) if isinstance(format, Fp8Static) else [(slice(None), None)]
    if len(parts) > 1:  # x is quantised for each
        if norm:
            import flashinfer

            x = flashinfer.rmsnorm(x, *norm, enable_pdl=True)
        results = [_scaled(x, weight, *part) for part in parts]
        return triton_fp8.finish(torch.cat(results, dim=-1), None, None, bias, residual, gated)
    if by_blocks and (tile := _row_tile(weight, len(x))) is not None:
        elements, scales = quantised or triton_fp8.quantise_groups(x, norm)
        return blocks_linear.blocks_linear(
            elements, scales, weight.data, weight.scale, len(x), tile, bias, residual, gated
        )
    tiling = choose(weight.role, len(x), weight.data, by_blocks)
    if tiling is not None and tiling.quantise and parts[0][1] is None:
        return linear(
            x, weight.data, tiling, norm.weight if norm else None, norm.eps if norm else 0.0, bias=bias,
            residual=residual, gated=gated, scales=(None, weight.scale),
        )  # fmt: skip
    if by_blocks:
        elements, scales = quantised or triton_fp8.quantise_groups(x, norm)
        if tiling is None:
            return _finished(_by_blocks(elements, scales, weight, len(x)), bias, residual, gated)
        elements = elements[: len(x)]
    else:
        elements, scales = triton_fp8.quantise_rows(x, parts[0][1], norm)
    alone = bias is None and residual is None and not by_blocks
    if gated and alone and gated_linear.pays(len(x), fp8=True) and gated_linear.takes(weight.data):
        return gated_linear.gated_linear_scaled(elements, weight.data, scales, weight.scale)
    if tiling is None and residual is None and not gated and len(x) >= _scaled_by_cublas():
        return torch._scaled_mm(
            elements,
            weight.data.t(),
            scale_a=scales,
            scale_b=weight.scale.unsqueeze(0),
            bias=bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=FAST_ACCUMULATION,
        )
    if tiling is None:
        result = unscaled(elements, weight.data)
        return triton_fp8.finish(result, scales, weight.scale, bias, residual, gated)
    return linear(
        elements,
        weight.data,
        tiling,
        bias=bias,
        residual=residual,
        gated=gated,
        scales=(scales, weight.scale),
    )


def mlp(
    x: Tensor, gate_up: Weight, down: Weight, norm: Norm, bias: Tensor | None, residual: Tensor | None
) -> Tensor | None:
    """The product with `down`, a bias and a residual of silu(gate) * up of the normed x, whose elements and
    scales are all that is stored of it: the same numbers as by two products. None where other kernels take
    these."""
    both = isinstance(gate_up.format, Fp8Block) and isinstance(down.format, Fp8Block)
    if not both or any(
        _row_tile(each, len(x)) or choose(each.role, len(x), each.data, True) for each in (gate_up, down)
    ):
        return None
    product = _by_blocks(*triton_fp8.quantise_groups(x, norm), gate_up, len(x))
    product = _by_blocks(*triton_fp8.finish_quantised(product), down, len(x))
    return _finished(product, bias, residual)


def _row_tile(weight: Weight, tokens: int) -> RowTile | None:
    tile = choose_rows(weight.role, tokens, *weight.data.shape)
    return tile if tile is not None and blocks_linear.takes(weight.data) else None


def _finished(result: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool = False) -> Tensor:
    """A result of _by_blocks with what is given."""
    plain = bias is None and residual is None and not gated and result.dim() == 2
    return result if plain else triton_fp8.finish(result, None, None, bias, residual, gated)


def _by_blocks(elements: Tensor, scales: Tensor, weight: Weight, tokens: int) -> Tensor:
    """As blocks_by_cublas, of the first `tokens` rows: bfloat16 [T, N], or float32 parts of it [P, T, N]."""
    tile = choose_blocks(weight.role, tokens, len(weight.data))
    if tile is None:
        return blocks_by_cublas(elements, scales, weight)[:tokens]
    return triton_fp8.block_product(elements, scales, weight.data, weight.scale, tile, tokens)


def blocks_by_cublas(elements: Tensor, scales: Tensor, weight: Weight) -> Tensor:
    """elements[R, K] e4m3 with scales [R, K / 128], as triton_fp8.quantise_groups makes them, times a weight
    of blocks transposed -> bfloat16 [R, N]. On Hopper, with CUDA 12.9 or later.

    cuBLAS has sums of its own for each group of 128, so it knows no fast ones here. Its layouts:
    https://docs.nvidia.com/cuda/cublas/#scaling-factors-layouts
    """
    return F.scaled_mm(
        elements, weight.data.t(), scales, F.ScalingType.BlockWise1x128,
        fp8.cublas_block_scales(weight.scale), F.ScalingType.BlockWise128x128, output_dtype=torch.bfloat16,
    )  # fmt: skip


def _scaled(x: Tensor, weight: Weight, rows: slice, static: float | None) -> Tensor:
    elements, scales = triton_fp8.quantise_rows(x, static)
    return triton_fp8.finish(unscaled(elements, weight.data[rows]), scales, weight.scale[rows])


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


@device.cached
def _scaled_by_cublas() -> float:
    tokens = device.active().fp8_scaled_by_cublas
    return math.inf if tokens is None else tokens


@functools.cache
def _one(where: torch.device) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=where)
