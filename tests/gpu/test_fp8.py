# SPDX-License-Identifier: Apache-2.0
"""FP8 products on a GPU against the formats' own in plain torch, their times, and an engine with them.

`pytest tests/gpu/test_fp8.py -s` prints the times. FLASHINFER_BLOCKS=1 adds FlashInfer's product of 128x128
blocks, which compiles for minutes the first time.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comparing import (
    SHAPES,
    SIZES,
    SMALL,
    assert_close,
    capture,
    check_replays,
    compare_engines,
    compare_operations,
    microseconds,
    randn,
)
from msgspec.structs import replace

from engine.harness import serve, start_core
from flashinfer_backend.core import tuned
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.core.tuned import BlockTile, Entry, Tiling, Tuned
from flashinfer_backend.ops import device, fp8, tilings, torch_ops
from flashinfer_backend.ops.weight import Weight
from quantised import make_quantised
from tables import entries

pytestmark = pytest.mark.gpu

TOKENS = [1, 7, 24, 64, 300, 4096]
KINDS = ["fp8_token", "fp8_static", "fp8_block"]


# Multiples of 4, which cuBLAS multiplies with blocks, and others.
BLOCK_TOKENS = [1, 7, 16, 64, 100, 300, 1000, 4096]
# Of Qwen3-4B, and with 5 and 17 groups, where scales are padded.
BLOCK_SHAPES = [
    *SHAPES.items(),
    *(("qkv", (6144, 2560)), ("o", (2560, 4096)), ("gate_up", (19456, 2560)), ("down", (2560, 9728))),
    *(("qkv", (1536, 640)), ("gate_up", (2304, 640)), ("down", (640, 2176)), ("o", (128, 128))),
]

# Of products that quantise x themselves; of gate and up none is split.
QUANTISING = [
    Tiling(1, 64, 512, split=2, stages=3),
    Tiling(1, 128, 256, stages=3, warps=8),
    Tiling(16, 64, 512, stages=2, warps=8),
    Tiling(16, 64, 256, split=4, prefetch=131072),
    Tiling(16, 32, 256, split=2, stages=5, early=False),
    Tiling(16, 64, 128, swap=False, prefetch=0),
]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def make_weight(role: str, format: str, shape: tuple[int, int]) -> Weight:
    """In fp8_static the parts of qkv have input scales of their own."""
    weight = Weight.empty(role, shape, format, torch.bfloat16, torch.device("cuda"))  # type: ignore[arg-type]
    weight.format.fill(weight, randn(*shape, scale=shape[1] ** -0.5))
    if format == "fp8_static":
        parts = {0: 0.012, 4096: 0.009, 5120: 0.009} if role == "qkv" else {0: 0.011}
        weight.input_scales = parts
    return weight


def bound(weight: Weight, tokens: int) -> float:
    """Of the relative difference of two products of the same x: fast sums over up to 14336 columns, for which
    test_times prints what they and exact ones come to; and two roundings to e4m3, where the product quantises
    x by chunks."""
    blocks = weight.format.name == "fp8_block"
    tiling = tilings.choose(weight.role, tokens, weight.data, blocks)
    chunks = weight.format.name != "fp8_static" and tiling is not None and tiling.quantise
    return 6e-2 if chunks else 2e-2


def quantising(tiling: Tiling) -> Tuned:
    """The device's numbers with this tiling in all products of few tokens."""
    rules = {role: tiling if role != "gate_up" else replace(tiling, split=1) for role in SHAPES}
    products = {role: entries((16, replace(each, quantise=True))) for role, each in rules.items()}
    return replace(device.active(), linear_fp8=products)


def blocks_by_cublas(fewest: int = 1) -> AbstractContextManager[None]:
    """The device's numbers, but cuBLAS multiplies with blocks from so many tokens on."""
    tile = BlockTile(64, 64)
    return device.use(with_blocks(dict.fromkeys(SHAPES, entries((fewest - 1, tile), (None, None)))))


def with_blocks(tiles: dict[str, tuple[Entry[BlockTile], ...]]) -> Tuned:
    """The device's numbers with other tiles of blocks for some roles."""
    return replace(device.active(), linear_blocks={}, blocks_fp8=device.active().blocks_fp8 | tiles)


def make_uneven_blocks(role: str, shape: tuple[int, int]) -> Weight:
    """With blocks whose scales differ by up to 64: one in a wrong place shows."""
    weight = make_weight(role, "fp8_block", shape)
    blocks = torch.randint(-3, 4, tuple(weight.scale.shape), device="cuda").exp2()
    weight.format.fill(weight, randn(*shape, scale=shape[1] ** -0.5) * fp8.spread(blocks, shape[1], shape[0]))
    return weight


def make_uneven(tokens: int, inner: int) -> torch.Tensor:
    """The same of a token's groups."""
    groups = torch.randint(-3, 4, (tokens, inner // fp8.BLOCK), device="cuda").exp2()
    return (randn(tokens, inner) * fp8.spread(groups, inner)).bfloat16()


@pytest.mark.parametrize("inner", [128, 4096, 14336, 18944])
@pytest.mark.parametrize("tokens", TOKENS)
def test_activations_are_quantised_bit_for_bit(tokens, inner):
    from flashinfer_backend.ops import triton_fp8

    x = randn(tokens, inner, scale=3.0)
    x[::3] = 0
    x[0, 5] = 30000.0  # one value far beyond the others
    pairs = [
        (triton_fp8.quantise_rows(x), fp8.quantise_rows(x)),
        (tuple(found[:tokens] for found in triton_fp8.quantise_groups(x)), fp8.quantise_groups(x)),
    ]
    x = x.clone()
    x[0, 7:10] = torch.tensor([torch.inf, -torch.inf, -0.0])
    static = fp8.to_e4m3(x, 0.01), torch.full((tokens, 1), 0.01).cuda()
    pairs.append((triton_fp8.quantise_rows(x, 0.01), static))
    for (elements, scales), (expected, expected_scales) in pairs:
        torch.testing.assert_close(scales, expected_scales, rtol=0, atol=0)
        assert torch.equal(elements.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("tokens", [65, 300, 1022])
def test_an_mlp_of_blocks_gives_what_its_two_products_do(tokens):
    from flashinfer_backend.ops import cuda_fp8, cuda_ops

    gate_up, down = (make_weight(role, "fp8_block", SHAPES[role]) for role in ("gate_up", "down"))
    hidden = gate_up.shape[1]
    x, norm, residual = randn(tokens, hidden, scale=3.0), randn(hidden) * 0.1 + 1, randn(tokens, hidden)
    whole = (x, norm, 1e-5, gate_up)
    assert cuda_fp8.mlp(x, gate_up, down, cuda_fp8.Norm(norm, 1e-5), None, residual) is not None
    found = cuda_ops.mlp_add(*whole, down, residual)
    assert torch.equal(found, cuda_ops.linear_add(cuda_ops.norm_gate_up_silu(*whole), down, residual))


@pytest.mark.parametrize("inner", [128, 4096, 5120, 18944])
@pytest.mark.parametrize("tokens", [1, 64, 300, 1022])
def test_a_norm_is_part_of_quantising(tokens, inner):
    from flashinfer_backend.ops import triton_fp8

    x, weight = randn(tokens, inner, scale=3.0), randn(inner) * 0.1 + 1
    elements, scales = triton_fp8.quantise_rows(x, None, triton_fp8.Norm(weight, 1e-5))
    expected = torch_ops.rms_norm(x.float(), weight.float(), 1e-5)
    peaks = expected.abs().amax(-1, keepdim=True)
    torch.testing.assert_close(scales * fp8.LARGEST, peaks, rtol=1e-2, atol=0)  # bfloat16's last bits
    # Half a step of the largest elements is 1/28 of the peak; the norm is rounded to bfloat16 before.
    assert ((elements.float() * scales - expected).abs() < 0.04 * peaks).all()
    elements, scales = triton_fp8.quantise_groups(x, triton_fp8.Norm(weight, 1e-5))
    rows = -(-tokens // 4) * 4
    assert elements.shape == (rows, inner) and scales.stride() == (1, rows)
    assert (elements[tokens:].float() == 0).all() and scales.isfinite().all()
    found = elements[:tokens].float() * fp8.spread(scales[:tokens], inner)
    assert ((found - expected).abs() < 0.04 * peaks).all()


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("role", SHAPES)
@pytest.mark.parametrize("format", KINDS)
def test_products_are_those_of_the_format(format, role, tokens):
    from flashinfer_backend.ops import cuda_fp8

    weight = make_weight(role, format, SHAPES[role])
    x = randn(tokens, SHAPES[role][1], scale=2.0)
    bias = randn(SHAPES[role][0]) if role == "qkv" else None
    expected = weight.format.product(x.float(), weight, bias)
    allowed = 1e-2 if format == "fp8_block" else bound(weight, tokens)
    assert_close(cuda_fp8.product(x, weight, bias), expected, allowed)


@pytest.mark.parametrize("format", KINDS)
def test_rows_that_do_not_fill_a_block(format):
    """1008 rows: the last block of 128 is not full."""
    from flashinfer_backend.ops import cuda_fp8

    weight = make_weight("down", format, (1008, 512))
    x = randn(33, 512)
    expected = weight.format.product(x.float(), weight)
    assert_close(cuda_fp8.product(x, weight), expected, 1e-2)
    with blocks_by_cublas():  # which is not asked for them
        assert_close(cuda_fp8.product(x, weight), expected, 1e-2)


@pytest.mark.parametrize("tokens", BLOCK_TOKENS)
@pytest.mark.parametrize(("role", "shape"), BLOCK_SHAPES, ids=str)
def test_blocks_by_cublas_are_those_of_the_format(role, shape, tokens):
    """With what follows the product, and without; of an 8B model, those of the Triton product, too."""
    from flashinfer_backend.ops import cuda_fp8

    (rows, inner), weight = shape, make_uneven_blocks(role, shape)
    x = make_uneven(tokens, inner)
    bias = randn(rows) if role == "qkv" else None
    residual = randn(tokens, rows) if role in ("o", "down") else None
    expected = weight.format.product(x.float(), weight, bias)
    with blocks_by_cublas():
        assert tilings.choose_blocks(role, tokens, rows) is None
        plain = cuda_fp8.product(x, weight, bias)
        assert plain.is_contiguous()
        assert_close(plain, expected, 1e-2)
        if role == "gate_up":
            gate, up = expected.chunk(2, -1)
            assert_close(cuda_fp8.product(x, weight, gated=True), F.silu(gate) * up, 2e-2)
        if residual is not None:
            assert_close(cuda_fp8.product(x, weight, residual=residual), expected + residual, 1e-2)
    if shape == SHAPES[role]:
        with device.use(with_blocks({role: entries((None, BlockTile(64, 64)))})):
            assert_close(cuda_fp8.product(x, weight, bias), plain, 1e-2)


@pytest.mark.parametrize("tokens", [1, 7, 100, 300])
def test_operations_of_a_layer_by_cublas(tokens):
    with blocks_by_cublas():
        check_operations("fp8_block", tokens)


@pytest.mark.parametrize("tokens", [1, 7, 64, 101])
@pytest.mark.parametrize("role", SHAPES)
def test_blocks_by_cublas_in_a_graph(role, tokens):
    from flashinfer_backend.ops import cuda_fp8
    from flashinfer_backend.ops.triton_fp8 import Norm

    rows, inner = SHAPES[role]
    weight, x = make_uneven_blocks(role, (rows, inner)), make_uneven(tokens, inner)
    norm = Norm(randn(inner) * 0.1 + 1, 1e-5) if role in ("qkv", "gate_up") else None
    residual = randn(tokens, rows) if role in ("o", "down") else None

    def product() -> torch.Tensor:
        return cuda_fp8.product(x, weight, None, residual, role == "gate_up", norm)

    with blocks_by_cublas():
        check_replays(product, lambda: x.copy_(make_uneven(tokens, inner)))


@pytest.mark.parametrize("tokens", [1, 24, 64, 300])
@pytest.mark.parametrize("format", KINDS)
def test_operations_of_a_layer(format, tokens):
    """The norm's bfloat16 may differ in its last bit. Where that is a row's largest number, its scale
    differs, and each element is rounded anew: the bound is that of two roundings to e4m3."""
    check_operations(format, tokens)


def check_operations(format: str, tokens: int) -> None:
    qkv, gate_up, down = (make_weight(role, format, SHAPES[role]) for role in ("qkv", "gate_up", "down"))
    compare_operations(tokens, qkv, gate_up, down, 6e-2, bound(down, tokens))


@pytest.mark.parametrize("tokens", [1, 7, 16])
@pytest.mark.parametrize("role", SHAPES)
@pytest.mark.parametrize("tiling", QUANTISING, ids=str)
def test_products_that_quantise_are_as_good_as_the_format(tiling, role, tokens):
    """Against float64: a chunk's scale is no coarser than its row's, and both round."""
    from flashinfer_backend.ops import cuda_fp8
    from flashinfer_backend.ops.triton_fp8 import Norm

    rows, inner = SHAPES[role]
    weight, x = make_weight(role, "fp8_token", (rows, inner)), randn(tokens, inner, scale=2.0)
    x[-1, 5] = 80.0  # one value far beyond the others
    norm = Norm(randn(inner) * 0.1 + 1, 1e-5) if role in ("qkv", "gate_up") else None
    bias = randn(rows) if role == "qkv" else None
    residual = randn(tokens, rows) if role in ("o", "down") else None

    def finished(x: torch.Tensor) -> torch.Tensor:
        product = x @ (weight.data.double() * weight.scale[:, None]).t()
        if role == "gate_up":
            gate, up = product.chunk(2, -1)
            product = F.silu(gate) * up
        return product + sum(more.double() for more in (bias, residual) if more is not None)

    wide = x.double() if norm is None else torch_ops.rms_norm(x.double(), norm.weight.double(), norm.eps)
    exact = finished(wide)
    elements, scales = fp8.quantise_rows(wide.bfloat16())
    by_row = finished(elements.double() * scales)
    with device.use(quantising(tiling)):
        chosen = tilings.choose(weight.role, tokens, weight.data)
        assert chosen is not None and chosen.quantise
        found = cuda_fp8.product(x, weight, bias, residual, role == "gate_up", norm)
    assert found.dtype == torch.bfloat16
    error, allowed = ((each.double() - exact).norm(dim=1) / exact.norm(dim=1) for each in (found, by_row))
    assert error.isfinite().all()
    assert (error < 1.25 * allowed + 5e-3).all(), f"{error.tolist()}, by row {allowed.tolist()}"


@pytest.mark.parametrize("role", ["o", "gate_up", "down"])
@pytest.mark.parametrize("tiling", QUANTISING, ids=str)
def test_activations_with_stored_scales_are_quantised_before(tiling, role):
    from flashinfer_backend.ops import cuda_fp8

    weight = make_weight(role, "fp8_static", SHAPES[role])
    with device.use(quantising(tiling)):
        for tokens in (1, 7):
            x = randn(tokens, SHAPES[role][1], scale=2.0)
            assert_close(cuda_fp8.product(x, weight), weight.format.product(x.float(), weight), 2e-2)


@pytest.mark.parametrize("format", ["fp8_token", "fp8_static"])
@pytest.mark.parametrize("role", SHAPES)
def test_few_tokens_without_tilings_are_cublas(role, format):
    from flashinfer_backend.ops import cuda_fp8

    weight, x = make_weight(role, format, SHAPES[role]), randn(7, SHAPES[role][1], scale=2.0)
    with device.use(tuned.fallback()):
        assert_close(cuda_fp8.product(x, weight), weight.format.product(x.float(), weight), 2e-2)


@pytest.mark.parametrize("tokens", [1, 50, 300])
@pytest.mark.parametrize("role", ["gate_up", "down"])
@pytest.mark.parametrize("split", [1, 4])
def test_blocks_in_tiles_of_other_sizes(split, role, tokens):
    from flashinfer_backend.ops import cuda_fp8

    weight, x = make_weight(role, "fp8_block", SHAPES[role]), randn(tokens, SHAPES[role][1], scale=2.0)
    expected = weight.format.product(x.float(), weight)
    residual = randn(tokens, SHAPES[role][0])
    for size, rows, stages, warps in ((16, 128, 4, 4), (64, 64, 3, 8)):
        tile = BlockTile(size, rows, split, stages, warps)
        with device.use(with_blocks({role: entries((None, tile))})):
            assert_close(cuda_fp8.product(x, weight), expected, 1e-2)
            added = cuda_fp8.product(x, weight, residual=residual)
            assert_close(added, expected + residual, 1e-2)


@pytest.mark.parametrize("tokens", [1, 24, 64, 300])
def test_a_layer_of_kernels_that_start_early(tokens):
    """In a graph, where a kernel may start before the one before it has ended: the same bits as when each has
    the device for itself."""
    compare_with_waiting(tokens)


@pytest.mark.parametrize("fewest", [1, 10000])
@pytest.mark.parametrize("tokens", [1, 24, 64, 301])
def test_a_layer_of_blocks(tokens, fewest):
    """The same of blocks, whose quantising starts early: cuBLAS's, and Triton's."""
    with blocks_by_cublas(fewest):
        compare_with_waiting(tokens, "fp8_block")


@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("tiling", QUANTISING, ids=str)
def test_a_layer_of_kernels_that_quantise(tiling, tokens):
    """The same of those."""
    with device.use(quantising(tiling)):
        compare_with_waiting(tokens)


def compare_with_waiting(tokens: int, format: str = "fp8_token") -> None:
    from flashinfer_backend.ops import cuda_ops

    roles = ("qkv", "o", "gate_up", "down")
    qkv, o, gate_up, down = (make_weight(role, format, SHAPES[role]) for role in roles)
    norm, start = randn(4096) * 0.1 + 1, randn(tokens, 4096, scale=3.0)

    def layers(wait: bool) -> torch.Tensor:
        hidden = start.clone()
        for _ in range(6):
            for operation in (
                lambda h: cuda_ops.linear_add(
                    cuda_ops.norm_linear(h, norm, 1e-5, qkv, None)[:, :4096].contiguous(), o, h
                ),
                lambda h: cuda_ops.linear_add(cuda_ops.norm_gate_up_silu(h, norm, 1e-5, gate_up), down, h),
            ):
                hidden = operation(hidden)
                if wait:
                    torch.cuda.synchronize()
        return hidden

    graph, out = capture(lambda: layers(False))
    for _ in range(5):
        start.copy_(randn(tokens, 4096, scale=3.0))
        graph.replay()
        assert torch.equal(out, layers(True))


@pytest.mark.parametrize("format", KINDS)
def test_products_in_a_graph(format):
    from flashinfer_backend.ops import cuda_fp8

    weight = make_weight("qkv", format, SHAPES["qkv"])
    x = randn(16, 4096)
    check_replays(lambda: cuda_fp8.product(x, weight), lambda: x.copy_(randn(16, 4096)))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("layout", ["ct-dynamic", "modelopt", "blocks", "on-load", "some-layers"])
def test_engine(layout, kind, tmp_path):
    checkpoint = make_quantised(layout, kind, tmp_path / "model", **SIZES)
    knobs: dict[str, Any] = {"quantization": "fp8"} if layout == "on-load" else {}
    compare_engines(f"{layout} {kind}", checkpoint, SMALL | knobs, tmp_path)


@pytest.mark.parametrize("fewest", [1, 24])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_engine_with_blocks_by_cublas(kind, fewest, tmp_path):
    """All its steps, or those of 24 tokens and more; widths of 5 and 9 blocks, whose scales are padded."""
    sizes = SIZES | {"hidden_size": 640, "intermediate_size": 1152}
    checkpoint = make_quantised("blocks", kind, tmp_path / "model", **sizes)
    with blocks_by_cublas(fewest):
        compare_engines(f"blocks by cuBLAS from {fewest} on, {kind}", checkpoint, SMALL, tmp_path)


def test_what_the_kernels_do_not_compute_is_refused(tmp_path):
    folder = make_quantised("ct-dynamic", "llama", tmp_path / "model", **SIZES).folder
    with pytest.raises(ValueError, match="FP8 need dtype=bfloat16"):
        start_core(folder, **SMALL, dtype="float16")


def test_kv_cache_in_fp8_in_plain_torch(tmp_path):
    checkpoint = make_quantised("modelopt", "llama", tmp_path / "model", kv_scales=True, **SIZES)
    core = start_core(
        checkpoint.folder, **SMALL, dtype="float32", attention_backend="torch", kv_cache_dtype="fp8_e4m3"
    )
    prompt = torch.randint(3, 250, (20,), generator=torch.Generator().manual_seed(3)).tolist()
    with serve(core, tmp_path / "run") as client:
        (tokens,) = client.generate([prompt], SamplingParams(max_tokens=8, temperature=0.0))
    logits = checkpoint.logits(prompt + tokens, fp8_cache=True)[len(prompt) - 1 : -1]
    assert (logits.amax(-1) - logits[range(8), tokens]).max() < 0.5


def test_times() -> None:
    """Prints microseconds of each product, quantising its input included; asserts nothing."""
    print("\nproduct, tokens: us of bf16 | per token | quantising alone | scaled by cuBLAS | blocks |")
    print("FlashInfer's blocks; relative error per token with fast sums, with exact ones")
    for role, shape in SHAPES.items():
        copies = max(2, (200 << 20) // (shape[0] * shape[1]))
        kinds = ("dense", "fp8_token", "fp8_block")
        weights = {kind: [make_weight(role, kind, shape) for _ in range(copies)] for kind in kinds}
        for tokens in TOKENS:
            print(f"{role:8} {tokens:5} {times(randn(tokens, shape[1]), weights)}")


def scaled_by_cublas(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    from flashinfer_backend.ops import triton_fp8

    elements, scales = triton_fp8.quantise_rows(x)
    columns = weight.scale.unsqueeze(0)
    return torch._scaled_mm(
        elements, weight.data.t(), scale_a=scales, scale_b=columns, out_dtype=x.dtype, use_fast_accum=True
    )


def times(x: torch.Tensor, weights: dict[str, list[Weight]]) -> str:
    from flashinfer_backend.ops import cuda_fp8, triton_fp8

    dense, token, block = (weights[kind] for kind in ("dense", "fp8_token", "fp8_block"))
    works: list[Callable[[int], object]] = [
        lambda i: F.linear(x, dense[i].data),
        lambda i: cuda_fp8.product(x, token[i]),
        lambda i: triton_fp8.quantise_rows(x),
        lambda i: scaled_by_cublas(x, token[i]),
        lambda i: cuda_fp8.product(x, block[i]),
    ]
    if os.environ.get("FLASHINFER_BLOCKS"):
        from flashinfer.gemm import fp8_blockscale_gemm_sm90

        works.append(lambda i: fp8_blockscale_gemm_sm90(x, block[i].data, None, block[i].scale))
    expected = token[0].format.product(x.float(), token[0])
    errors = []
    with pytest.MonkeyPatch.context() as patch:
        for fast in (True, False):
            patch.setattr(cuda_fp8, "FAST_ACCUMULATION", fast)
            errors.append(float((cuda_fp8.product(x, token[0]) - expected).norm() / expected.norm()))
    row = " | ".join(f"{microseconds(work, len(dense)):7.1f}" for work in works)
    return f"{row}; {errors[0]:.1e} {errors[1]:.1e}"
