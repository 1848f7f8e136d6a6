# SPDX-License-Identifier: Apache-2.0
"""Triton kernel: what a step feeds the model, from its slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashinfer_backend.ops.torch_ops import BySlot

_ROWS = 128  # of a program


# One variant for steps of all sizes: the columns of their inputs are aligned as their numbers of tokens are.
@triton.jit(
    do_not_specialize=["count", "decodes", "padding"],
    do_not_specialize_on_alignment=["slots", "new_blocks", "tokens", "places"],
)
def _step_inputs(
    slots, last_token, lengths, block_table, new_blocks, tokens, places, input_ids, positions,
    cache_locations, count, decodes, padding, table_stride,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = row < count
    slot = tl.load(slots + row, mask=valid, other=0)
    last = valid & (row < decodes)
    position = tl.load(lengths + slot, mask=last, other=0)
    token = tl.load(last_token + slot, mask=last, other=0)
    ends = last
    if tokens is not None:
        given = valid & (row >= decodes)
        position = tl.where(given, tl.load(places + row, mask=given, other=0), position)
        token = tl.where(given, tl.load(tokens + row, mask=given, other=0), token)
        after = tl.load(slots + row + 1, mask=row + 1 < count, other=-1)
        ends = valid & (slot != after)
    tl.store(input_ids + row, token, mask=valid)
    tl.store(positions + row, position, mask=valid)
    tl.store(lengths + slot, position + 1, mask=ends & (slot != padding))
    entry = block_table + slot.to(tl.int64) * table_stride + position // BLOCK_SIZE
    if new_blocks is not None:
        new_block = tl.load(new_blocks + row, mask=valid, other=-1)
        block = tl.where(new_block >= 0, new_block, tl.load(entry, mask=valid & (new_block < 0), other=0))
        tl.store(entry, new_block, mask=new_block >= 0)
    else:
        block = tl.load(entry, mask=valid, other=0)
    tl.store(cache_locations + row, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=valid)


def step_inputs(
    slots: Tensor,
    state: BySlot,
    new_blocks: Tensor | None = None,
    given: tuple[Tensor, Tensor, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ops.torch_ops.step_inputs.

    Launched without programmatic dependence, and nothing is launched on it so: the decode kernels read the
    block table before they wait for the kernel before them.
    """
    count, (last_token, lengths, _, block_table, block_size) = slots.shape[0], state
    tokens, places, decodes = given if given is not None else (None, None, count)
    input_ids, positions, cache_locations = (
        torch.empty(count, dtype=torch.int32, device=slots.device) for _ in range(3)
    )
    _step_inputs[(triton.cdiv(count, _ROWS),)](
        slots, last_token, lengths, block_table, new_blocks, tokens, places, input_ids, positions,
        cache_locations, count, decodes, lengths.shape[0] - 1, block_table.stride(0),
        BLOCK_SIZE=block_size, ROWS=_ROWS, num_warps=1,
    )  # fmt: skip
    return input_ids, positions, cache_locations
