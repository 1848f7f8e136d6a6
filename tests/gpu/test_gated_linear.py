# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernel of the gate and up products, every tile of it."""

import pytest
import torch

from flashinfer_backend.ops import gated_linear, torch_ops
from flashinfer_backend.ops.fp8 import E4M3, quantise_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]


def inputs(tokens, inner, hidden, dtype=torch.bfloat16):
    torch.manual_seed(tokens)
    x = torch.randn(tokens, hidden, device="cuda", dtype=dtype)
    weight = (torch.randn(2 * inner, hidden, device="cuda") * hidden**-0.5).to(dtype)
    gate, up = (x.float() @ weight.float().t()).chunk(2, dim=1)
    return x, weight, torch.nn.functional.silu(gate) * up


def relative_error(actual, expected):
    return ((actual.float() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("tile", gated_linear.TILES)
@pytest.mark.parametrize("tokens", [1, 65, 300, 777])
def test_every_tile_writes_all_of_its_output_and_nothing_else(tile, tokens):
    x, weight, expected = inputs(tokens, 1536, 1024)
    out = torch.full((tokens + 300, 1536), float("nan"), device="cuda", dtype=torch.bfloat16)
    module = gated_linear.module(torch.bfloat16, x.device)
    module.gated_linear(out[:tokens], x, weight, tile, 132)
    assert relative_error(out[:tokens], expected) < 5e-3
    assert out[tokens:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inner, hidden", [(14336, 4096), (18944, 3584), (64, 64), (8960, 1536)])
@pytest.mark.parametrize("tokens", [65, 200, 1100, 2500])
def test_shapes(tokens, inner, hidden, dtype):
    x, weight, expected = inputs(tokens, inner, hidden, dtype)
    assert gated_linear.takes(weight)
    assert relative_error(gated_linear.gated_linear(x, weight), expected) < 5e-3


def fp8_inputs(tokens, inner, hidden):
    """x, its scales, weight, its scales; and the result of exactly these in float32."""
    x, weight, _ = inputs(tokens, inner, hidden)
    x = x * torch.linspace(0.01, 30, tokens, device="cuda")[:, None]  # each token and row has another scale
    weight = weight * torch.linspace(0.5, 2, 2 * inner, device="cuda")[:, None]
    (x, x_scales), (weight, scales) = quantise_rows(x.bfloat16()), quantise_rows(weight.bfloat16())
    product = (x.double() @ weight.double().t()) * x_scales * scales[:, 0]
    gate, up = product.chunk(2, dim=1)
    return x, x_scales, weight, scales[:, 0].contiguous(), torch.nn.functional.silu(gate) * up


def worst_row_error(actual, expected):
    return ((actual.double() - expected).norm(dim=1) / expected.norm(dim=1)).max().item()


@pytest.mark.parametrize("tile", gated_linear.TILES)
@pytest.mark.parametrize("tokens", [1, 65, 300, 777])
def test_every_tile_of_fp8_writes_all_of_its_output_and_nothing_else(tile, tokens):
    x, x_scales, weight, scales, expected = fp8_inputs(tokens, 1536, 1024)
    out = torch.full((tokens + 300, 1536), float("nan"), device="cuda", dtype=torch.bfloat16)
    gated_linear.module(E4M3, x.device).gated_linear_scaled(
        out[:tokens], x, weight, x_scales, scales, tile, 132
    )
    assert worst_row_error(out[:tokens], expected) < 2e-2
    assert out[tokens:].isnan().all()


@pytest.mark.parametrize("inner, hidden", [(14336, 4096), (18944, 3584), (64, 128), (8960, 1536)])
@pytest.mark.parametrize("tokens", [1, 66, 200, 1101, 2500])
def test_shapes_of_fp8(tokens, inner, hidden):
    x, x_scales, weight, scales, expected = fp8_inputs(tokens, inner, hidden)
    assert gated_linear.takes(weight)
    assert worst_row_error(gated_linear.gated_linear_scaled(x, weight, x_scales, scales), expected) < 2e-2


def test_a_module_takes_its_own_elements_alone():
    x, _, weight, _, _ = fp8_inputs(65, 64, 128)
    out = torch.empty(65, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="gated_linear_scaled for e4m3"):
        gated_linear.module(E4M3, x.device).gated_linear(out, x, weight, 64, 132)


def test_fewer_sms_than_there_are_tiles_and_more():
    x, weight, expected = inputs(500, 1536, 1024)
    module = gated_linear.module(torch.bfloat16, x.device)
    for sms in (1, 7, 132):
        out = torch.empty(500, 1536, device="cuda", dtype=torch.bfloat16)
        module.gated_linear(out, x, weight, 128, sms)
        assert relative_error(out, expected) < 5e-3


def test_waits_for_the_kernel_before_it():
    """Launches overlap: the input of a long chain must be the finished output of the kernel before."""
    x, weight, _ = inputs(512, 4096, 4096)
    ones = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
    eager = graphed = x
    for _ in range(20):
        eager = gated_linear.gated_linear(torch_ops.rms_norm(eager, ones, 1e-5), weight)
        torch.cuda.synchronize()
    from flashinfer_backend.ops import cuda_ops

    graph = torch.cuda.CUDAGraph()
    cuda_ops.rms_norm(x, ones, 1e-5)
    with torch.cuda.graph(graph):
        for _ in range(20):
            graphed = gated_linear.gated_linear(cuda_ops.rms_norm(graphed, ones, 1e-5), weight)
    graph.replay()
    torch.cuda.synchronize()
    assert relative_error(graphed, eager.float()) < 0.05
    first = graphed.clone()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(first, graphed)


def test_what_it_does_not_take():
    def weight(rows, inner, dtype=torch.bfloat16):
        return torch.empty(rows, inner, device="cuda", dtype=dtype)

    assert gated_linear.takes(weight(256, 128))
    assert not gated_linear.takes(weight(192, 128))
    assert not gated_linear.takes(weight(256, 96))
    assert not gated_linear.takes(weight(256, 128, torch.float32))
    assert gated_linear.takes(weight(256, 128, E4M3))
    assert not gated_linear.takes(weight(256, 192, E4M3))
