# SPDX-License-Identifier: Apache-2.0
"""Copies in 16 bits of the blocks of an e4m3 cache that prompts read, for FA3.

Elements are copied as they are, without their scales: every number of e4m3 is one of float16 and of bfloat16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashinfer_backend.attention.copies import MAX_PROMPTS, copies_format
from flashinfer_backend.cache.device import KVCache, KVCacheFormat
from flashinfer_backend.ops import device

_PIECE = 4096  # elements of a block that a program copies at a time
_PROGRAMS = 8  # of an SM


# How many blocks there are is read on the device, so a graph copies what its step needs.
@triton.jit(do_not_specialize=["rows"])
def _copy_blocks(
    keys, values, key_copies, value_copies, indices, kv_indptr, rows,
    PIECE: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    pieces = tl.load(kv_indptr + rows) * PIECES
    offsets = tl.arange(0, PIECE)
    for piece in tl.range(tl.program_id(0), pieces, tl.num_programs(0)):
        block = tl.load(indices + piece // PIECES).to(tl.int64)
        source = (block * PIECES + piece % PIECES) * PIECE + offsets
        target = tl.cast(piece, tl.int64) * PIECE + offsets
        key, value = tl.load(keys + source), tl.load(values + source)
        tl.store(key_copies + target, key.to(key_copies.dtype.element_ty))
        tl.store(value_copies + target, value.to(value_copies.dtype.element_ty))


def copy_blocks(
    cache: tuple[Tensor, Tensor], copies: tuple[Tensor, Tensor], indices: Tensor, kv_indptr: Tensor, rows: int
) -> None:
    """Block i of the copies becomes block indices[i] of the cache, for i < kv_indptr[rows].

    cache: (K, V) of e4m3, each [blocks, P, Hkv, D]; copies: the same in 16 bits, of at least kv_indptr[rows]
    blocks, which is not checked here; indices and kv_indptr [rows + 1 or more]: int32 on the device.

    Launched without programmatic dependence, as FlashInfer launches FA3: this kernel begins when the one that
    wrote to the cache and the FA3 before it have ended, and the next FA3 when this one has.
    """
    size = cache[0].stride(0)
    piece = min(_PIECE, size & -size)  # the largest power of two that divides a block
    _copy_blocks[(_PROGRAMS * device.sms(),)](
        *cache, *copies, indices, kv_indptr, rows, PIECE=piece, PIECES=size // piece, num_warps=4
    )


class Copies:
    """Scratch memory for copies of `blocks` blocks, and of those that a graph's padding reads. A step that
    reads more must not come here. One for all layers: they and their FA3 run one after another.

    layer: (K, V) as of a cache; indices: what FA3 is given as the blocks of its rows."""

    def __init__(self, cache: KVCacheFormat, dtype: torch.dtype, blocks: int, where: torch.device) -> None:
        self.blocks = blocks
        rooms = blocks + MAX_PROMPTS
        (self.layer,) = KVCache.allocate(copies_format(cache, dtype), rooms, where).layers
        self.indices = torch.arange(rooms, dtype=torch.int32, device=where)

    def write(self, cache: tuple[Tensor, Tensor], indices: Tensor, kv_indptr: Tensor, rows: int) -> None:
        copy_blocks(cache, self.layer, indices, kv_indptr, rows)
