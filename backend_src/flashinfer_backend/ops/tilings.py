# SPDX-License-Identifier: Apache-2.0
"""Which tiling each product takes for how many tokens, by what was measured on this device (core/tuned)."""

from __future__ import annotations

import math

import msgspec
from torch import Tensor

from flashinfer_backend.core.tuned import GATED, BlockTile, Int4Tile, Role, RowTile, Tiling, find, steps
from flashinfer_backend.ops import device, fp8
from flashinfer_backend.ops.int4 import BLOCK

# Tokens beyond which weights of 4 bits are written out in 16, of shapes that were not measured: of an 8B
# model's, 128 tokens take the CUDA kernel 232 us and written out 331, 256 tokens 410 and 371.
MOST_UNTUNED = 128
FEW = 4  # tokens, up to which a product with adapters is cut up as without


def choose(role: Role, tokens: int, weight: Tensor, by_blocks: bool = False) -> Tiling | None:
    """The tiling for weight[N, K], or None where another kernel is faster or the shape does not fit. Of
    weights in e4m3: with scales by row, or by 128x128 blocks."""
    table = "linear_blocks" if by_blocks else "linear_fp8" if weight.dtype == fp8.E4M3 else "linear"
    if tokens > _most_tokens(table):
        return None
    rows, inner = weight.shape
    return _choose(role, tokens, rows, inner, table)


def choose_adapted(role: Role, tokens: int, weight: Tensor) -> Tiling | None:
    """The tiling for a weight in 16 bits with adapters, which then add to the product in its launch. Of
    shapes that were not measured with adapters, the one without them, or where cuBLAS is faster then, the one
    for all shapes. For more than a few tokens, which can have many adapters, it is not split, where that
    leaves SMs to helpers and the others suffice to read the weight. The kernel behind it does not
    start at once: of 32 tokens with 8 adapters the four products of a layer took 176.8 us instead of 181.2
    (an H100, 2026-11-27, the next kernel behind the loop), but with the gate and up product too 177.3."""
    rows, inner = weight.shape
    return _choose_adapted(role, tokens, rows, inner)


@device.cached
def _choose_adapted(role: Role, tokens: int, rows: int, inner: int) -> Tiling | None:
    shape, own, table = (rows, inner), device.active().linear_adapted, device.active().linear
    if steps(own, role, shape):
        tiling = find(own, role, tokens, shape)
        return tiling if tiling and tiling.fits(shape, role == GATED, tokens) else None
    tiling = find(table, role, tokens, shape) or find(table, role, tokens)
    if tiling is None:
        return None
    if tokens > FEW:
        enough = device.sms() // 3 <= rows // tiling.rows <= device.sms() * 3 // 4
        split, early = 1 if enough else tiling.split, tiling.early and role == GATED
        tiling = msgspec.structs.replace(tiling, split=split, early=early)
    return tiling if tiling.fits(shape, role == GATED, tokens) else None


@device.cached
def choose_rows(role: Role, tokens: int, rows: int, inner: int) -> RowTile | None:
    """The CUDA kernel's tile for a weight [rows, inner] of 128x128 blocks, or None where another kernel is
    faster, or the shape does not fit."""
    tile = find(device.active().blocks_linear, role, tokens, (rows, inner))
    return tile if tile and tile.fits((rows, inner)) else None


@device.cached
def choose_blocks(role: Role, tokens: int, rows: int) -> BlockTile | None:
    """The tile for a weight [rows, K] of 128x128 blocks, or None where cuBLAS is faster. It is not asked for
    rows that leave a block unfilled: its times for them are not measured."""
    table = device.active().blocks_fp8
    tile = find(table, role, tokens)
    if tile or not rows % fp8.BLOCK:
        return tile
    return [tile for _, tile in steps(table, role) if tile][-1]


@device.cached
def _most_tokens(table: str) -> float:
    """Beyond, every product is another kernel's: then this is all that the question costs."""
    entries = getattr(device.active(), table).values()
    limits = [limit for of_role in entries for entry in of_role for limit, _ in entry.steps]
    return max((math.inf if limit is None else limit for limit in limits), default=0)


@device.cached
def _choose(role: Role, tokens: int, rows: int, inner: int, table: str) -> Tiling | None:
    tiling = find(getattr(device.active(), table), role, tokens, (rows, inner))
    return tiling if tiling and tiling.fits((rows, inner), role == GATED, tokens) else None


@device.cached
def choose_int4(role: Role, tokens: int, rows: int, inner: int) -> Int4Tile | None:
    """The CUDA kernel's tile for a weight [rows, inner], or None where it is written out in 16 bits."""
    shape, table = (rows, inner), device.active().int4
    if not steps(table, role, shape):
        return untuned_int4(tokens, rows, inner)
    tile = find(table, role, tokens, shape)
    return tile if tile and tile.fits(shape) else None


def untuned_int4(tokens: int, rows: int, inner: int) -> Int4Tile | None:
    """A tile of which each SM has two or more, where the inner dimension can be split so often. Not
    measured."""
    if tokens > MOST_UNTUNED:
        return None
    size = min(64, max(8, 1 << (tokens - 1).bit_length()))
    if size <= 16:
        kinds = [(size, 64, 1), (size, 32, 1)]
    else:
        kinds = [(48 if 32 < tokens <= 48 else size, 32, 4), (size, 32, 2)]
    for size, warp_rows, row_warps in kinds:
        split, teams = 1, 4 if size <= 16 else 64 // size
        while split < 8 and inner // BLOCK >= 4 * split * teams:
            if rows // (warp_rows * row_warps) * split >= 2 * device.sms():
                break
            split *= 2
        tile = Int4Tile(size, warp_rows, row_warps, teams, split, stages=3)
        if tile.fits((rows, inner)):
            return tile
    return None
