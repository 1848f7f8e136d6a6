# SPDX-License-Identifier: Apache-2.0
"""Operations around the model in a decode step, in plain torch."""

from __future__ import annotations

import torch

from flashinfer_backend.ops import torch_ops


def test_decode_inputs_gathers_token_and_cache_location_of_each_row():
    last_token = torch.tensor([10, 11, 12], dtype=torch.int32)
    table = torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int32)
    slots = torch.tensor([2, 0], dtype=torch.int32)
    positions = torch.tensor([17, 3], dtype=torch.int32)
    none = torch.tensor([-1, -1], dtype=torch.int32)
    ids, locations = torch_ops.decode_inputs(slots, positions, none, last_token, table, 16)
    assert ids.tolist() == [12, 10]
    assert locations.tolist() == [6 * 16 + 1, 1 * 16 + 3]
    assert table.tolist() == [[1, 2], [3, 4], [5, 6]]


def test_decode_inputs_enters_new_blocks_into_the_block_table():
    table = torch.tensor([[1, 2], [3, 4], [0, 0]], dtype=torch.int32)
    slots = torch.tensor([1, 0, 2, 2], dtype=torch.int32)  # two rows of padding share a slot
    positions = torch.tensor([16, 15, 0, 0], dtype=torch.int32)
    blocks = torch.tensor([9, -1, -1, -1], dtype=torch.int32)
    last_token = torch.zeros(3, dtype=torch.int32)
    _, locations = torch_ops.decode_inputs(slots, positions, blocks, last_token, table, 16)
    assert locations.tolist() == [9 * 16, 1 * 16 + 15, 0, 0]
    assert table.tolist() == [[1, 2], [3, 9], [0, 0]]


def test_sample_suppresses_a_token_and_records_the_choice():
    logits = torch.tensor([[0.0, 3.0, 2.0], [0.0, 3.0, 2.0]])
    zeros = torch.zeros(2)
    last_token = torch.zeros(4, dtype=torch.int32)
    slots = torch.tensor([3, 1], dtype=torch.int32)
    tokens = torch_ops.sample(
        logits,
        zeros,
        zeros.long(),
        zeros.int(),
        torch.tensor([1, -1], dtype=torch.int32),
        (last_token, slots),
    )
    assert tokens.tolist() == [2, 1]
    assert last_token.tolist() == [0, 1, 0, 2]
    assert logits[0, 1] == 3.0, "the caller's logits were changed"
