# SPDX-License-Identifier: Apache-2.0
"""Numbers as e4m3 elements and float32 scales, in plain torch: element times scale is the number.

https://arxiv.org/abs/2209.05433 describes e4m3: 3 bits of mantissa, at most 448, no infinity.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST_PEAK = 1e-10  # so that rows of zeros have a scale
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
    rows, columns = x.shape
    whole = F.pad(x, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = whole.reshape(whole.shape[0] // BLOCK, BLOCK, whole.shape[1] // BLOCK, BLOCK)
    scale = scale_of(blocks.abs().amax((1, 3)))
    return to_e4m3(x, spread(scale, columns, rows)), scale


def empty_block_scales(shape: tuple[int, int], device: torch.device | str) -> Tensor:
    """For the blocks of a weight[N, K]: float32 [N / 128, K / 128], rounded up, not yet filled. Its rows lie
    a multiple of 4 numbers apart, as cuBLAS reads them; between them are zeros."""
    rows, columns = (-(-size // BLOCK) for size in shape)
    return torch.zeros(rows, _up(columns), device=device)[:, :columns]


def cublas_block_scales(scale: Tensor) -> Tensor:
    """What empty_block_scales made, as cuBLAS takes it: [K / 128 up to a multiple of 4, N / 128] with strides
    1 and K / 128 up to that multiple, in the same memory."""
    rows, apart = scale.shape[0], scale.stride(0)
    assert apart == _up(scale.shape[1]), f"rows {apart} numbers apart: not of empty_block_scales"
    return scale.as_strided((apart, rows), (1, apart))


def padded(tokens: int) -> int:
    """Rows of x for this number of tokens: cuBLAS needs a multiple of 4 with scales of groups and blocks."""
    return _up(tokens)


def _up(size: int) -> int:
    return -(-size // 4) * 4


def spread(scale: Tensor, columns: int, rows: int | None = None) -> Tensor:
    """Each element's scale: of groups [T, groups] -> [T, columns]; of blocks -> [rows, columns]."""
    wide = scale.repeat_interleave(BLOCK, dim=1)[:, :columns]
    return wide if rows is None else wide.repeat_interleave(BLOCK, dim=0)[:rows]
