# SPDX-License-Identifier: Apache-2.0
"""Products of few tokens with weights of 4 bits in a Hopper kernel.

cuda/int4_linear_kernel.cuh has the kernel; FlashInfer's build tools compile it once per machine, for each
number of groups in a block of columns, with and without zero points. Without a compiler, or on another GPU,
`takes` says no and the caller writes the weight out in 16 bits; an engine has it compiled before
(worker/prebuild.py), or does not start. For how many tokens it is the faster way, and with which tiles,
core/tuned says.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from flashinfer_backend.core.tuned import Int4Tile
from flashinfer_backend.ops import cuda_module
from flashinfer_backend.ops.int4 import BLOCK

_ELEMENTS = {torch.bfloat16: "nv_bfloat16", torch.float16: "nv_half"}
# Tokens of a tile, weight rows of a warp, warps that share x.
TILES = (
    *((8, 64, 1), (8, 64, 2), (8, 32, 1), (8, 32, 2)),
    *((16, 64, 1), (16, 64, 2), (16, 32, 1), (16, 32, 2)),
    *((32, 64, 2), (32, 32, 2), (32, 32, 4)),
    *((48, 32, 4), (64, 32, 2), (64, 32, 4)),
)


def parts_of(group: int) -> int:
    """Groups of `group` columns (0: all of a row) in a block of BLOCK columns; 1 for larger ones."""
    return BLOCK // group if 0 < group < BLOCK else 1


def spec(dtype: torch.dtype, parts: int, zeros: bool) -> Any:
    """FlashInfer's description of how the module is built; its name changes with the source. parts: see
    parts_of."""
    element = _ELEMENTS[dtype]
    return cuda_module.spec(
        "int4_linear",
        f"{element}_{parts}_{'zeros' if zeros else 'middle'}",
        [f"INT4_LINEAR_TYPE={element}", f"INT4_LINEAR_PARTS={parts}", f"INT4_LINEAR_ZERO={int(zeros)}"],
    )


def takes(weight: Tensor, scale: Tensor, zero: Tensor | None, tile: Int4Tile) -> bool:
    """Whether `linear` can multiply by this weight with this tile: a Hopper GPU, blocks of BLOCK columns that
    groups divide (or one group a row), a tile that fits."""
    inner = weight.shape[1] * 4
    size = inner // scale.shape[0]
    if inner % BLOCK or not (size == inner or size in (32, 64, BLOCK)) or scale.dtype not in _ELEMENTS:
        return False
    if not tile.fits((weight.shape[0], inner)):
        return False
    return _fits(tile, scale.dtype, parts_of(size), zero is not None, weight.device)


def linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    tile: Int4Tile,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """x[T, K] times a weight [N, K] of 4 bits transposed, with what is given applied -> [T, N].

    weight int16 [N, K / 4], scale [groups, N] of x's dtype and zero uint8 [groups, N] as ops.int4 has them.
    bias[N], residual[T, N]: added. gated: weight holds gate and up rows, the result is silu(gate) * up
    [T, N / 2]. All are contiguous, and `takes` must be true.
    """
    tokens, inner = x.shape
    rows = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    found = module(x.dtype, parts_of(inner // scale.shape[0]), zero is not None, x.device)
    found.int4_linear(
        out, x, weight, scale, zero, bias, residual, gated,
        tile.tokens, tile.warp_rows, tile.row_warps, tile.teams, tile.split, tile.stages,
    )  # fmt: skip
    return out


@functools.cache
def _fits(tile: Int4Tile, dtype: torch.dtype, parts: int, zeros: bool, place: torch.device) -> bool:
    found = module(dtype, parts, zeros, place)
    if found is None:
        return False
    with torch.cuda.device(place):
        return found.fits(tile.tokens, tile.warp_rows, tile.row_warps, tile.teams, tile.stages)


@functools.cache
def module(dtype: torch.dtype, parts: int, zeros: bool, place: torch.device) -> Any:
    """The compiled module with all its kernels loaded, or None where there is none."""

    def build() -> Any:
        found = spec(dtype, parts, zeros).build_and_load()
        with torch.cuda.device(place):
            for tile in TILES:
                found.prepare(*tile)
        return found

    return cuda_module.load(build, place, "weights of 4 bits are written out in 16 for each product")
