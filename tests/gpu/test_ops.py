# SPDX-License-Identifier: Apache-2.0
"""Every CUDA operation against ops.torch_ops in float32 on the same bfloat16 inputs."""

import comparing
import pytest
import torch

from flashinfer_backend.ops import torch_ops
from flashinfer_backend.ops.weight import Weight

pytestmark = pytest.mark.gpu

HEADS = [(32, 8, 128), (28, 4, 128), (16, 8, 128), (32, 32, 128), (32, 8, 64)]
TOKENS = [1, 3, 8, 16, 17, 33, 64, 65, 96, 128, 200, 256, 272, 1000]


@pytest.fixture
def ops():
    from flashinfer_backend.ops import cuda_ops

    return cuda_ops


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def randn(*shape, scale=1.0):
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def assert_close(actual, expected, bound=6e-3):
    comparing.assert_close(actual, expected, bound)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("rows, hidden", [(6144, 4096), (1280, 1024), (4608, 3584)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_norm_linear(ops, tokens, rows, hidden, with_bias):
    x, weight = randn(tokens, hidden, scale=3.0), randn(rows, hidden, scale=hidden**-0.5)
    norm, bias = randn(hidden) * 0.1 + 1, randn(rows) if with_bias else None
    before, role = x.clone(), "qkv" if rows < 32768 else "head"
    expected = torch_ops.norm_linear(
        x.float(), norm.float(), 1e-5, Weight(role, weight.float()), None if bias is None else bias.float()
    )
    assert_close(ops.norm_linear(x, norm, 1e-5, Weight(role, weight), bias), expected)
    if bias is None:
        out = torch.empty_like(expected, dtype=x.dtype)
        assert ops.norm_linear(x, norm, 1e-5, Weight(role, weight), None, out=out) is out
        assert_close(out, expected)
    assert torch.equal(x, before)


def test_the_norm_of_no_rows(ops):
    """As in a step with parts of prompts alone."""
    assert ops.rms_norm(randn(0, 512), randn(512), 1e-5).shape == (0, 512)
    assert ops.rms_norm(randn(1, 512), randn(512), 1e-5).isfinite().all()  # no error was left behind


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("rows, inner", [(4096, 4096), (4096, 14336), (3584, 18944), (1024, 3072)])
def test_linear_add(ops, tokens, rows, inner):
    x, weight, residual = randn(tokens, inner), randn(rows, inner, scale=inner**-0.5), randn(tokens, rows)
    role = "down" if inner > rows else "o"
    for bias in (None, randn(rows)):
        wide = None if bias is None else bias.float()
        expected = torch_ops.linear_add(x.float(), Weight(role, weight.float()), residual.float(), None, wide)
        assert_close(ops.linear_add(x, Weight(role, weight), residual.clone(), None, bias), expected)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("inner, hidden", [(14336, 4096), (3072, 1024), (18944, 3584)])
def test_norm_gate_up_silu(ops, tokens, inner, hidden):
    x, weight = randn(tokens, hidden, scale=3.0), randn(2 * inner, hidden, scale=hidden**-0.5)
    norm = randn(hidden) * 0.1 + 1
    expected = torch_ops.norm_gate_up_silu(x.float(), norm.float(), 1e-5, Weight("gate_up", weight.float()))
    assert_close(ops.norm_gate_up_silu(x, norm, 1e-5, Weight("gate_up", weight)), expected, 1e-2)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("biased", [False, True])
def test_linear(ops, tokens, biased):
    x, weight = randn(tokens, 4096), randn(6144, 4096, scale=4096**-0.5)
    bias = randn(6144) if biased else None
    wide = None if bias is None else bias.float()
    expected = torch_ops.linear(x.float(), Weight("qkv", weight.float()), wide)
    assert_close(ops.linear(x, Weight("qkv", weight), bias), expected)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu2"])
def test_activate(ops, tokens, activation):
    x = randn(tokens, 6144)
    assert_close(ops.activate(x, activation), torch_ops.activate(x.float(), activation), 1e-2)


def test_products_repeat_bit_for_bit(ops):
    """Split sums are added in one order, so a replayed request gives the same tokens."""
    for tokens in (1, 16, 64):
        x, weight, residual = randn(tokens, 14336), randn(4096, 14336, scale=0.01), randn(tokens, 4096)
        weight = Weight("down", weight)
        first = ops.linear_add(x, weight, residual.clone())
        for _ in range(20):
            assert torch.equal(first, ops.linear_add(x, weight, residual.clone()))


@pytest.mark.parametrize("tokens", [1, 5, 64, 777])
@pytest.mark.parametrize("heads, kv_heads, dim", HEADS)
@pytest.mark.parametrize("norm", ["", "head", "rotated"])
@pytest.mark.parametrize("part", [1, 4])
def test_rope_and_store(ops, tokens, heads, kv_heads, dim, norm, part):
    """Of whole heads, and of a quarter, where the product has other columns behind the values."""
    blocks, block_size, width = 80, 16, (heads + 2 * kv_heads) * dim
    qkv = randn(tokens, width + (part - 1) * dim)[:, :width]
    positions = torch.randint(0, 5000, (tokens,), device="cuda", dtype=torch.int32)
    rotated = dim // part
    angles = torch.outer(torch.arange(5000.0), 1 / 1e4 ** (torch.arange(0, rotated, 2) / rotated)).cuda()
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    caches = [randn(blocks, block_size, kv_heads, dim) for _ in range(2)]
    locations = torch.randperm(blocks * block_size, device="cuda")[:tokens].int()
    q_norm, k_norm = (randn(dim) + 1, randn(dim) + 1) if norm else (None, None)
    expected_caches = [cache.clone() for cache in caches]
    arguments = (locations, q_norm, k_norm, 1e-6, heads, kv_heads)
    torch.cuda.synchronize()
    late = {"norm_rotated": norm == "rotated"}
    expected = torch_ops.rope_and_store(qkv, positions, cos_sin, *expected_caches, *arguments, **late)
    actual = ops.rope_and_store(qkv, positions, cos_sin, *caches, *arguments, **late)
    assert_close(actual, expected)
    assert_close(caches[0], expected_caches[0])
    assert torch.equal(caches[1], expected_caches[1])
    untouched = torch.ones(blocks * block_size, dtype=torch.bool, device="cuda")
    untouched[locations.long()] = False
    for cache, reference in zip(caches, expected_caches, strict=True):
        flat, other = cache.view(blocks * block_size, -1), reference.view(blocks * block_size, -1)
        assert torch.equal(flat[untouched], other[untouched])


@pytest.mark.parametrize("rows, vocab", [(1, 128256), (7, 151936), (256, 32000), (3, 100)])
def test_sample_matches_the_reference(ops, rows, vocab):
    logits = randn(rows, vocab, scale=4.0)
    temperature = torch.rand(rows, device="cuda") * 1.5
    temperature[::3] = 0
    seed = torch.randint(-(2**62), 2**62, (rows,), device="cuda")
    position = torch.randint(0, 100000, (rows,), device="cuda", dtype=torch.int32)
    expected = torch_ops.sample(logits, temperature, seed, position)
    actual = ops.sample(logits, temperature, seed, position)
    assert actual.dtype == torch.int32
    # The logarithms of two libraries may order two nearly equal scores differently.
    assert (actual != expected).sum() <= rows // 100
    assert torch.equal(actual[::3], expected[::3])


def test_sample_ignores_the_row(ops):
    logits = randn(1, 32000).expand(64, -1).contiguous()
    temperature = torch.full((64,), 0.8, device="cuda")
    seed, position = (
        torch.full((64,), 1234567890123, device="cuda"),
        torch.full((64,), 17, device="cuda").int(),
    )
    assert len(ops.sample(logits, temperature, seed, position).unique()) == 1
    spread = ops.sample(logits, temperature, torch.arange(64, device="cuda"), position)
    assert len(spread.unique()) > 32


def test_sample_breaks_ties_towards_the_lowest_id(ops):
    logits = torch.zeros(2, 128256, device="cuda", dtype=torch.bfloat16)
    logits[1, 70000:] = 1
    zeros = torch.zeros(2, device="cuda")
    assert ops.sample(logits, zeros, zeros.long(), zeros.int()).tolist() == [0, 70000]


def test_interface_to_cublas_is_put_back():
    from flashinfer_backend.core import tuned
    from flashinfer_backend.ops import cublas, device

    numbers = tuned.load("NVIDIA H200")
    assert numbers is not None
    before = torch.backends.cuda.preferred_blas_library()
    weight = torch.empty(4096, 4096, device="meta")
    with device.use(numbers), pytest.raises(ZeroDivisionError), cublas.library(weight, 96):
        assert torch.backends.cuda.preferred_blas_library() != before
        raise ZeroDivisionError
    assert torch.backends.cuda.preferred_blas_library() == before
    with device.use(numbers), cublas.library(weight, 128):
        assert torch.backends.cuda.preferred_blas_library() == before
