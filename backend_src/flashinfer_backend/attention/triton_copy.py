# SPDX-License-Identifier: Apache-2.0
"""Copies of what prompts read of the cache, one row's tokens behind the other's, for FA3.

Elements of an e4m3 cache are copied as they are, without their scales: every number of e4m3 is one of float16
and of bfloat16.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from flashinfer_backend.attention.copies import (
    MAX_PROMPTS,
    MOST_ROWS,
    copies_format,
    copies_rooms,
    gap_blocks,
)
from flashinfer_backend.attention.metadata import PagedMetadata
from flashinfer_backend.cache.device import KVCache, KVCacheFormat
from flashinfer_backend.ops import device

_PIECE = 4096  # elements of a block that a program copies at a time
_PROGRAMS = 8  # of an SM
ROWS = (MAX_PROMPTS, 128, MOST_ROWS)  # of variants of the kernel that look for their row


# How many blocks there are is read on the device, so a graph copies what its step needs.
@triton.jit(do_not_specialize=["rows"])
def _copy_prompts(
    keys, values, key_copies, value_copies, indices, kv_indptr, last_page_len, rows,
    PIECE: tl.constexpr, PIECES: tl.constexpr, TOKEN: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    GAP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    index, offsets = tl.arange(0, ROWS), tl.arange(0, PIECE)
    ends = tl.load(kv_indptr + 1 + index, mask=index < rows, other=1 << 30) + (index + 1) * GAP
    pieces = (tl.load(kv_indptr + rows) + rows * GAP) * PIECES
    for piece in tl.range(tl.program_id(0), pieces, tl.num_programs(0)):
        row = tl.sum((ends <= piece // PIECES).to(tl.int32), axis=0)
        first = tl.load(kv_indptr + row)
        blocks = tl.load(kv_indptr + row + 1) - first
        own = piece // PIECES - row * GAP - first
        full = tl.where(own < blocks, BLOCK_SIZE, 0)
        tokens = tl.where(own == blocks - 1, tl.load(last_page_len + row), full)
        block = tl.load(indices + first + own, mask=own < blocks, other=0).to(tl.int64)
        within = piece % PIECES * PIECE + offsets
        source, given = block * (PIECES * PIECE) + within, within < tokens * TOKEN
        target = tl.cast(piece, tl.int64) * PIECE + offsets
        key, value = tl.load(keys + source, mask=given), tl.load(values + source, mask=given)
        tl.store(key_copies + target, tl.where(given, key.to(key_copies.dtype.element_ty), 0.0))
        tl.store(value_copies + target, tl.where(given, value.to(value_copies.dtype.element_ty), 0.0))


def copy_prompts(
    cache: tuple[Tensor, Tensor],
    copies: tuple[Tensor, Tensor],
    indices: Tensor,
    kv_indptr: Tensor,
    last_page_len: Tensor,
    rows: int,
) -> None:
    """Block after block, what each of `rows` rows has in `cache` and zeros for what it does not fill, then
    zeros for gap_blocks blocks, to the copies.

    cache: (K, V), each [blocks, P, Hkv, D]; copies: the same in 16 bits, with room for all, which is not
    checked here; int32 on the device: indices, the rows' blocks, those of row r from kv_indptr[r] on, and
    last_page_len[rows], tokens of the last one.

    Launched without programmatic dependence, as FlashInfer launches FA3: this kernel begins when the one that
    wrote to the cache and the FA3 before it have ended, and the next FA3 when this one has.
    """
    block_size, size = cache[0].shape[1], cache[0].stride(0)
    piece = min(_PIECE, size & -size)  # the largest power of two that divides a block
    searched = next(most for most in ROWS if rows <= most)
    _copy_prompts[(_PROGRAMS * device.sms(),)](
        *cache, *copies, indices, kv_indptr, last_page_len, rows,
        PIECE=piece, PIECES=size // piece, TOKEN=size // block_size, BLOCK_SIZE=block_size,
        GAP=gap_blocks(block_size), ROWS=searched, num_warps=4,
    )  # fmt: skip


class Copies:
    """Scratch memory for copies of `blocks` blocks, gaps included, and of those that a graph's padding reads.
    A step that reads more must not come here. One for all layers: they and their FA3 run one after another.

    layer: K and V, each [tokens, Hkv, D].
    """

    def __init__(self, cache: KVCacheFormat, dtype: torch.dtype, blocks: int, where: torch.device) -> None:
        self.blocks, self._block_size = blocks, cache.block_size
        rooms = copies_rooms(cache, blocks)
        (self._blocks,) = KVCache.allocate(copies_format(cache, dtype), rooms, where).layers
        self.layer = self._blocks[0].flatten(0, 1), self._blocks[1].flatten(0, 1)

    def starts(self, kv_indptr: np.ndarray) -> np.ndarray:
        """Tokens of `layer` where rows begin, int32 [R + 1], which have the blocks kv_indptr[R + 1]."""
        gaps = np.arange(len(kv_indptr), dtype=np.int32) * gap_blocks(self._block_size)
        return (kv_indptr + gaps) * self._block_size

    def write(self, cache: tuple[Tensor, Tensor], metadata: PagedMetadata, rows: int) -> None:
        """Copy what `rows` rows of `metadata` have in the cache to where `starts` says; see copy_prompts."""
        blocks = metadata.indices, metadata.kv_indptr(rows), metadata.last_page_len(rows)
        copy_prompts(cache, self._blocks, *blocks, rows)
