# SPDX-License-Identifier: Apache-2.0
"""Triton kernel: what a decode step feeds the model, from slots and positions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 128  # of a program


# One variant for graphs of all sizes: the columns of a graph's input are aligned as its number of rows is.
@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["slots", "positions", "new_blocks"])
def _decode_inputs(
    slots,
    positions,
    new_blocks,
    last_token,
    block_table,
    input_ids,
    cache_locations,
    rows,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    slot = tl.load(slots + row, mask=valid, other=0)
    position = tl.load(positions + row, mask=valid, other=0)
    tl.store(input_ids + row, tl.load(last_token + slot, mask=valid, other=0), mask=valid)
    entry = block_table + slot.to(tl.int64) * table_stride + position // BLOCK_SIZE
    new_block = tl.load(new_blocks + row, mask=valid, other=-1)
    block = tl.where(new_block >= 0, new_block, tl.load(entry, mask=valid & (new_block < 0), other=0))
    tl.store(entry, new_block, mask=new_block >= 0)
    tl.store(cache_locations + row, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=valid)


def decode_inputs(
    slots: Tensor,
    positions: Tensor,
    new_blocks: Tensor,
    last_token: Tensor,
    block_table: Tensor,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """See ops.torch_ops.decode_inputs.

    Launched without programmatic dependence, and nothing is launched on it so: the decode kernels read the
    block table before they wait for the kernel before them.
    """
    rows = slots.shape[0]
    input_ids = torch.empty(rows, dtype=torch.int32, device=slots.device)
    cache_locations = torch.empty(rows, dtype=torch.int32, device=slots.device)
    _decode_inputs[(triton.cdiv(rows, _ROWS),)](
        slots,
        positions,
        new_blocks,
        last_token,
        block_table,
        input_ids,
        cache_locations,
        rows,
        block_table.stride(0),
        BLOCK_SIZE=block_size,
        ROWS=_ROWS,
        num_warps=1,
    )
    return input_ids, cache_locations
