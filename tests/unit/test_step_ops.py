# SPDX-License-Identifier: Apache-2.0
"""Operations around the model in a decode step, in plain torch."""

from __future__ import annotations

import torch
from interpreted import interpreted

import step_inputs_cases
from flashinfer_backend.ops import torch_ops

TABLE = [[1, 2], [3, 4], [5, 6], [0, 0]]  # the last slot is that of padding


def int32(values: list[int] | list[list[int]]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def by_slot(last_token: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor) -> torch_ops.BySlot:
    return torch_ops.BySlot(last_token, lengths, torch.zeros(len(lengths), 0), table, 16)


def test_decodes_feed_the_last_tokens_of_their_slots():
    lengths, table = int32([3, 0, 17, 0]), int32(TABLE)
    found = torch_ops.step_inputs(int32([2, 0]), by_slot(int32([10, 11, 12, 13]), lengths, table))
    ids, positions, locations = (part.tolist() for part in found)
    assert (ids, positions, locations) == ([12, 10], [17, 3], [6 * 16 + 1, 1 * 16 + 3])
    assert lengths.tolist() == [4, 0, 18, 0] and table.tolist() == TABLE


def test_decodes_enter_new_blocks_into_the_block_table():
    lengths, table = int32([15, 16, 0, 0]), int32(TABLE)
    slots, blocks = int32([1, 0, 3, 3]), int32([9, -1, -1, -1])  # two rows of padding share a slot
    _, positions, locations = torch_ops.step_inputs(slots, by_slot(int32([0] * 4), lengths, table), blocks)
    assert positions.tolist() == [16, 15, 0, 0]
    assert locations.tolist() == [9 * 16, 1 * 16 + 15, 0, 0]
    assert table.tolist() == [[1, 2], [3, 9], [5, 6], [0, 0]]
    assert lengths.tolist() == [16, 17, 0, 0]


def test_prompts_feed_given_tokens_and_leave_their_lengths():
    lengths, table = int32([3, 99, 99, 0]), int32(TABLE)
    slots = int32([0, 2, 2, 2, 1, 3, 3])
    given = int32([0, 20, 21, 22, 30, 0, 0]), int32([0, 15, 16, 17, 4, 0, 0]), 1
    found = torch_ops.step_inputs(slots, by_slot(int32([10, 11, 12, 13]), lengths, table), given=given)
    ids, positions, locations = (part.tolist() for part in found)
    assert (ids, positions) == ([10, 20, 21, 22, 30, 0, 0], [3, 15, 16, 17, 4, 0, 0])
    assert locations == [19, 5 * 16 + 15, 6 * 16, 6 * 16 + 1, 3 * 16 + 4, 0, 0]
    assert lengths.tolist() == [4, 5, 18, 0]


def test_step_inputs_in_tritons_interpreter():
    interpreted(step_inputs_cases.__file__)


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
