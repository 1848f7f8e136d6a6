# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts on CUDA, as ops.torch_ops computes it: weights of 16 bits, FP8 or 4 bits, by Triton's
kernels and, in MXFP4 where a device's numbers say so, by CUDA kernels (mxfp4_experts.py).

In FP8 x is quantised before each of the two products, as the weights' format says; with blocks of 128x128 the
norm before the first one does that. No call waits for the device or depends on values there, so all of it can
be captured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashinfer_backend.core.tuned import ExpertTile, Scales, find
from flashinfer_backend.ops import device, mxfp4_experts, triton_experts, triton_fp8
from flashinfer_backend.ops.torch_ops import Mixture
from flashinfer_backend.ops.triton_experts import Tiles
from flashinfer_backend.ops.triton_fp8 import Quantised
from flashinfer_backend.ops.weight import Fp8Block, Fp8Token, Weight

# Beyond, cuBLAS computes the router's logits. Of fewer tokens it needs further kernels, which add up the
# parts of a divided inner dimension and the bias.
ROUTED_TOKENS = 256


def router_logits(normed: Tensor, router: Weight) -> Tensor:
    """normed[T, H] @ router[N, H].T, and its bias -> float32 [T, N]."""
    if len(normed) <= ROUTED_TOKENS:
        return triton_experts.router_logits(normed, router)
    logits = torch.mm(normed, router.data.t(), out_dtype=torch.float32)
    return logits if router.bias is None else logits.add_(router.bias)


def experts_add(
    normed: Tensor,
    logits: Tensor,
    gate_up: Weight,
    down: Weight,
    mixture: Mixture,
    residual: Tensor | None,
    quantised: Quantised | None = None,
) -> Tensor:
    """residual (None: 0) plus each token's experts of normed[T, H], which logits[T, N] choose and weight:
    residual[T, H] -> [T, H]. See ops.torch_ops.experts_add. residual is unchanged. quantised: of
    cuda_ops.norm_quantised, for a gate_up of blocks."""
    per_token, renormalise, clip, scaled_input, own, folded = mixture
    experts = folded[0] if folded else logits.shape[1]
    tile = choose(len(logits) * per_token // experts, triton_experts.scales_of(gate_up))
    tiles = triton_experts.route(logits, per_token, renormalise, tile.tokens, own, folded)
    if scaled_input:
        normed, quantised = normed * logits.amax(-1, keepdim=True).sigmoid().to(normed.dtype), None
    gated = product_of(normed, gate_up, tiles, tile, gated=True, clip=clip, quantised=quantised)
    products = product_of(gated, down, tiles, tile, gated=False)
    return triton_experts.add_up(products, residual, len(logits), None if own is None else tiles.weights)


def product_of(
    x: Tensor,
    weight: Weight,
    tiles: Tiles,
    tile: ExpertTile,
    gated: bool,
    clip: tuple[float, float] | None = None,
    quantised: Quantised | None = None,
) -> Tensor:
    """triton_experts.product of x in 16 bits, which is quantised as the weight's format says. quantised: x,
    for a weight of blocks."""
    scales: Tensor | None = None
    pairs_a_row = tiles.weights.numel() // len(x)  # before rows are added to x
    if isinstance(weight.format, Fp8Block):
        x, scales = quantised or triton_fp8.quantise_groups(x)
    elif isinstance(weight.format, Fp8Token):
        x, scales = triton_fp8.quantise_rows(x)
    if tile.teams and mxfp4_experts.takes(weight):
        return mxfp4_experts.product(x, weight, tiles, tile.teams, gated, pairs_a_row, clip)
    return triton_experts.product(x, scales, weight, tiles, tile, gated, pairs_a_row, clip)


@device.cached
def choose(pairs: int, scales: Scales) -> ExpertTile:
    """The tile for an average of `pairs` pairs an expert."""
    tile = find(device.active().experts, scales, pairs)
    assert tile is not None  # tuned.Tuned checks it
    return tile
