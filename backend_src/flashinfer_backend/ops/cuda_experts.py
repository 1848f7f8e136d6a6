# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts on CUDA, as ops.torch_ops.experts_add, by Triton's kernels: weights of 16 bits or FP8.

In FP8 x is quantised before each of the two products, as the weights' format says. No call waits for the
device or depends on values there, so all of it can be captured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashinfer_backend.core.tuned import ExpertTile
from flashinfer_backend.ops import device, triton_experts, triton_fp8
from flashinfer_backend.ops.weight import DENSE, Fp8Block, Weight


def product(
    normed: Tensor,
    router: Tensor,
    gate_up: Weight,
    down: Weight,
    experts_per_token: int,
    renormalise: bool,
    residual: Tensor | None,
) -> Tensor:
    """residual (None: 0) plus each token's experts, weighed: normed[T, H], residual[T, H] -> [T, H], of which
    residual is unchanged. See ops.torch_ops.experts_add, whose x this has the norm of."""
    # Rounded to 16 bits, logits would be equal more often, and another expert would be taken.
    logits = torch.mm(normed, router.t(), out_dtype=torch.float32)
    routes = triton_experts.route(logits, experts_per_token, renormalise)
    return weighed(normed, routes, gate_up, down, residual)


def weighed(
    normed: Tensor, routes: triton_experts.Routes, gate_up: Weight, down: Weight, residual: Tensor | None
) -> Tensor:
    """product() behind the routing."""
    tile = choose(routes.chosen.numel() // len(routes.counts), gate_up.format is not DENSE)
    tiles = triton_experts.place(routes, tile.tokens)
    gated = triton_experts.product(*_quantised(normed, gate_up), gate_up, routes, tiles, tile, gated=True)
    products = triton_experts.product(*_quantised(gated, down), down, routes, tiles, tile, gated=False)
    return triton_experts.add_up(products, residual, len(normed))


def _quantised(x: Tensor, weight: Weight) -> tuple[Tensor, Tensor | None]:
    """x as the product with the weight takes it, and its scales."""
    if weight.format is DENSE:
        return x, None
    if isinstance(weight.format, Fp8Block):
        return triton_fp8.quantise_groups(x)
    return triton_fp8.quantise_rows(x)


@device.cached
def choose(pairs: int, fp8: bool) -> ExpertTile:
    """The tile for so many pairs an expert on average, with weights of 16 bits or in e4m3."""
    return device.active().expert_tile(pairs, fp8)
