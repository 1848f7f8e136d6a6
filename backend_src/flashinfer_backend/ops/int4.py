# SPDX-License-Identifier: Apache-2.0
"""Weights of 4 bits: how checkpoints and this package pack them, in plain torch.

An element is a number q of 0..15. Groups of neighbouring columns of a row share a scale and a zero point:
the weight is (q - zero) * scale.

Packed here: a matrix [N, K] is int16 [N, K / 4]. Columns come in blocks (block_of): word j of a block of B
columns holds the columns j, j + B / 4, j + B / 2 and j + 3 B / 4 of it, the first in its lowest 4 bits. So a
kernel gets neighbouring columns from neighbouring words, by one shift. Rows and whole blocks can be sliced.
Scales and zero points are [groups, N].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCK = 128
LARGEST = 15
MIDDLE = 8  # the zero point of symmetric formats
# AutoAWQ's: nibble i of a word is of the word's column AWQ_ORDER[i] (awq/modules/linear/gemm.py).
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def block_of(columns: int) -> int:
    """Columns of a packed block: BLOCK, or less where that does not divide them; 0 if 4 does not."""
    block = math.gcd(columns, BLOCK)
    return block if block >= 4 else 0


def pack(values: Tensor) -> Tensor:
    """uint8 [N, K] of 0..15 -> int16 [N, K / 4]; K a multiple of 4."""
    rows, columns = values.shape
    block = block_of(columns)
    first, second, third, fourth = values.reshape(rows, columns // block, 4, block // 4).unbind(2)
    halves = torch.stack((first | second << 4, third | fourth << 4), dim=-1)
    return halves.reshape(rows, -1).view(torch.int16)


def unpack(packed: Tensor) -> Tensor:
    """pack's inverse: int16 [N, K / 4] -> uint8 [N, K]."""
    rows, columns = packed.shape[0], packed.shape[1] * 4
    block = block_of(columns)
    low, high = packed.contiguous().view(torch.uint8).view(rows, columns // block, block // 4, 2).unbind(-1)
    return torch.stack((low & 15, low >> 4, high & 15, high >> 4), dim=2).reshape(rows, columns)


def dequantise(packed: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """float32 [N, K] of packed int16 [N, K / 4], scale [groups, N], zero uint8 [groups, N] (None: MIDDLE)."""
    values = unpack(packed).float()
    size = values.shape[1] // scale.shape[0]
    zeros = MIDDLE if zero is None else zero.t().float().repeat_interleave(size, dim=1)
    return (values - zeros) * scale.t().float().repeat_interleave(size, dim=1)


def quantise(x: Tensor, groups: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """x[N, K] -> values uint8 [N, K], scale float32 [groups, N], zero uint8 [groups, N], by each group's
    largest magnitude, or by its smallest and its largest number."""
    parts = x.float().reshape(len(x), groups, -1)
    if symmetric:
        scale = parts.abs().amax(-1).clamp(min=1e-10) / (LARGEST / 2)
        zero = torch.full_like(scale, MIDDLE)
    else:
        low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
        scale = (high - low).clamp(min=1e-10) / LARGEST
        zero = (-low / scale).round()
    values = (parts / scale.unsqueeze(-1)).round() + zero.unsqueeze(-1)
    values = values.clamp(0, LARGEST).to(torch.uint8).reshape(x.shape)
    return values, scale.t(), zero.t().to(torch.uint8)


def nibbles(words: Tensor) -> Tensor:
    """int32 [R, C] -> uint8 [R, 8 C], the lowest 4 bits of a word first."""
    parts = words.contiguous().view(torch.uint8)
    return torch.stack((parts & 15, parts >> 4), dim=-1).reshape(len(words), -1)


def nibbles_of_rows(words: Tensor) -> Tensor:
    """int32 [R, C] -> uint8 [8 R, C]: a word holds neighbours of a column."""
    return nibbles(words.t()).t()


def awq_nibbles(words: Tensor) -> Tensor:
    """int32 [R, C] -> uint8 [R, 8 C] in AutoAWQ's order."""
    inverse = [AWQ_ORDER.index(column) for column in range(8)]
    return nibbles(words).view(len(words), -1, 8)[..., inverse].reshape(len(words), -1)


def order_of(group_index: Tensor, groups: int) -> Tensor | None:
    """The order of columns that brings those of each group together, int64 [K]; None if they are already.
    group_index[K] is each column's group. Raises ValueError unless all groups are there and equally large."""
    index = group_index.long()
    size = len(index) // groups
    ordered, order = index.sort(stable=True)
    wanted = torch.arange(groups, device=index.device).repeat_interleave(size)
    if not torch.equal(ordered, wanted):
        raise ValueError(f"should name each of {groups} groups {size} times")
    return None if torch.equal(index, wanted) else order
