# SPDX-License-Identifier: Apache-2.0
"""Which tiling each product takes for how many tokens, by what was measured on this device (core/tuned)."""

from __future__ import annotations

from torch import Tensor

from flashinfer_backend.core.tuned import BlockTile, Role, Tiling
from flashinfer_backend.ops import device
from flashinfer_backend.ops.fp8 import E4M3


def choose(role: Role, tokens: int, weight: Tensor) -> Tiling | None:
    """The tiling for weight[N, K], or None where cuBLAS is faster or the shape does not fit. Of weights in
    e4m3: with scales by row."""
    fp8 = weight.dtype == E4M3
    if tokens > _most_tokens(fp8):
        return None
    rows, inner = weight.shape
    return _choose(role, tokens, rows, inner, fp8)


@device.cached
def choose_blocks(role: Role, tokens: int) -> BlockTile:
    """The tile for a weight of 128x128 blocks."""
    tiles = device.active().block_tiles(role)
    return next(tile for tile in tiles if tile.tokens is None or tokens <= tile.tokens)


@device.cached
def _most_tokens(fp8: bool) -> int:
    """Beyond, every product is cuBLAS's: then this is all that the question costs."""
    numbers = device.active()
    by_role = numbers.fp8_products if fp8 else numbers.products
    products = [product for of_role in by_role.values() for product in of_role]
    return max((step.tokens for product in products for step in product.steps), default=0)


@device.cached
def _choose(role: Role, tokens: int, rows: int, inner: int, fp8: bool) -> Tiling | None:
    return device.active().tiling(role, tokens, (rows, inner), fp8)
