# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels that change logits, in its interpreter, without a GPU: bit for bit those of plain torch.
tests/gpu/test_sampling.py runs the real ones."""

from __future__ import annotations

import torch
from interpreted import interpreted

from flashinfer_backend.ops import torch_ops
from flashinfer_backend.ops.torch_ops import Penalties

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


def test_kernels_in_the_interpreter():
    interpreted(__file__)


if __name__ == "__main__":
    torch.manual_seed(0)
    check_copies()
    for size in (50, 3000):
        check_penalties(size)
