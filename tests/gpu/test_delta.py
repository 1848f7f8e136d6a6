# SPDX-License-Identifier: Apache-2.0
"""The kernels of gated delta net layers on a GPU, at models' shapes, against plain torch in float32; and in a
CUDA graph."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from flashinfer_backend.ops import torch_delta

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from test_triton_delta import CASES, Sizes, check, check_padding

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
QWEN = Sizes(16, 32, 128)  # Qwen3-Next-80B-A3B, Qwen3.5-9B, 35B-A3B
LARGE = [
    (QWEN, [1], 1),
    (QWEN, [1] * 67, 67),
    (QWEN, [1, 1, 1500, 64, 65, 3, 129], 2),
    (QWEN, [2] * 150, 0),  # more rows than the smaller kernels look through
    (Sizes(16, 48, 128), [1, 200], 1),  # 27B
    (Sizes(8, 16, 128), [1, 1, 300], 2),  # a rank of two
    (Sizes(16, 64, 128), [1, 100], 1),  # 122B-A10B
]


@pytest.mark.parametrize("case", CASES + LARGE, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_kernels_compute_what_torch_does(case: tuple[Sizes, list[int], int], dtype: torch.dtype) -> None:
    check(*case, "cuda", dtype)


def test_padding_gets_zeros() -> None:
    check_padding("cuda", torch.bfloat16)


def test_long_rows_keep_their_states_right() -> None:
    """Errors do not add up over many chunks, nor where all keys are nearly the same."""
    from flashinfer_backend.ops import triton_delta

    torch.manual_seed(0)
    tokens, heads, dim = 8192, 4, 128
    q, v = (torch.randn(tokens, heads, dim, device="cuda").bfloat16() for _ in "qv")
    slots, starts = (torch.tensor(n, dtype=torch.int32, device="cuda") for n in ([0], [0, tokens]))
    beta = torch.rand(tokens, heads, device="cuda")
    for spread, slowest in ((1.0, -0.01), (0.03, -0.01), (0.03, -1e-6)):
        k = (torch.randn(heads, dim, device="cuda") + spread * torch.randn_like(q.float())).bfloat16()
        decay = slowest * torch.rand(tokens, heads, device="cuda")
        results = []
        for ops in (torch_delta, triton_delta):
            kind = torch.float32 if ops is torch_delta else torch.bfloat16
            states = torch.zeros(1, heads, dim, dim, device="cuda")
            own = (x.to(kind) for x in (q, k, v))
            results.append((ops.gated_delta_rule(*own, decay, beta, states, slots, starts).float(), states))
        for exact, found in zip(*results, strict=True):
            assert float((found - exact).norm() / exact.norm()) < 1.5e-2, (spread, slowest)


def test_decode_steps_are_graphs() -> None:
    """Replayed, a graph goes on from the states that it left."""
    from flashinfer_backend.ops import triton_delta

    torch.manual_seed(0)
    rows, heads, dim = 5, 32, 128
    inputs = [torch.randn(rows, n, dim, device="cuda").bfloat16() for n in (16, 16, heads)]
    gates = [-torch.rand(rows, heads, device="cuda"), torch.rand(rows, heads, device="cuda")]
    slots = torch.tensor([3, 0, 6, 1, 5], dtype=torch.int32, device="cuda")
    starts = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
    states, weight = torch.zeros(7, heads, dim, dim, device="cuda"), torch.randn(dim, 4, device="cuda")
    past = torch.zeros(7, dim, 3, device="cuda").bfloat16()

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        out = triton_delta.gated_delta_rule(*inputs, *gates, states, slots, starts, rows)
        return out, triton_delta.causal_conv(inputs[0][:, 0], weight.bfloat16(), past, slots, starts, rows)

    expected = [[x.clone() for x in step()] for _ in range(4)][-1]
    states.zero_()
    past.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(4):
        graph.replay()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
