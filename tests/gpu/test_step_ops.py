# SPDX-License-Identifier: Apache-2.0
"""Operations around the model in a decode step: CUDA against plain torch."""

from __future__ import annotations

import pytest
import torch

from flashinfer_backend.ops import torch_ops

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rows", [1, 7, 64, 300])
@pytest.mark.parametrize("decodes", ["all", "some"])
def test_step_inputs(rows, decodes):
    from flashinfer_backend.ops import cuda_ops

    torch.manual_seed(rows)
    slots = torch.randperm(399, device="cuda")[:rows].int()
    lengths = torch.randint(0, 150, (400,), device="cuda").int()
    lengths[399] = 0
    last_token = torch.randint(0, 1000, (400,), device="cuda").int()
    table = torch.randint(0, 5000, (400, 10), device="cuda").int()
    options = {}
    if decodes == "all":
        new_blocks = torch.randint(5000, 9000, (rows,), device="cuda").int()
        new_blocks[torch.rand(rows, device="cuda") < 0.7] = -1
        new_blocks[rows // 2 + 1 :] = -1
        options["new_blocks"] = new_blocks
    else:
        first = rows // 3
        slots[first:] = slots[first:].repeat_interleave(4)[: rows - first]  # runs of tokens of one slot
        tokens = torch.randint(0, 1000, (rows,), device="cuda").int()
        places = torch.randint(0, 150, (rows,), device="cuda").int()
        options["given"] = tokens, places, first
    slots[rows // 2 + 1 :] = 399  # padding shares a slot, and has place 0
    if "given" in options:
        options["given"][1][rows // 2 + 1 :] = 0
    mine, expected = ((table.clone(), lengths.clone()) for _ in range(2))
    for actual, reference in zip(
        cuda_ops.step_inputs(slots, last_token, mine[1], mine[0], 16, **options),
        torch_ops.step_inputs(slots, last_token, expected[1], expected[0], 16, **options),
        strict=True,
    ):
        assert torch.equal(actual, reference)
    assert torch.equal(mine[0], expected[0]) and torch.equal(mine[1], expected[1])


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
