# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's tensors on their way from a file to the device."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor, wait

import torch
from torch import Tensor

CHUNK = 64 << 20  # bytes of a buffer: as long to copy as to fill
BUFFERS = 2
THREADS = 8  # that read the parts of a chunk, of PART bytes or more
PART = 1 << 20


class Uploader:
    """Brings tensors to a device: threads fill a pinned buffer while the buffer before is on its way. The
    driver's own way, one thread page by page, is several times slower.

    Pinned memory of BUFFERS * CHUNK bytes and the threads are its own until it is closed; on a CPU nothing is
    pinned.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._buffers = [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=self._cuda) for _ in range(BUFFERS)]
        self._events = [torch.cuda.Event() for _ in range(BUFFERS)] if self._cuda else []
        self._turn = 0
        self._threads = ThreadPoolExecutor(THREADS, "weights")

    def close(self) -> None:
        """What was sent still arrives: synchronise before the tensors are read on the host."""
        self._threads.shutdown()

    def read(self, file: int, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor of this shape whose bytes lie in the open file from byte `start` on, on the device for
        work on the current stream.

        A mapped file would cost a page fault for each few pages. Raises ValueError where the file ends too
        early.
        """
        result = torch.empty(shape, dtype=dtype, device=self._device)
        target = result.view(-1).view(torch.uint8)
        for offset in range(0, len(target), CHUNK):
            into = target[offset : offset + CHUNK]
            buffer = self._next_buffer()[: len(into)]
            self._fill(buffer, file, start + offset)
            self._send(buffer, into)
        return result

    def copy(self, value: Tensor) -> Tensor:
        """The same tensor, of a mapped file, on the device; torch's threads take its page faults."""
        result = torch.empty(value.shape, dtype=value.dtype, device=self._device)
        source, target = value.reshape(len(value), -1), result.view(len(value), -1)
        row_bytes = source[0].nbytes
        if row_bytes > CHUNK:
            raise ValueError(f"has rows of {row_bytes} bytes; at most {CHUNK} can be loaded")
        rows = CHUNK // row_bytes
        for part, into in zip(source.split(rows), target.split(rows), strict=True):
            buffer = self._next_buffer()[: part.nbytes].view(part.dtype).view(part.shape)
            buffer.copy_(part)
            self._send(buffer, into)
        return result

    def _next_buffer(self) -> Tensor:
        """The one that was sent longest ago, and has arrived."""
        self._turn = (self._turn + 1) % BUFFERS
        if self._cuda:
            self._events[self._turn].synchronize()  # at once, where it has never been recorded
        return self._buffers[self._turn]

    def _fill(self, buffer: Tensor, file: int, start: int) -> None:
        size = max(PART, math.ceil(len(buffer) / THREADS))
        view = buffer.numpy().data
        firsts = range(0, len(view), size)
        parts = [
            self._threads.submit(_read, file, view[first : first + size], start + first) for first in firsts
        ]
        wait(parts)  # all of them: none may read on from a file that is closed
        for part in parts:
            part.result()

    def _send(self, buffer: Tensor, target: Tensor) -> None:
        target.copy_(buffer, non_blocking=True)
        if self._cuda:
            self._events[self._turn].record()


def _read(file: int, into: memoryview, start: int) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(file, [into[done:]], start + done)
        if not count:
            raise ValueError(f"ends in the file after {start + done} bytes: is its download complete?")
        done += count
