# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of FP8 weights with 128x128 blocks in Triton's interpreter, without a GPU: which element
and which scale go where; and what cuBLAS would get, multiplied as its documentation says.
tests/gpu/test_fp8.py runs the real ones.
"""

import os
import sys

import torch
import torch.nn.functional as F
from interpreted import interpreted
from msgspec.structs import replace

from flashinfer_backend.ops import fp8

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))
from test_triton_linear import exact_conversions

NORM = 1e-5
# Tokens, columns, and whether a norm is part of it.
QUANTISED = [(1, 128, False), (3, 640, False), (4, 640, True), (7, 2304, False), (9, 2304, True)]
# Tokens, tile, rows of a tile, split; weight rows and columns; gated, residual.
PRODUCTS = [
    (1, 16, 64, 1, 256, 640, False, False),
    (7, 16, 64, 5, 256, 640, False, True),
    (16, 16, 128, 1, 384, 512, False, True),
    (20, 16, 64, 2, 192, 512, False, False),
    (37, 32, 128, 4, 256, 512, True, False),
]

# Tokens, parts of the product, and columns of the result.
ACTIVATED = [(4, 1, 128), (7, 1, 2304), (9, 4, 640)]
# Tokens, role, weight rows and columns.
BY_CUBLAS = [(1, "qkv", 256, 128), (7, "down", 256, 640), (16, "gate_up", 512, 512), (18, "o", 384, 1152)]


def spread_out(*shape: int) -> torch.Tensor:
    """Numbers whose groups of 128 columns, and whose rows, differ by orders of magnitude: a scale in a wrong
    place shows."""
    size = torch.logspace(-1, 1, shape[1] // 128).repeat_interleave(128)
    return torch.randn(shape) * size * torch.logspace(0, 1, shape[0])[:, None]


def check_quantised(tokens: int, inner: int, normed: bool) -> None:
    from flashinfer_backend.ops import triton_fp8

    x = spread_out(tokens, inner).bfloat16()
    x[tokens // 2, :128] = 0
    norm = triton_fp8.Norm((torch.rand(inner) + 0.5).bfloat16(), NORM) if normed else None
    kept = torch.empty_like(x) if normed else None
    elements, scales = triton_fp8.quantise_groups(x, norm, kept)
    if norm:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM) * norm.weight.float()
        x = wide.bfloat16()
        torch.testing.assert_close(kept, x, rtol=1e-2, atol=0)  # the last bit
    expected, expected_scales = fp8.quantise_groups(x)
    rows = -(-tokens // 4) * 4
    assert elements.shape == (rows, inner) and scales.shape == (rows, inner // 128)
    assert scales.stride() == (1, rows)
    if norm is None:
        assert torch.equal(elements[:tokens].float(), expected.float())
        assert torch.equal(scales[:tokens], expected_scales)
    else:  # the norm's last bit
        assert torch.allclose(scales[:tokens], expected_scales, rtol=1e-2)
        found = elements[:tokens].float() * fp8.spread(scales[:tokens], inner)
        assert (found - x.float()).norm() < 0.04 * x.float().norm()
    assert (elements[tokens:].float() == 0).all() and scales[tokens:].isfinite().all()


def check_product(tokens, tile, tile_rows, split, rows, inner, gated, residual) -> None:
    from flashinfer_backend.core.tuned import BlockTile
    from flashinfer_backend.ops import triton_fp8
    from flashinfer_backend.ops.weight import Weight

    x, values = spread_out(tokens, inner).bfloat16(), spread_out(rows, inner)
    weight = Weight.empty("down", (rows, inner), "fp8_block", torch.bfloat16, torch.device("cpu"))
    weight.format.fill(weight, values)
    added = torch.randn(tokens, rows).bfloat16() if residual else None
    block = BlockTile(tile, tile_rows, split, stages=2)
    quantised = triton_fp8.quantise_groups(x)
    found = triton_fp8.block_product(*quantised, weight.data, weight.scale, block, tokens)
    assert found.shape == ((split, tokens, rows) if split > 1 else (tokens, rows))
    if split > 1 or gated or residual:
        found = triton_fp8.finish(found, None, None, None, added, gated)
    expected = weight.format.product(x.float(), weight)
    if gated:
        gate, up = expected.chunk(2, -1)
        expected = F.silu(gate) * up
    if added is not None:
        expected = expected + added
    assert found.dtype == torch.bfloat16 and found.shape == expected.shape
    error = (found.float() - expected).norm(dim=1) / expected.norm(dim=1)
    assert (error < 1e-2).all(), error.tolist()


def check_activated(tokens: int, parts: int, inner: int) -> None:
    from flashinfer_backend.ops import triton_fp8

    product = torch.stack([spread_out(tokens, 2 * inner) for _ in range(parts)])
    product[:, tokens // 2, :128] = 0
    product = product[0].bfloat16() if parts == 1 else product
    found = triton_fp8.finish_quantised(product)
    expected = triton_fp8.quantise_groups(triton_fp8.finish(product, gated=True))
    for own, by_two in zip(found, expected, strict=True):
        assert own.shape == by_two.shape and own.stride() == by_two.stride()
        assert torch.equal(own.float(), by_two.float())


def check_mlp(tokens: int, split: int) -> None:
    """One sequence of kernels for both products of an MLP, and two products: the same numbers."""
    from flashinfer_backend.core import tuned
    from flashinfer_backend.core.tuned import BlockTile, Entry
    from flashinfer_backend.ops import cuda_fp8, device
    from flashinfer_backend.ops.weight import Weight

    hidden, inner, where = 256, 384, torch.device("cpu")
    gate_up = Weight.empty("gate_up", (2 * inner, hidden), "fp8_block", torch.bfloat16, where)
    down = Weight.empty("down", (hidden, inner), "fp8_block", torch.bfloat16, where)
    for weight in (gate_up, down):
        weight.format.fill(weight, spread_out(*weight.shape))
    x, residual = spread_out(tokens, hidden).bfloat16(), torch.randn(tokens, hidden).bfloat16()
    norm, bias = cuda_fp8.Norm((torch.rand(hidden) + 0.5).bfloat16(), NORM), torch.randn(hidden).bfloat16()
    blocks = dict.fromkeys(("gate_up", "down"), (Entry(None, ((None, BlockTile(16, 64, split)),)),))
    numbers = replace(tuned.fallback(), linear_blocks={})
    with device.use(replace(numbers, blocks_fp8=numbers.blocks_fp8 | blocks)):
        activated = cuda_fp8.product(x, gate_up, gated=True, norm=norm)
        for added in ({"bias": None, "residual": None}, {"bias": bias, "residual": residual}):
            found = cuda_fp8.mlp(x, gate_up, down, norm, **added)
            assert found is not None
            assert torch.equal(found, cuda_fp8.product(activated, down, **added))
        by_row = Weight.empty("down", (hidden, inner), "fp8_token", torch.bfloat16, where)
        assert cuda_fp8.mlp(x, gate_up, by_row, norm, None, None) is None
    tiling = tuned.Tiling(16, 64, 128)
    few = replace(numbers, linear_blocks={"down": (Entry(None, ((tokens, tiling),)),)})
    with device.use(few):  # down's own kernel, of few tokens
        assert cuda_fp8.mlp(x, gate_up, down, norm, None, None) is None


def check_row_tiles(tokens: int, gated: bool) -> None:
    """What a product hands to the CUDA kernel for few tokens, for which plain torch stands in: that gives
    what Triton's kernels do."""
    from flashinfer_backend.core import tuned
    from flashinfer_backend.core.tuned import Entry, RowTile
    from flashinfer_backend.ops import blocks_linear, cuda_fp8, device
    from flashinfer_backend.ops.weight import Weight

    tile, calls = RowTile(2, 3), []

    def kernel(elements, x_scales, weight, scales, tokens, own, bias, residual, gated):
        calls.append(own)
        wide = elements.float() * fp8.spread(x_scales, weight.shape[1])
        product = (wide @ (weight.float() * fp8.spread(scales, weight.shape[1], len(weight))).T)[:tokens]
        if gated:
            gate, up = product.chunk(2, -1)
            product = F.silu(gate) * up
        return (product + (0 if bias is None else bias) + (0 if residual is None else residual)).bfloat16()

    blocks_linear.takes, blocks_linear.blocks_linear = lambda weight: True, kernel
    weight = Weight.empty("o", (512, 384), "fp8_block", torch.bfloat16, torch.device("cpu"))
    weight.format.fill(weight, spread_out(512, 384))
    x, norm = spread_out(tokens, 384).bfloat16(), cuda_fp8.Norm((torch.rand(384) + 0.5).bfloat16(), NORM)
    columns = 256 if gated else 512
    added = {"bias": torch.randn(columns).bfloat16(), "residual": torch.randn(tokens, columns).bfloat16()}
    cases = [{"norm": norm}, added, {"quantised": cuda_fp8.triton_fp8.quantise_groups(x)}]
    numbers = replace(tuned.fallback(), linear_blocks={})
    with device.use(numbers):
        expected = [cuda_fp8.product(x, weight, gated=gated, **case) for case in cases]
        assert not calls
    with device.use(replace(numbers, blocks_linear={"o": (Entry(None, ((tokens, tile),)),)})):
        found = [cuda_fp8.product(x, weight, gated=gated, **case) for case in cases]
        assert cuda_fp8.mlp(x, weight, weight, norm, None, None) is None
    assert calls == [tile] * 3
    for own, triton in zip(found, expected, strict=True):
        torch.testing.assert_close(own, triton, rtol=2e-2, atol=2e-2 * float(triton.abs().max()))


def as_cublas_does(x, weight, x_scales, x_kind, scales, kind, output_dtype) -> torch.Tensor:
    """From the numbers in memory: https://docs.nvidia.com/cuda/cublas/#scaling-factors-layouts. Of x, M is
    padded to a multiple of 4, and the scales of a group of 128 columns are M neighbours; of the weight, those
    of 128 rows are neighbours, of which there is a multiple of 4."""
    (rows, inner), columns = x.shape, weight.shape[1]
    assert rows % 4 == 0 and x.is_contiguous() and weight.t().is_contiguous()
    groups, blocks = inner // 128, columns // 128
    assert (x_kind, kind) == (F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128)
    assert x_scales.shape == (rows, groups) and x_scales.stride() == (1, rows)
    assert scales.shape[0] % 4 == 0 and scales.shape[1] == blocks and scales.stride() == (1, scales.shape[0])
    in_memory = x_scales.as_strided((groups * rows,), (1,)), scales.as_strided((scales.numel(),), (1,))
    product = torch.zeros(rows, columns)
    for group in range(groups):
        part = slice(128 * group, 128 * group + 128)
        of_rows = in_memory[0][group * rows :][:rows]
        of_columns = in_memory[1][group :: len(scales)].repeat_interleave(128)
        product += (x[:, part].float() @ weight[part].float()) * of_rows[:, None] * of_columns
    return product.to(output_dtype)


def check_cublas(tokens: int, role: str, rows: int, inner: int) -> None:
    from flashinfer_backend.core import tuned
    from flashinfer_backend.core.tuned import BlockTile, Entry
    from flashinfer_backend.ops import cuda_fp8, device
    from flashinfer_backend.ops.weight import Weight

    x = spread_out(tokens, inner).bfloat16()
    weight = Weight.empty(role, (rows, inner), "fp8_block", torch.bfloat16, torch.device("cpu"))
    weight.format.fill(weight, spread_out(rows, inner))
    residual = torch.randn(tokens, rows).bfloat16() if role == "down" else None
    expected = weight.format.product(x.float(), weight)
    if role == "gate_up":
        gate, up = expected.chunk(2, -1)
        expected = F.silu(gate) * up
    if residual is not None:
        expected = expected + residual
    numbers = tuned.fallback()
    blocks = numbers.blocks_fp8 | {role: (Entry(None, ((tokens - 1, BlockTile(16, 64)), (None, None))),)}
    with device.use(replace(numbers, blocks_fp8=blocks)):
        found = cuda_fp8.product(x, weight, residual=residual, gated=role == "gate_up")
    assert found.shape == expected.shape and found.is_contiguous()
    error = (found.float() - expected).norm(dim=1) / expected.norm(dim=1)
    assert (error < 1e-2).all(), error.tolist()


def test_blocks_in_the_interpreter():
    interpreted(__file__)


if __name__ == "__main__":
    from flashinfer_backend.ops import triton_fp8

    torch.manual_seed(0)
    triton_fp8.NATIVE = False
    exact_conversions()
    for quantised in QUANTISED:
        check_quantised(*quantised)
    triton_fp8.PIECES_FROM, triton_fp8.PIECE = 5, 4
    check_quantised(6, 2304, True)  # 18 groups, in five pieces, of which the last has two
    for product in PRODUCTS:
        check_product(*product)
    for activated in ACTIVATED:
        check_activated(*activated)
    for mlp in ((7, 1), (20, 3)):
        check_mlp(*mlp)
    F.scaled_mm = as_cublas_does
    for by_cublas in BY_CUBLAS:
        check_cublas(*by_cublas)
    for rows in ((1, True), (5, False)):
        check_row_tiles(*rows)
