# SPDX-License-Identifier: Apache-2.0
"""Steps whose inputs the kernel has to make as plain torch does; as a program, in Triton's interpreter."""

from collections.abc import Callable
from typing import Any

import torch

from flashinfer_backend.ops import torch_ops

CASES = [(rows, prompts) for rows in (1, 7, 64, 300) for prompts in (False, True)]


def agrees(step_inputs: Callable[..., Any], rows: int, prompts: bool, device: str) -> None:
    """A step of `rows` tokens, almost half of them padding; the rest decodes, or with prompts a third."""
    torch.manual_seed(rows)

    def numbers(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, most, shape, device=device, dtype=torch.int32)

    slots = torch.randperm(399, device=device)[:rows].int()
    lengths, last_token, table = numbers(150, 400), numbers(1000, 400), numbers(5000, 400, 10)
    lengths[-1] = 0
    padding = slice(rows // 2 + 1, rows)
    options: dict[str, Any] = {}
    if prompts:
        decodes, places = rows // 3, numbers(150, rows)
        slots[decodes:] = slots[decodes:].repeat_interleave(4)[: rows - decodes]
        places[padding] = 0
        options["given"] = numbers(1000, rows), places, decodes
    else:
        blocks = torch.where(torch.rand(rows, device=device) < 0.3, 5000 + numbers(4000, rows), -1).int()
        blocks[padding] = -1
        options["new_blocks"] = blocks
    slots[padding] = 399
    results = []
    for operation in (step_inputs, torch_ops.step_inputs):
        own = lengths.clone(), table.clone()
        by_slot = torch_ops.BySlot(last_token, own[0], numbers(9, 400, 0), own[1], 16)
        results.append((*operation(slots, by_slot, **options), *own))
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected)


if __name__ == "__main__":
    from flashinfer_backend.ops.triton_inputs import step_inputs

    for case in CASES:
        agrees(step_inputs, *case, "cpu")
