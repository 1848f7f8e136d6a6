# SPDX-License-Identifier: Apache-2.0
"""Products with weights of 4 bits on a GPU against the format's own in plain torch, and an engine with them.

`python -m flashinfer_backend.tune` measures them.
"""

import itertools

import pytest
import torch
from comparing import (
    SETTINGS,
    SHAPES,
    SIZES,
    assert_close,
    check_replays,
    compare_engines,
    compare_operations,
    randn,
)
from msgspec.structs import replace

from flashinfer_backend.core.tuned import Int4Tile
from flashinfer_backend.ops import device, int4, int4_linear, tilings
from flashinfer_backend.ops.weight import Weight
from int4_checkpoints import make_int4

pytestmark = pytest.mark.gpu

TOKENS = [1, 7, 16, 33, 64, 128, 300]
FORMATS = [
    "int4_awq_128",
    "int4_packed_128",
    "int4_awq_64",
    "int4_awq_32",
    "int4_packed_row",
    "int4_gptq_row",
]
BOUNDS = {torch.bfloat16: 6e-3, torch.float16: 1e-3}  # x is exact: only the result is rounded


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["written out", "cuda"])
def kernel(request, monkeypatch):
    """What takes few tokens of shapes without numbers: on other GPUs than Hopper's they are written out."""
    if request.param == "written out":
        monkeypatch.setattr(tilings, "MOST_UNTUNED", 0)
    with device.use(replace(device.active(), int4={})):
        yield request.param


@pytest.fixture(scope="module")
def built() -> None:
    """The CUDA kernel's modules, compiled together."""
    from flashinfer.jit import build_jit_specs

    kinds = [(torch.bfloat16, 1, True), (torch.bfloat16, 1, False), (torch.bfloat16, 2, True)]
    kinds += [(torch.bfloat16, 4, True), (torch.float16, 1, True)]
    build_jit_specs([int4_linear.spec(*kind) for kind in kinds], verbose=False)


def make_weight(
    role: str, format: str, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16
) -> Weight:
    weight = Weight.empty(role, shape, format, dtype, torch.device("cuda"))  # type: ignore[arg-type]
    weight.format.fill(weight, randn(*shape, scale=shape[1] ** -0.5))
    return weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", FORMATS)
def test_weights_are_written_out_bit_for_bit(format, dtype):
    from flashinfer_backend.ops import triton_int4

    weight = make_weight("down", format, (1000, 1024), dtype)
    stored = weight.data, weight.scale, weight.zero
    expected = int4.dequantise(*stored).to(dtype)
    assert torch.equal(triton_int4.dequantise(*stored, dtype), expected)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("role", SHAPES)
@pytest.mark.parametrize(
    "format, dtype",
    [*((format, torch.bfloat16) for format in FORMATS), ("int4_awq_128", torch.float16)],  # one shows float16
)
def test_products_are_those_of_the_format(format, role, tokens, dtype, kernel, built):
    from flashinfer_backend.ops import cuda_int4

    weight = make_weight(role, format, SHAPES[role], dtype)
    x = randn(tokens, SHAPES[role][1], scale=2.0, dtype=dtype)
    bias = randn(SHAPES[role][0], dtype=dtype) if role == "qkv" else None
    residual = randn(tokens, SHAPES[role][0], dtype=dtype) if role in ("o", "down") else None
    expected = float32_product(weight, x, bias, residual, gated=role == "gate_up")
    found = cuda_int4.product(x, weight, None, bias, residual, gated=role == "gate_up")
    assert_close(found, expected, BOUNDS[dtype])
    tile = tilings.choose_int4(role, tokens, *weight.shape)
    if kernel == "cuda" and tokens <= tilings.MOST_UNTUNED:
        stored = weight.data, weight.scale, weight.zero
        assert tile is not None and int4_linear.takes(*stored, tile), "it was written out"
    else:
        assert tile is None


def float32_product(weight: Weight, x, bias, residual, gated: bool):
    expected = weight.format.product(x.float(), weight, bias)
    if gated:
        gate, up = expected.chunk(2, dim=-1)
        expected = torch.nn.functional.silu(gate) * up
    return expected if residual is None else expected + residual.float()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", int4_linear.TILES)
def test_every_tile_of_the_cuda_kernel(shape, format, gated, built):
    """With every number of teams and stages that fits, and splits that divide the inner dimension or not."""
    size, warp_rows, row_warps = shape
    weight = make_weight("gate_up" if gated else "o", format, (2 * warp_rows * row_warps, 11 * 128))
    stored, rows = (weight.data, weight.scale, weight.zero), weight.shape[0] // (2 if gated else 1)
    tried = 0
    for tokens in {1, size // 2 + 1, size - 1, size, 2 * size + 3}:
        x, bias, residual = randn(tokens, weight.shape[1]), randn(rows), randn(tokens, rows)
        more = (None, None) if gated else (bias, residual)
        expected = float32_product(weight, x, *more, gated)
        for teams, split, stages in itertools.product(range(1, 9), (1, 2, 5, 8), range(2, 6)):
            tile = Int4Tile(*shape, teams, split, stages)
            if int4_linear.takes(*stored, tile):
                found = int4_linear.linear(x, *stored, tile, *more, gated)
                assert_close(found, expected, BOUNDS[x.dtype])
                tried += 1
    assert tried >= 5 * 4 * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_tokens_by_the_cuda_kernel(dtype, built):
    """The sum does not depend on timing."""
    weight = make_weight("o", "int4_awq_128", SHAPES["o"], dtype)
    stored = weight.data, weight.scale, weight.zero
    for tokens in [*range(1, 65), 96, 100, 128]:
        x, residual = randn(tokens, 4096, dtype=dtype), randn(tokens, 4096, dtype=dtype)
        tile = tilings.untuned_int4(tokens, *weight.shape)
        assert tile is not None and int4_linear.takes(*stored, tile)
        found = int4_linear.linear(x, *stored, tile, residual=residual)
        assert_close(found, float32_product(weight, x, None, residual, False), BOUNDS[dtype])
        assert torch.equal(found, int4_linear.linear(x, *stored, tile, residual=residual))


def test_what_the_cuda_kernel_does_not_take(built):
    weight = make_weight("o", "int4_awq_128", (256, 512))
    stored, tile = (weight.data, weight.scale, weight.zero), Int4Tile(8, 64, 1, 4, 1, 3)
    assert int4_linear.takes(*stored, tile)
    for wrong in (
        Int4Tile(8, 48, 1, 4, 1, 3),  # there is none
        Int4Tile(8, 64, 1, 9, 1, 3),  # too many warps
        Int4Tile(64, 32, 2, 4, 1, 5),  # too much memory
        Int4Tile(8, 64, 1, 4, 5, 3),  # more parts than blocks
    ):
        assert not int4_linear.takes(*stored, wrong)
    assert not int4_linear.takes(weight.data[:200], weight.scale[:, :200], weight.zero[:, :200], tile)
    module = int4_linear.module(torch.bfloat16, 1, True, weight.data.device)
    x = randn(1, 512)
    with pytest.raises(RuntimeError, match="a split of 5"):
        module.int4_linear(randn(1, 256), x, *stored, None, None, False, 8, 64, 1, 4, 5, 3)
    with pytest.raises(RuntimeError, match="zero points"):
        module.int4_linear(randn(1, 256), x, *stored[:2], None, None, None, False, 8, 64, 1, 4, 1, 3)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("tokens", [1, 64, 300])
def test_operations_of_a_layer(tokens, ordered, kernel):
    """The norm's bfloat16 may differ in its last bit. ordered: as with GPTQ's desc_act."""
    qkv, gate_up, down = (
        make_weight(role, "int4_gptq_128", SHAPES[role]) for role in ("qkv", "gate_up", "down")
    )
    if ordered:
        for weight in (qkv, gate_up, down):
            weight.order = torch.randperm(weight.shape[1], device="cuda")
    compare_operations(tokens, qkv, gate_up, down, 2e-2, 1e-2)


@pytest.mark.parametrize("tokens", [16, 300])
def test_products_in_a_graph(tokens, kernel):
    from flashinfer_backend.ops import cuda_int4
    from flashinfer_backend.ops.triton_fp8 import Norm

    weight = make_weight("qkv", "int4_awq_128", SHAPES["qkv"])
    norm = Norm(randn(4096) * 0.1 + 1, 1e-5)
    x = randn(tokens, 4096)
    check_replays(lambda: cuda_int4.product(x, weight, norm), lambda: x.copy_(randn(tokens, 4096)))


@pytest.mark.parametrize(
    ("layout", "kind"),
    [("awq", "llama"), ("awq", "qwen2"), ("gptq-ordered", "llama"), ("gptq-v2", "llama"),
     ("packed", "qwen3"), ("packed-zeros", "llama"), ("packed-rows", "mistral")],
)  # fmt: skip
def test_engine(layout, kind, tmp_path, kernel):
    checkpoint = make_int4(layout, kind, tmp_path / "model", **SIZES)
    compare_engines(f"{layout} {kind}", checkpoint, SETTINGS, tmp_path, fewer=0.05)
