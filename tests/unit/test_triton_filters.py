# SPDX-License-Identifier: Apache-2.0
"""The kernels of top-k with a small k in Triton's interpreter, without a GPU, against the definition of the
filters. tests/gpu/test_sampling.py runs the real ones."""

from __future__ import annotations

import torch
from interpreted import interpreted

from flashinfer_backend.sampling.filters import min_p_mask, sorted_mask


def check(
    logits: torch.Tensor, top_k: list[int], top_p: list[float], min_p: list[float], off: int = 0
) -> None:
    """off: how many tokens sums in another order may add or take away."""
    from flashinfer_backend.ops import triton_filters

    rows, given = torch.randperm(len(logits))[: len(top_k)], logits.clone()
    temperature = torch.rand(len(logits)) + 0.5
    k, p, m = torch.tensor(top_k, dtype=torch.int32), torch.tensor(top_p), torch.tensor(min_p)
    triton_filters.keep_likeliest(logits, rows, temperature, k, p, m, 64)
    scaled = given[rows] / temperature[rows].unsqueeze(1)
    kept = sorted_mask(scaled, k, p) & min_p_mask(scaled, m)
    expected = given[rows].masked_fill(~kept, float("-inf"))
    wrong = (logits[rows] != expected).sum(dim=1)
    assert (wrong <= off).all(), f"{top_k}, {top_p}, {min_p}: {wrong.tolist()}"
    others = torch.ones(len(logits), dtype=torch.bool)
    others[rows] = False
    assert torch.equal(logits[others], given[others])


def test_kernels_in_the_interpreter():
    interpreted(__file__)


if __name__ == "__main__":
    torch.manual_seed(0)
    for vocab in (64, 1000, 9001):
        # Of 16 bits: many logits are alike.
        logits = (torch.randn(6, vocab) * 3).bfloat16().float()
        logits[0, 5], logits[1, 3:9] = float("-inf"), torch.tensor([0.0, -0.0, 0.0, -0.0, 0.0, 1e30])
        most = min(vocab, 64)
        check(logits.clone(), [1, 20, most, 50], [1.0] * 4, [0.0] * 4)
        check(logits.clone(), [50, 20, most, 2, 1], [1.0] * 5, [0.0, 0.3, 1.0, 0.01, 0.5])
        check(logits.clone(), [50, 20, most, 50], [0.9, 0.5, 1e-6, 0.999], [0.0] * 4, off=2)
    alike = torch.zeros(3, 5000)
    alike[:, 100:103] = 2.0  # as many as the k of some row, fewer than that of others
    for share in (1.0, 0.3):
        for same in ([3] * 3, [2, 50, 64]):
            check(alike.clone(), same, [share] * 3, [0.0] * 3)
            check(torch.full((3, 5000), float("-inf")), same, [share] * 3, [0.0] * 3)
            check(torch.zeros(3, 5000), same, [share] * 3, [0.0] * 3)
    # All that is above the bound in few blocks: the 20 largest are neighbours.
    crowded = torch.randn(2, 9000)
    crowded[:, 130:190] += 20
    check(crowded.clone(), [20, 64], [1.0, 1.0], [0.0, 0.0])
