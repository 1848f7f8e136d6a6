# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernel of products of few tokens with 128x128 blocks against the same sums in float64."""

import pytest
import torch
from comparing import assert_close, check_replays, randn
from msgspec.structs import replace

from flashinfer_backend.core.tuned import RowTile
from flashinfer_backend.ops import blocks_linear, cuda_fp8, device, fp8, triton_fp8
from flashinfer_backend.ops.weight import Weight
from tables import entries

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]

# More tiles than SMs, fewer, and few; of whole turns for each part, and of others; halves of half a block.
SHAPES = [
    (34816, 5120), (16384, 5120), (5120, 17408), (2048, 4096), (1024, 640), (384, 640), (256, 6144),
    (256, 128),
]  # fmt: skip
TILES = [RowTile(groups, split) for groups in (2, 4) for split in (1, 2, 3, 8)]
TOKENS = [1, 5, 8, 13, 16, 20, 32]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def make_weight(shape: tuple[int, int], role: str = "down") -> Weight:
    """With blocks whose scales differ by up to 64: one in a wrong place shows."""
    weight = Weight.empty(role, shape, "fp8_block", torch.bfloat16, torch.device("cuda"))
    blocks = torch.randint(-3, 4, tuple(weight.scale.shape), device="cuda").exp2()
    weight.format.fill(weight, randn(*shape, scale=shape[1] ** -0.5) * fp8.spread(blocks, shape[1], shape[0]))
    return weight


def sums(elements: torch.Tensor, scales: torch.Tensor, weight: Weight) -> torch.Tensor:
    rows, inner = weight.data.shape
    wide = elements.double() * fp8.spread(scales, inner)
    return wide @ (weight.data.double() * fp8.spread(weight.scale, inner, rows)).T


@pytest.mark.parametrize("tile", TILES, ids=repr)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(shape: tuple[int, int], tile: RowTile) -> None:
    if not tile.fits(shape):
        pytest.skip("fewer blocks of columns than parts")
    weight = make_weight(shape)
    for tokens in TOKENS:
        elements, scales = triton_fp8.quantise_groups(randn(tokens, shape[1]))
        exact = sums(elements, scales, weight)[:tokens]
        arguments = (elements, scales, weight.data, weight.scale, tokens, tile)
        gate, up = exact.chunk(2, dim=-1)
        for gated, wanted in ((False, exact), (True, torch.nn.functional.silu(gate) * up)):
            columns = wanted.shape[1]
            bias, residual = randn(columns), randn(tokens, columns)
            for added in ({}, {"residual": residual}, {"bias": bias, "residual": residual}):
                result = blocks_linear.blocks_linear(*arguments, **added, gated=gated)
                assert_close(result, wanted + sum(each.double() for each in added.values()), 5e-3)
                assert torch.equal(result, blocks_linear.blocks_linear(*arguments, **added, gated=gated))


@pytest.mark.parametrize("tokens", [1, 5, 32])
def test_products_take_it_where_the_numbers_say_so(tokens: int) -> None:
    """With all that comes before and behind a product."""
    rows = dict.fromkeys(("gate_up", "down"), entries((32, RowTile(2, 2))))
    numbers = replace(device.active(), linear_blocks={}, blocks_linear={})
    gate_up, down = make_weight((1024, 512), "gate_up"), make_weight((512, 512), "down")
    x, norm = randn(tokens, 512), cuda_fp8.Norm(randn(512) * 0.1 + 1, 1e-5)
    bias, residual = randn(512), randn(tokens, 512)
    quantised = triton_fp8.quantise_groups(x)
    calls = [
        lambda: cuda_fp8.product(x, gate_up, norm=norm, gated=True),
        lambda: cuda_fp8.product(x, down, bias, residual),
        lambda: cuda_fp8.product(x, down, residual=residual, quantised=quantised),
    ]
    with device.use(numbers):
        expected = [call() for call in calls]
    with device.use(replace(numbers, blocks_linear=rows)):
        assert cuda_fp8.mlp(x, gate_up, down, norm, None, None) is None
        for call, wanted in zip(calls, expected, strict=True):
            assert_close(call(), wanted, 2e-2)


@pytest.mark.parametrize("tile", [RowTile(), RowTile(2, 4)], ids=repr)
@pytest.mark.parametrize("tokens", [1, 32])
def test_in_a_graph(tokens: int, tile: RowTile) -> None:
    """Products that begin before those before them have ended; of the first, clusters have several tiles."""
    first, second, x = make_weight((33792, 2048)), make_weight((2048, 33792)), randn(tokens, 2048)

    def layers() -> torch.Tensor:
        y = x
        for _ in range(8):
            for weight in (first, second):
                elements, scales = triton_fp8.quantise_groups(y)
                y = blocks_linear.blocks_linear(elements, scales, weight.data, weight.scale, tokens, tile)
        return y

    check_replays(layers, lambda: x.copy_(randn(tokens, 2048)))
