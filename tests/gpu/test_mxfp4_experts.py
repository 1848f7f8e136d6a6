# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels of experts in MXFP4 against the same sums in float64."""

import pytest
import torch
from comparing import assert_close, check_replays, randn

from flashinfer_backend.ops import mxfp4, mxfp4_experts, triton_experts
from flashinfer_backend.ops.triton_experts import Tiles
from flashinfer_backend.ops.weight import Weight

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]

# Experts, of which a token has, hidden and intermediate size: GPT-OSS-20B on one GPU and on two; rows that
# are no whole unit and columns that are no whole line; fewer units than SMs.
SHAPES = [(32, 4, 2880, 2880), (32, 4, 2880, 1440), (6, 2, 608, 352), (4, 4, 64, 64)]
TOKENS = [1, 5, 16, 40, 130, 700]  # the last ones with more tiles than experts
CLIP = (1.702, 7.0)
FORMS = [(16, 1), (16, 2), (64, 1), (128, 1)]  # tokens of a tile, teams


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def make_weight(experts: int, rows: int, inner: int, bias: bool) -> Weight:
    """Any codes, with scales that differ by up to 128: one in a wrong place shows."""
    weight = Weight.empty("", (experts * rows, inner), "mxfp4", torch.bfloat16, torch.device("cuda"))
    columns = -(-inner // mxfp4.PACKED) * mxfp4.PACKED
    codes = torch.randint(0, 16, (experts * rows, inner), dtype=torch.uint8, device="cuda")
    weight.data.copy_(mxfp4.pack(torch.nn.functional.pad(codes, (0, columns - inner))))
    weight.scale.copy_(torch.randint(115, 123, tuple(weight.scale.shape), device="cuda"))
    if bias:
        weight.bias = torch.nn.Parameter(randn(experts * rows), requires_grad=False)
    return weight


def of_pairs(x: torch.Tensor, weight: Weight, tiles: Tiles) -> torch.Tensor:
    """x[P, K] of each pair times the weight of its expert, in float64."""
    wide = mxfp4.dequantise(weight.data, weight.scale)[:, : weight.shape[1]].double()
    wide = wide.view(tiles.of_experts, -1, weight.shape[1])
    bias = torch.zeros(wide.shape[:2]) if weight.bias is None else weight.bias.double().view(wide.shape[:2])
    found = torch.full((len(x), wide.shape[1]), torch.nan, dtype=torch.float64, device="cuda")
    for expert, filled, order in zip(*(each.tolist() for each in tiles[1:4]), strict=True):
        if (pairs := order[:filled]) == []:
            continue  # no tile
        found[pairs] = x[pairs].double() @ wide[expert].T + bias[expert].to("cuda")
    return found


def gated(sums: torch.Tensor, clip: tuple[float, float] | None) -> torch.Tensor:
    gate, up = sums.chunk(2, dim=-1)
    if clip is None:
        return torch.nn.functional.silu(gate) * up
    gate, up = gate.clamp(max=clip[1]), up.clamp(-clip[1], clip[1])
    return gate * torch.sigmoid(clip[0] * gate) * (up + 1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("clip", [CLIP, None])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(
    shape: tuple[int, int, int, int], clip: tuple[float, float] | None, form: tuple[int, int]
) -> None:
    (experts, each, hidden, inner), (size, teams) = shape, form
    gate_up = make_weight(experts, 2 * inner, hidden, bias=clip is not None)
    down = make_weight(experts, hidden, inner, bias=clip is not None)
    assert mxfp4_experts.takes(gate_up) and mxfp4_experts.takes(down)
    for tokens in TOKENS:
        x = randn(tokens, hidden)
        tiles = triton_experts.route(randn(tokens, experts).float(), each, True, size)
        exact = gated(of_pairs(x.repeat_interleave(each, 0), gate_up, tiles), clip)
        result = mxfp4_experts.product(x, gate_up, tiles, teams, True, each, clip)
        assert_close(result, exact, 5e-3)
        exact = of_pairs(result, down, tiles) * tiles.weights.view(-1, 1)
        again = mxfp4_experts.product(result, down, tiles, teams, False, 1)
        assert_close(again, exact, 5e-3)
        assert torch.equal(again, mxfp4_experts.product(result, down, tiles, teams, False, 1))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("clip", [CLIP, None])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens", [9, 24])  # of the latter some experts have more than 8
def test_nan_stays_with_its_token(
    tokens: int, gated: bool, clip: tuple[float, float] | None, form: tuple[int, int]
) -> None:
    size, teams = form
    weight, x = make_weight(4, 128, 256, bias=clip is not None), randn(tokens, 256)
    x[3, 17] = torch.nan
    tiles = triton_experts.route(randn(tokens, 4).float(), 2, True, size)
    result = mxfp4_experts.product(x, weight, tiles, teams, gated, 2, clip if gated else None)
    found = result.isnan().view(tokens, -1)
    assert found[3].all() and not found[[t for t in range(tokens) if t != 3]].any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gated", [True, False])
def test_no_sum_depends_on_the_other_tokens(gated: bool, form: tuple[int, int]) -> None:
    """Of three stages (columns as GPT-OSS's down on two ranks has them) units begin with either team."""
    weight, x = make_weight(32, 128, 1440, bias=False), randn(40, 1440)
    logits = randn(40, 32).float()

    def product(first: int) -> torch.Tensor:
        tiles = triton_experts.route(logits[first:], 4, True, form[0])
        return mxfp4_experts.product(x[first:], weight, tiles, form[1], gated, 4)

    whole = product(0)
    for first in (1, 13, 39):
        assert torch.equal(product(first), whole[4 * first :])


@pytest.mark.parametrize("form", FORMS)
def test_ranks_without_a_pair(form: tuple[int, int]) -> None:
    """Whole experts of other ranks: no tile here has a pair, and nothing is written."""
    weight, x, logits = make_weight(4, 128, 256, bias=False), randn(5, 256), randn(5, 8).float()
    logits[:, 4:] -= 100
    tiles = triton_experts.route(logits, 2, True, form[0], own=(4, 4))
    assert not tiles.filled.any() and not tiles.weights.any()
    mxfp4_experts.product(x, weight, tiles, form[1], True, 2)
    torch.cuda.synchronize()


@pytest.mark.parametrize("form", FORMS)
def test_in_a_graph(form: tuple[int, int]) -> None:
    """Replayed with other experts of the tokens."""
    gate_up, x = make_weight(8, 256, 512, bias=True), randn(20, 512)
    logits = randn(20, 8).float()

    def body() -> torch.Tensor:
        tiles = triton_experts.route(logits, 2, True, form[0])
        return mxfp4_experts.product(x, gate_up, tiles, form[1], True, 2, CLIP)

    check_replays(body, lambda: logits.copy_(randn(20, 8)))
