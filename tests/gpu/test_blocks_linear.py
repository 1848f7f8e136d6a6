# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernel of products of few tokens with 128x128 blocks against the same sums in float64."""

import pytest
import torch
from comparing import check_replays, randn

from flashinfer_backend.core.tuned import RowTile
from flashinfer_backend.ops import blocks_linear, fp8, triton_fp8
from flashinfer_backend.ops.weight import Weight

pytestmark = pytest.mark.gpu

# More tiles than SMs, fewer, and few; of whole turns for each part, and of others.
SHAPES = [(34816, 5120), (16384, 5120), (5120, 17408), (2048, 4096), (1024, 640), (256, 6144), (256, 128)]
TILES = [RowTile(groups, split) for groups in (2, 4) for split in (1, 2, 3, 8)]
TOKENS = [1, 5, 8, 13, 16, 20, 32]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def make_weight(shape: tuple[int, int]) -> Weight:
    """With blocks whose scales differ by up to 64: one in a wrong place shows."""
    weight = Weight.empty("down", shape, "fp8_block", torch.bfloat16, torch.device("cuda"))
    blocks = torch.randint(-3, 4, tuple(weight.scale.shape), device="cuda").exp2()
    weight.format.fill(weight, randn(*shape, scale=shape[1] ** -0.5) * fp8.spread(blocks, shape[1], shape[0]))
    return weight


def product(elements: torch.Tensor, scales: torch.Tensor, weight: Weight) -> torch.Tensor:
    rows, inner = weight.data.shape
    wide = elements.double() * fp8.spread(scales, inner)
    return wide @ (weight.data.double() * fp8.spread(weight.scale, inner, rows)).T


@pytest.mark.parametrize("tile", TILES, ids=repr)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(shape: tuple[int, int], tile: RowTile) -> None:
    if not tile.fits(shape):
        pytest.skip("fewer blocks of columns than parts")
    weight, out = make_weight(shape), shape[0]
    for tokens in TOKENS:
        elements, scales = triton_fp8.quantise_groups(randn(tokens, shape[1]))
        exact = product(elements, scales, weight)[:tokens]
        bias, residual = randn(out), randn(tokens, out)
        for added in ({}, {"residual": residual}, {"bias": bias, "residual": residual}):
            arguments = (elements, scales, weight.data, weight.scale, tokens, tile)
            result = blocks_linear.blocks_linear(*arguments, **added)
            wanted = exact + sum(each.double() for each in added.values())
            assert (result - wanted).norm() < 5e-3 * wanted.norm(), tokens
            assert torch.equal(result, blocks_linear.blocks_linear(*arguments, **added))
        gate, up = exact.chunk(2, dim=-1)
        wanted = torch.nn.functional.silu(gate) * up
        result = blocks_linear.blocks_linear(*arguments, gated=True)
        assert (result - wanted).norm() < 5e-3 * wanted.norm(), tokens


@pytest.mark.parametrize("tile", [RowTile(), RowTile(2, 4)], ids=repr)
@pytest.mark.parametrize("tokens", [1, 32])
def test_in_a_graph(tokens: int, tile: RowTile) -> None:
    """Products that begin before those before them have ended."""
    first, second, x = make_weight((5120, 2048)), make_weight((2048, 5120)), randn(tokens, 2048)

    def layers() -> torch.Tensor:
        y = x
        for _ in range(8):
            for weight in (first, second):
                elements, scales = triton_fp8.quantise_groups(y)
                y = blocks_linear.blocks_linear(elements, scales, weight.data, weight.scale, tokens, tile)
        return y

    check_replays(layers, lambda: x.copy_(randn(tokens, 2048)))
