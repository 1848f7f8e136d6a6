# SPDX-License-Identifier: Apache-2.0
"""The rotary embedding's Triton kernel in Triton's interpreter, without a GPU; tests/gpu/test_ops.py runs the
real one."""

import torch
from interpreted import interpreted

from flashinfer_backend.ops import torch_ops

HEADS, KV_HEADS = 4, 2


def check(dim: int, rotated: int, norm: str, behind: int) -> None:
    """behind: columns of the product that are not queries, keys or values."""
    from flashinfer_backend.ops.triton_rope import rope_and_store

    torch.manual_seed(0)
    tokens, width = 5, (HEADS + 2 * KV_HEADS) * dim
    qkv = torch.randn(tokens, width + behind)[:, :width]
    positions = torch.randint(0, 50, (tokens,), dtype=torch.int32)
    angles = torch.rand(50, rotated // 2) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    places = torch.randperm(32)[:tokens].int()
    norms = [torch.rand(dim) + 0.5 if norm else None for _ in "qk"]
    found = []
    for ops in (rope_and_store, torch_ops.rope_and_store):
        cache = [torch.zeros(2, 16, KV_HEADS, dim) for _ in "kv"]
        own = (*cache, places, *norms, 1e-6, HEADS, KV_HEADS)
        q = ops(qkv, positions, cos_sin, *own, norm_rotated=norm == "rotated")
        found.append((q, *cache))
    for mine, right in zip(*found, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)


def test_in_the_interpreter() -> None:
    interpreted(__file__)


if __name__ == "__main__":
    from flashinfer_backend.ops import triton_rope

    triton_rope.gdc_wait = triton_rope.gdc_launch_dependents = lambda: None  # of kernels that follow another
    for norm in ("", "head", "rotated"):
        for rotated in (0, 48) if norm else (0, 16, 32, 48, 64):
            check(64, rotated, norm, behind=0)
        check(48, 12, norm, behind=96)
