# SPDX-License-Identifier: Apache-2.0
"""Operations around the model in a decode step: CUDA against plain torch."""

import pytest
import torch

from flashinfer_backend.ops import torch_ops
from step_inputs_cases import CASES, agrees

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("rows", "prompts"), CASES)
def test_step_inputs(rows, prompts):
    from flashinfer_backend.ops import cuda_ops

    agrees(cuda_ops.step_inputs, rows, prompts, "cuda")


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_sample_with_suppressed_tokens_and_record(rows):
    from flashinfer_backend.ops import cuda_ops

    torch.manual_seed(rows)
    logits = torch.randn(rows, 128256, device="cuda").bfloat16()
    temperature = torch.tensor([0.0, 0.7, 1.3], device="cuda").repeat(rows)[:rows].contiguous()
    seed = torch.randint(-(2**62), 2**62, (rows,), device="cuda")
    position = torch.arange(rows, device="cuda").int()
    best = logits.float().argmax(-1).int()
    suppressed = torch.where(position % 2 == 0, best, -1).int()
    slots = torch.randperm(100, device="cuda")[:rows].int()
    recorded = torch.zeros(100, dtype=torch.int32, device="cuda")
    expected = torch_ops.sample(logits, temperature, seed, position, suppressed)
    tokens = cuda_ops.sample(logits, temperature, seed, position, suppressed, (recorded, slots))
    assert torch.equal(tokens, expected)
    assert torch.equal(recorded[slots.long()], expected)
    assert not (tokens == suppressed).any()
