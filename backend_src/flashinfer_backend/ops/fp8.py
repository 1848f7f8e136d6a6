# SPDX-License-Identifier: Apache-2.0
"""Numbers as e4m3 elements and float32 scales, in plain torch: element times scale is the number.

https://arxiv.org/abs/2209.05433 describes e4m3: 3 bits of mantissa, at most 448, no infinity.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST_PEAK = 1e-10  # rows of zeros have a scale, too
BLOCK = 128


def to_e4m3(x: Tensor, scale: Tensor | float) -> Tensor:
    """x / scale, rounded to the nearest (ties to even); beyond the largest number, that one."""
    return _divide(x, scale).clamp(-LARGEST, LARGEST).to(E4M3)


def scale_of(peak: Tensor) -> Tensor:
    """The scale that takes the largest magnitude to e4m3's largest number."""
    return _divide(peak.float().clamp(min=SMALLEST_PEAK), LARGEST)  # which 16 bits do not hold exactly


def _divide(x: Tensor, by: Tensor | float) -> Tensor:
    """By a tensor: on a GPU, torch multiplies by the reciprocal of a number, which rounds twice."""
    return x.float() / torch.as_tensor(by, dtype=torch.float32, device=x.device)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row by its own scale: x[T, K] -> e4m3 [T, K], float32 [T, 1]."""
    scale = scale_of(x.abs().amax(-1, keepdim=True))
    return to_e4m3(x, scale), scale


def quantise_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each 128 neighbours of a row by their own scale: x[T, K] -> e4m3 [T, K], float32 [T, ceil(K / 128)]."""
    scale = scale_of(torch.stack([group.abs().amax(-1) for group in x.split(BLOCK, dim=-1)], dim=-1))
    return to_e4m3(x, spread(scale, x.shape[1])), scale


def quantise_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each 128x128 block by its own scale: x[N, K] -> e4m3 [N, K], float32 [N / 128, K / 128], rounded up."""
    peaks = [[part.abs().max() for part in rows.split(BLOCK, dim=1)] for rows in x.split(BLOCK)]
    scale = scale_of(torch.stack([torch.stack(row) for row in peaks]))
    return to_e4m3(x, spread(scale, x.shape[1], x.shape[0])), scale


def spread(scale: Tensor, columns: int, rows: int | None = None) -> Tensor:
    """Each element's scale: of groups [T, groups] -> [T, columns]; of blocks -> [rows, columns]."""
    wide = scale.repeat_interleave(BLOCK, dim=1)[:, :columns]
    return wide if rows is None else wide.repeat_interleave(BLOCK, dim=0)[:rows]
