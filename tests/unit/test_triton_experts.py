# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of a mixture of experts in Triton's interpreter, without a GPU, against plain torch.
tests/gpu/test_experts.py runs the real ones.
"""

import os
import sys

import torch
import torch.nn.functional as F
from interpreted import interpreted
from torch import nn

from flashinfer_backend.core.tuned import ExpertBlock, ExpertTile
from flashinfer_backend.ops import fp8, mxfp4, torch_ops
from flashinfer_backend.ops.torch_ops import Mixture
from flashinfer_backend.ops.weight import Weight

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))
from test_triton_linear import exact_conversions

FORMATS = ("dense", "fp8_token", "fp8_block", "mxfp4")
TILES = [
    ExpertTile(16, ExpertBlock(32, 64, 2, 4), ExpertBlock(64, 128, 2, 4)),
    ExpertTile(32, ExpertBlock(64, 128, 2, 4), ExpertBlock(128, 64, 2, 4)),
]
# Tokens, experts, of which a token has, hidden size, intermediate size, tile, whether there is a residual.
CASES = [
    (1, 8, 2, 128, 128, TILES[0], True),
    (5, 6, 3, 256, 128, TILES[0], False),
    (24, 3, 2, 128, 128, TILES[0], True),  # several tiles an expert
    (34, 5, 1, 128, 128, TILES[1], True),  # two tiles of a folded expert
]
ODD = (9, 4, 2, 96, 160, TILES[1], True)  # rows and columns that no tile divides, in 16 bits and in MXFP4
WIDE_TILE = ExpertTile(16, ExpertBlock(256, 64, 2, 4), ExpertBlock(256, 64, 2, 4))
WIDE = (3, 2, 1, 512, 384, WIDE_TILE, True)  # rows of several blocks of 128x128
# Folded experts, and whether they have a gate.
FOLDED = [(1, True), (1, False), (3, True)]


def logits_of(tokens: int, experts: int, skewed: bool) -> torch.Tensor:
    """skewed: nearly all tokens want the first experts, and some want none of the last."""
    return torch.randn(tokens, experts) - (3 * torch.arange(experts) if skewed else 0)


def check_router(tokens: int) -> None:
    """Columns and rows that no block divides, with a bias and without one."""
    from flashinfer_backend.ops import cuda_experts

    router, x = Weight("", torch.randn(19, 304).half()), torch.randn(tokens, 304).half()
    for bias in (None, nn.Parameter(torch.randn(19).half(), requires_grad=False)):
        router.bias = bias
        expected = torch_ops.router_logits(x, router)
        torch.testing.assert_close(cuda_experts.router_logits(x, router), expected, rtol=1e-4, atol=1e-4)


def check_routes(tokens: int, experts: int, chosen: int, renormalise: bool, skewed: bool) -> None:
    from flashinfer_backend.ops import triton_experts

    for further, gate in [(0, False), *FOLDED]:
        logits, folded = logits_of(tokens, experts, skewed), (experts, further) if further else None
        if gate:  # and columns of padding
            logits = torch.cat((logits, torch.randn(tokens, 3) * 9), 1)
        expected, weights = torch_ops.route(logits, chosen, renormalise, folded)
        own = torch_ops.route(logits[:, :experts], chosen, renormalise)
        assert torch.equal(expected[:, :chosen], own[0]) and torch.equal(weights[:, :chosen], own[1])
        for size in (16, 32):
            tiles = triton_experts.route(logits, chosen, renormalise, size, folded=folded)
            torch.testing.assert_close(tiles.weights, weights)
            most = triton_experts.most_tiles(tokens * chosen, experts, size) + further * -(-tokens // size)
            assert len(tiles.experts) == most and tiles.of_experts == experts + further
            check_tiles(tiles, expected.flatten().tolist())


def check_failing_launch() -> None:
    """A step that fails between the two kernels leaves nothing to the next one."""
    from flashinfer_backend.ops import triton_experts

    class Fails:
        def __getitem__(self, grid):
            raise RuntimeError("no launch")

    place, logits = triton_experts._place, logits_of(20, 4, False)
    triton_experts._place = Fails()
    try:
        triton_experts.route(logits, 2, True, 16)
    except RuntimeError:
        triton_experts._place = place
    check_tiles(
        triton_experts.route(logits, 2, True, 16), torch_ops.route(logits, 2, True)[0].flatten().tolist()
    )


def check_columns(tokens: int) -> None:
    """Logits can be the first columns of others."""
    from flashinfer_backend.ops import triton_experts

    logits = logits_of(tokens, 8, False)
    tiles = triton_experts.route(logits[:, :5], 2, True, 16)
    expected, weights = torch_ops.route(logits[:, :5].clone(), 2, True)
    torch.testing.assert_close(tiles.weights, weights)
    check_tiles(tiles, expected.flatten().tolist())


def check_padding() -> None:
    """A block of any tile reads no scales of MXFP4 behind a row's own padding."""
    from flashinfer_backend.ops import triton_experts

    for columns in (96, 2880):
        apart = Weight.empty("", (2, columns), "mxfp4", torch.float16, torch.device("cpu")).scale.stride(0)
        for inner in (32, 64, 128, 256, 512, 1024):
            _, read = triton_experts.block_shape(ExpertBlock(64, inner, 2, 4), columns, "mxfp4")
            assert -(-columns // read) * read // mxfp4.GROUP <= apart


def check_tiles(tiles, expected: list[int]) -> None:
    """Each pair is in a tile of its expert, once."""
    found = []
    for expert, filled, order in zip(*(part.tolist() for part in tiles[1:4]), strict=True):
        pairs = order[:filled]
        assert all(expected[pair] == expert for pair in pairs)
        found += pairs
    assert sorted(found) == list(range(len(expected)))


def check_broken_logits(tokens: int, renormalise: bool) -> None:
    """A token of NaN has experts, each once, and weights that are NaN; the others have theirs."""
    from flashinfer_backend.ops import triton_experts

    logits = logits_of(tokens, 5, False)
    expected, weights = torch_ops.route(logits, 3, renormalise)
    logits[1] = float("nan")
    expected[1] = torch.arange(3)
    tiles = triton_experts.route(logits, 3, renormalise, 16)
    check_tiles(tiles, expected.flatten().tolist())
    assert tiles.weights[1].isnan().all()
    others = [row for row in range(tokens) if row != 1]
    torch.testing.assert_close(tiles.weights[others], weights[others])


def check_shares(tokens: int, experts: int, chosen: int, groups: int) -> None:
    """Ranks with whole experts: each pair is in a tile of one of them, and their sums add up to the whole."""
    from flashinfer_backend.ops import cuda_experts, triton_experts

    cuda_experts.choose = lambda pairs, scales: TILES[0]
    logits, count, hidden, inner = logits_of(tokens, experts, True), experts // groups, 64, 96
    expected, weights = torch_ops.route(logits, chosen, True)
    shapes = (experts, 2 * inner, hidden), (experts, hidden, inner)
    gate_up, down = ((torch.randn(shape) * 0.1).half() for shape in shapes)
    normed, added = (torch.randn(tokens, hidden).half() for _ in range(2))
    total, found = torch.zeros(tokens, hidden), 0

    def summed(first: int, count: int, residual: torch.Tensor | None, own=None) -> torch.Tensor:
        parts = [
            Weight("", whole[first : first + count].flatten(0, 1).contiguous()) for whole in (gate_up, down)
        ]
        return cuda_experts.experts_add(normed, logits, *parts, Mixture(chosen, True, own=own), residual)

    for first in range(0, experts, count):
        tiles = triton_experts.route(logits, chosen, True, 16, (first, count))
        assert len(tiles.experts) == triton_experts.most_tiles(tokens * chosen, count, 16)
        mine = (expected >= first) & (expected < first + count)
        torch.testing.assert_close(tiles.weights, weights * mine)
        for expert, filled, order in zip(*(part.tolist() for part in tiles[1:4]), strict=True):
            found += filled
            assert all(expected.flatten()[pair] == first + expert for pair in order[:filled])
        total += summed(first, count, None if first else added, (first, count))
    assert found == tokens * chosen
    torch.testing.assert_close(total, summed(0, experts, added).float(), atol=2e-2, rtol=0)


def check_products(
    format, tokens, experts, chosen, hidden, inner, tile, residual, clip=None, further=0, gate=False
) -> None:
    """clip: of an activation as GPT-OSS has it, with biases. further: folded experts; gate: they have one. Of
    one expert alone the input is scaled."""
    from flashinfer_backend.ops import cuda_experts

    device = torch.device("cpu")
    # NumPy has no bfloat16 to multiply.
    dtype = torch.float16 if not format.startswith("fp8") else torch.bfloat16
    x = torch.randn(tokens, hidden).to(dtype)
    router = torch.randn(experts + 4 * gate, hidden) * hidden**-0.5
    matrices, folded = experts + further, (experts, further) if further else None
    scaled = chosen == 1 and not further
    gate_up = Weight.empty("gate_up", (matrices * 2 * inner, hidden), format, dtype, device)
    down = Weight.empty("down", (matrices * hidden, inner), format, dtype, device)
    for weight, columns in ((gate_up, hidden), (down, inner)):
        # Rows differ in size, so that a scale of another one shows.
        sizes = torch.logspace(-1, 1, len(weight.data))[torch.randperm(len(weight.data))]
        weight.format.fill(weight, torch.randn(weight.shape) * sizes[:, None] * columns**-0.5)
        if clip is not None:
            weight.bias = nn.Parameter(torch.randn(len(weight.data)), requires_grad=False)
    added = torch.randn(tokens, hidden).to(dtype) if residual else None
    cuda_experts.choose = lambda pairs, scales: tile
    norm = torch.rand(hidden).to(dtype) + 0.5
    normed = torch_ops.rms_norm(x, norm, 1e-5)
    logits = F.linear(normed.float(), router)
    renormalise = bool(tokens % 2)
    mixture = Mixture(chosen, renormalise, clip, scaled, folded=folded)
    quantised = triton_fp8.quantise_groups(normed) if format == "fp8_block" and residual else None
    given = torch.zeros_like(normed) if quantised and not scaled else normed  # which no product takes then
    found = cuda_experts.experts_add(given, logits, gate_up, down, mixture, added, quantised)
    routes = torch_ops.route(logits, chosen, renormalise, folded)
    factor = logits.amax(-1, keepdim=True).sigmoid().to(dtype) if scaled else 1
    expected = weighted_sum((normed * factor).float(), *routes, matrices, gate_up, down, clip)
    expected = expected if added is None else expected + added
    assert found.shape == expected.shape and found.dtype == dtype
    error = (found.float() - expected).norm(dim=1) / expected.norm(dim=1)
    assert (error < 2e-2).all(), (format, error.tolist())


def weighted_sum(x, chosen, weights, experts, gate_up, down, clip) -> torch.Tensor:
    """By the formats' own products, in float32."""
    rows = torch.zeros_like(x)
    for token, of_token in enumerate(chosen.tolist()):
        for place, expert in enumerate(of_token):
            first, second = gate_up.part(expert, experts), down.part(expert, experts)
            each = x[token : token + 1]
            gate, up = first.format.product(each, as_float(first), first.bias).chunk(2, -1)
            gated = torch_ops.gated(gate, up, clip).bfloat16().float()  # as the first kernel stores it
            product = second.format.product(gated, as_float(second), second.bias)
            rows[token] += weights[token, place] * product[0]
    return rows


def as_float(weight: Weight) -> Weight:
    """A dense one in float32."""
    return Weight(weight.role, weight.data.float()) if weight.format.name == "dense" else weight


def test_experts_in_the_interpreter():
    interpreted(__file__)


if __name__ == "__main__":
    from flashinfer_backend.ops import triton_experts, triton_fp8

    triton_experts.NATIVE = False
    torch.manual_seed(0)
    exact_conversions()
    triton_fp8.NATIVE = False
    triton_fp8.quantise_rows = fp8.quantise_rows
    for tokens, experts, chosen, renormalise, skewed in [
        (1, 8, 2, True, False),
        (1, 2, 1, False, False),
        (13, 8, 3, True, False),
        (16, 5, 4, False, True),
        (22, 7, 3, True, True),  # several programs place
        (4, 70, 2, False, True),  # as many tokens as one program takes with 70 experts
        (5, 70, 3, True, False),
    ]:
        check_routes(tokens, experts, chosen, renormalise, skewed)
    check_padding()
    for tokens in (1, 3, 8, 21):
        check_router(tokens)
    check_failing_launch()
    for tokens in (1, 4, 17):
        check_columns(tokens)
    for tokens in (4, 17):
        check_broken_logits(tokens, renormalise=tokens == 4)
    for case in [(1, 8, 2, 2), (13, 8, 3, 4), (17, 4, 2, 2)]:
        check_shares(*case)
    for format, case in zip(FORMATS, CASES, strict=True):
        check_products(format, *case)
    for (further, gate), case in zip(FOLDED, (CASES[2], CASES[3], CASES[1]), strict=True):
        check_products("dense", *case, further=further, gate=gate)
    for format in FORMATS[1:3]:
        check_products(format, *CASES[1], further=2, gate=True)
        check_products(format, *CASES[3], further=1)
    check_products("int4_awq_64", *CASES[1])
    check_products("int4_packed_32", *CASES[1], clip=(1.702, 1.5))
    for format in ("dense", "mxfp4"):
        check_products(format, *ODD, clip=(1.702, 1.5))
    for format in FORMATS:
        check_products(format, *WIDE)
