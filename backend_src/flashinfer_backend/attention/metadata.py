# SPDX-License-Identifier: Apache-2.0
"""Lengths and block lists of a step, staged through pinned memory to fixed device addresses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from flashinfer_backend.attention.split import ITEM_WORDS

SEGMENTS = 6
_GATHERED = 256  # blocks of a program; one size, so that a long sequence does not compile another


@triton.jit
def _gather_blocks(
    table,
    slots,
    kv_lens,
    kv_indptr,
    behind,
    out,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0)
    blocks = (tl.load(kv_lens + row) + BLOCK_SIZE - 1) // BLOCK_SIZE
    index = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    slot = tl.load(slots + row).to(tl.int64)
    valid = index < blocks
    column = index + tl.load(behind + row)
    block = tl.load(table + slot * table_stride + column, mask=valid & (slot >= 0), other=0)
    start = tl.load(kv_indptr + row).to(tl.int64)
    tl.store(out + start + index, block, mask=valid)


@dataclass
class HostArrays:
    """CPU int32 tensors of one plan: qo_indptr[rows + 1], kv_indptr[rows + 1] in blocks, kv_lens[rows]."""

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_lens: Tensor


class PinnedEntry:
    """What the ring hands out: FlashInfer's plan workspace, the metadata vector, work items of the Triton
    kernel, and the event that frees them."""

    def __init__(self, workspace_bytes: int, segment: int, items: int) -> None:
        self.workspace = torch.empty(workspace_bytes, dtype=torch.uint8, pin_memory=True)
        self.words = torch.zeros(SEGMENTS * segment, dtype=torch.int32, pin_memory=True)
        self.array = self.words.numpy()
        self.items = torch.zeros((items, ITEM_WORDS), dtype=torch.int32, pin_memory=True)
        self.copied = torch.cuda.Event()
        self.segment = segment
        self.max_blocks = 1

    def host(self, rows: int) -> HostArrays:
        parts = [self.words[i * self.segment :] for i in range(SEGMENTS)]
        return HostArrays(parts[0][: rows + 1], parts[1][: rows + 1], parts[3][:rows])


class PinnedRing:
    """Hands out pinned entries in turn; next() waits only if the copies out of the entry have not run yet."""

    def __init__(self, entries: int, workspace_bytes: int, max_rows: int, items: int) -> None:
        segment = PagedMetadata.segment(max_rows)
        self._entries = [PinnedEntry(workspace_bytes, segment, items) for _ in range(entries)]
        self._turn = 0

    def next(self) -> PinnedEntry:
        entry = self._entries[self._turn]
        self._turn = (self._turn + 1) % len(self._entries)
        entry.copied.synchronize()
        return entry

    def release(self, entry: PinnedEntry) -> None:
        """Call after the last copy out of the entry was enqueued on the current stream."""
        entry.copied.record()


class PagedMetadata:
    """Device-side description of up to `max_rows` rows, at addresses that never change.

    One int32 buffer of equal segments, filled by one copy: qo_indptr, kv_indptr (in blocks), last_page_len,
    kv_lens, slots, and how many blocks of the slots lie behind a window. `indices` holds the rows' blocks,
    packed by kv_indptr.
    """

    def __init__(
        self, ring: PinnedRing, max_rows: int, max_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self._ring, self.block_size, self.max_blocks = ring, block_size, max_blocks
        self._segment = self.segment(max_rows)
        self._device = torch.zeros(SEGMENTS * self._segment, dtype=torch.int32, device=device)
        self.indices = torch.zeros(max_rows * max_blocks, dtype=torch.int32, device=device)

    @staticmethod
    def segment(max_rows: int) -> int:
        """Words per segment: room for an indptr, 128-byte aligned."""
        return (max_rows + 1 + 31) // 32 * 32

    def upload(
        self,
        q_lens: np.ndarray | None,
        kv_lens: np.ndarray,
        slots: np.ndarray,
        rows: int,
        first: int = 0,
        behind: np.ndarray | None = None,
    ) -> PinnedEntry:
        """Stage rows and copy them to the device; q_lens None means one query token per row, `first` is the
        row of the first query. behind: of each row's slot, how many blocks (int32) are left out in front of
        its kv_lens tokens; None: none.

        Rows beyond len(slots) are padding: slot -1, one token of block 0.
        """
        entry, given, segment = self._ring.next(), len(slots), self._segment
        qo, kv, last, lens, ids, left_out = (entry.array[i * segment :] for i in range(SEGMENTS))
        lens[:given], lens[given:rows] = kv_lens, 1
        ids[:given], ids[given:rows] = slots, -1
        left_out[:rows] = 0
        if behind is not None:
            left_out[:given] = behind
        blocks = (lens[:rows] + (self.block_size - 1)) // self.block_size
        last[:rows] = lens[:rows] - (blocks - 1) * self.block_size
        kv[0], qo[0] = 0, first
        np.cumsum(blocks, out=kv[1 : rows + 1])
        if q_lens is None:
            qo[1 : rows + 1] = np.arange(1, rows + 1, dtype=np.int32)
        else:
            np.cumsum(q_lens, out=qo[1 : rows + 1])
            qo[1 : rows + 1] += first
        entry.max_blocks = int(blocks.max())
        if entry.max_blocks > self.max_blocks:
            raise ValueError(
                f"a sequence has {entry.max_blocks} blocks, the block table {self.max_blocks} columns"
            )
        self._device.copy_(entry.words, non_blocking=True)
        self._rows = rows
        return entry

    def gather(self, block_table: Tensor, entry: PinnedEntry) -> None:
        """Write the uploaded rows' blocks from block_table[slots, columns] (int32) to `indices`."""
        _gather_blocks[(self._rows, triton.cdiv(entry.max_blocks, _GATHERED))](
            block_table, self._device[4 * self._segment :], self._device[3 * self._segment :],
            self._device[self._segment :], self._device[5 * self._segment :], self.indices,
            block_table.stride(0), BLOCK_SIZE=self.block_size, COLUMNS=_GATHERED, num_warps=2,
        )  # fmt: skip

    def _part(self, index: int, length: int) -> Tensor:
        return self._device[index * self._segment : index * self._segment + length]

    def qo_indptr(self, rows: int) -> Tensor:
        return self._part(0, rows + 1)

    def kv_indptr(self, rows: int) -> Tensor:
        return self._part(1, rows + 1)

    def last_page_len(self, rows: int) -> Tensor:
        return self._part(2, rows)
