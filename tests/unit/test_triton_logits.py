# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels that change logits, in its interpreter, without a GPU: bit for bit those of plain torch,
and of top-k with a small k, as the filters are defined. tests/gpu/test_sampling.py runs the real ones."""

import torch
from interpreted import interpreted

from flashinfer_backend.ops import torch_ops
from flashinfer_backend.ops.torch_ops import Penalties
from flashinfer_backend.sampling.filters import min_p_mask, sorted_mask

EXTREMES = [float("nan"), float("inf"), float("-inf"), 3e38, -3e38]


def check_copies() -> None:
    from flashinfer_backend.ops import triton_logits

    logits = torch.randn(5, 5000).bfloat16()
    logits[3, [0, 1, 4999, 4096, 77]] = torch.tensor(EXTREMES).bfloat16()
    for rows in (torch.tensor([3]), torch.tensor([4, 0, 3])):
        for bounded in (False, True):
            own = triton_logits.copy_rows(logits, rows, bounded)
            torch.testing.assert_close(
                own, torch_ops.copy_rows(logits, rows, bounded), rtol=0, atol=0, equal_nan=True
            )


def check_penalties(vocab: int) -> None:
    """Repeats, prompts and generated tokens, of more tokens than the kernel takes at a time; some rows have
    no penalty of one kind, one row none at all."""
    from flashinfer_backend.ops import triton_logits

    rows, slots, length = 6, 9, 5000
    history = torch.randint(vocab, (slots, length), dtype=torch.int32)
    history[:, 40:60] = 3
    logits = torch.randn(rows, vocab) * 4
    logits[2, :5] = torch.tensor(EXTREMES)
    logits = torch_ops.keep_finite(logits)
    of = Penalties(
        torch.tensor([2, 5, 0, 1, 4]),
        torch.tensor([8, 0, 3, 4, 1]),
        torch.tensor([20, 1, 3000, 50, 70], dtype=torch.int32),
        torch.tensor([1.1, 1.0, 1.7, 0.3, 1.0]),
        torch.tensor([0.2, 0.0, 0.3, -1.0, 0.7]),
        torch.tensor([0.3, 0.7, 0.0, 1.3, 0.0]),
    )
    position = torch.tensor([4321, 1, 60, 77, 70, 2048], dtype=torch.int32)
    expected = logits.clone()
    torch_ops.penalise(expected, of, history, position)
    own = logits.clone()
    triton_logits.penalise(own, of, history, position)
    assert torch.equal(own, expected)
    assert (own != logits).any(dim=1).tolist() == [True, True, True, False, False, True]


def check_filters(
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
    check_copies()
    for size in (50, 3000):
        check_penalties(size)
    for vocab in (64, 1000, 9001):
        # Of 16 bits: many logits are alike.
        logits = (torch.randn(6, vocab) * 3).bfloat16().float()
        logits[0, 5], logits[1, 3:9] = float("-inf"), torch.tensor([0.0, -0.0, 0.0, -0.0, 0.0, 1e30])
        most = min(vocab, 64)
        check_filters(logits.clone(), [1, 20, most, 50], [1.0] * 4, [0.0] * 4)
        check_filters(logits.clone(), [50, 20, most, 2, 1], [1.0] * 5, [0.0, 0.3, 1.0, 0.01, 0.5])
        check_filters(logits.clone(), [50, 20, most, 50], [0.9, 0.5, 1e-6, 0.999], [0.0] * 4, off=2)
    alike = torch.zeros(3, 5000)
    alike[:, 100:103] = 2.0  # as many as the k of some row, fewer than that of others
    for share in (1.0, 0.3):
        for same in ([3] * 3, [2, 50, 64]):
            check_filters(alike.clone(), same, [share] * 3, [0.0] * 3)
            check_filters(torch.full((3, 5000), float("-inf")), same, [share] * 3, [0.0] * 3)
            check_filters(torch.zeros(3, 5000), same, [share] * 3, [0.0] * 3)
    # All that is above the bound in few blocks: the 20 largest are neighbours.
    crowded = torch.randn(2, 9000)
    crowded[:, 130:190] += 20
    check_filters(crowded.clone(), [20, 64], [1.0, 1.0], [0.0, 0.0])
