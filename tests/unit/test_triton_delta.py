# SPDX-License-Identifier: Apache-2.0
"""The kernels of gated delta net layers in Triton's interpreter, without a GPU, against plain torch in
float32; tests/gpu/test_delta.py runs the real ones."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from flashinfer_backend.ops import torch_delta


class Sizes(NamedTuple):
    key_heads: int
    value_heads: int
    dim: int


SMALL = Sizes(1, 2, 16)
# Sizes, lengths of rows and how many in front are known to be of one token.
CASES = [(SMALL, [1, 1, 1], 3), (SMALL, [1, 70, 128, 2], 1), (Sizes(2, 2, 32), [1, 3, 65], 0)]


def error(found: Tensor, exact: Tensor) -> float:
    """Relative, of the whole."""
    found = found.detach().cpu().double()
    assert found.isfinite().all()
    return float((found - exact.double()).norm() / exact.double().norm())


def check(sizes: Sizes, lengths: list[int], decodes: int, where: str, dtype: torch.dtype) -> None:
    """All kernels, of inputs that are parts of wider rows, as products give them."""
    from flashinfer_backend.ops import triton_delta

    heads, dim, tokens, rows = sizes.value_heads, sizes.dim, sum(lengths), len(lengths)
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    channels = 2 * sizes.key_heads * dim + heads * dim
    product = normal(tokens, channels + heads * dim + 2 * heads)
    product[1::3, :channels] = product[: tokens - 1 : 3, :channels][: len(product[1::3])]  # keys come again
    conv, past = normal(channels, 4), normal(rows + 2, channels, 3)
    a_log, dt_bias, norm = normal(heads), normal(heads), 1 + 0.1 * normal(dim)
    states = normal(rows + 2, heads, dim, dim)
    slots = torch.randperm(rows + 1, generator=generator)[:rows].int()
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    given = [x.to(dtype) for x in (product, conv, past, norm)]
    results = []
    for ops, device, kind in ((torch_delta, "cpu", torch.float32), (triton_delta, where, dtype)):
        x, weight, conv_states, norm_weight = (each.clone().to(device, kind) for each in given)
        qkv, z, a, b = x.split([channels, heads * dim, heads, heads], dim=-1)
        own_states, own_slots, own_starts = (t.clone().to(device) for t in (states, slots, starts))
        row = own_slots, own_starts, decodes
        convolved = ops.causal_conv(qkv, weight, conv_states, *row)
        gates = ops.delta_gates(a, b, a_log.to(device), dt_bias.to(device))
        split = convolved.split([sizes.key_heads * dim] * 2 + [heads * dim], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, dim)) for part in split)
        out = ops.gated_delta_rule(q, k, v, *gates, own_states, *row)
        normed = ops.gated_norm(out, z.unflatten(-1, (-1, dim)), norm_weight, 1e-6)
        results.append((convolved, *gates, own_states, conv_states, out, normed))
    names = "convolution", "decay", "beta", "states", "inputs", "results", "norm"
    # Products are of 16 bits, and what they are of is rounded several times.
    allowed = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[dtype]
    for name, plain, found in zip(names, *results, strict=True):
        assert error(found, plain) < allowed, f"{name}: {error(found, plain)}"
    others = [slot for slot in range(rows + 2) if slot not in slots.tolist()]
    assert torch.equal(results[1][3][others].cpu(), states[others])
    assert torch.equal(results[1][4].cpu().float(), results[0][4])  # inputs are kept as they are


def check_padding(where: str, dtype: torch.dtype) -> None:
    """Tokens behind the last row get zeros; of some steps' graphs these are padding."""
    from flashinfer_backend.ops import triton_delta

    x = torch.ones(9, 32, dtype=dtype, device=where)
    slots, starts = (torch.tensor(n, dtype=torch.int32, device=where) for n in ([0], [0, 3]))
    state = torch.zeros(1, 2, 16, 16, device=where)
    out = triton_delta.causal_conv(x, x[:4].t(), torch.zeros_like(x[:3].t())[None], slots, starts)
    heads, gates = x.unflatten(-1, (2, 16)), torch.full((9, 2), -0.5, device=where)
    results = triton_delta.gated_delta_rule(heads, heads, heads, gates, -gates, state, slots, starts)
    for found in (out, results):
        assert found[:3].all() and not found[3:].any()


def test_kernels_in_the_interpreter() -> None:
    """In a process of its own: what is interpreted is decided when Triton is imported."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    from flashinfer_backend.ops import triton_delta

    triton_delta.NATIVE = False
    for case in CASES:
        for dtype in (torch.float32, torch.float16):
            check(*case, "cpu", dtype)
    check_padding("cpu", torch.float32)
