# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's tensors on their way from its files to the device."""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 8 << 20  # bytes of a buffer: one thread fills it, and it is not yet out of the CPU's caches when sent
BUFFERS = 12
AHEAD = 10  # chunks that are read, or about to be, before they are asked for; other buffers are on their way
THREADS = 8


class FileRange(NamedTuple):
    """Bytes of a file, one or more, that are a tensor: `start` is the first one's number in the file."""

    path: Path
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Chunk(NamedTuple):
    tensor: FileRange
    offset: int  # of its first byte in the tensor
    nbytes: int
    last: bool  # of its tensor


class Uploader:
    """Brings the tensors in these ranges of files to a device, in this order. Threads read chunks of what
    comes next into pinned buffers, also beyond the tensor that is asked for, so that neither they nor the
    device wait while something is done with a tensor.

    Pinned memory of BUFFERS * CHUNK bytes, the threads and the open files are its own until it is closed; on
    a CPU nothing is pinned. Each file stays open that long, a descriptor for each shard: some 200 of the
    largest checkpoints, in each rank's process, where 1024 is the usual limit. Mapped files
    would cost a page fault for each few pages, and what a disk cannot read would end the process.
    """

    def __init__(self, device: torch.device, tensors: Iterable[FileRange]) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._chunks = _chunks(tensors)
        self._reading: deque[tuple[_Chunk, int, Future[None]]] = deque()
        self._buffers = [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=self._cuda) for _ in range(BUFFERS)]
        self._events = [torch.cuda.Event() for _ in range(BUFFERS)] if self._cuda else []
        self._free = deque(range(BUFFERS))  # the one that was sent longest ago comes first
        self._files: dict[Path, int] = {}
        self._threads = ThreadPoolExecutor(THREADS, "weights")

    def close(self) -> None:
        """What was sent still arrives: synchronise before the tensors are read on the host."""
        self._threads.shutdown(cancel_futures=True)  # waits: none may read on from a file that is closed
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def next(self) -> Tensor:
        """The next tensor on the device, for work on the current stream.

        Raises ValueError where its file ends too early and OSError where it cannot be read.
        """
        result: Tensor | None = None
        while True:
            self._read_ahead()
            chunk, buffer, read = self._reading.popleft()
            read.result()
            if result is None:  # not earlier: while others are read ahead, memory for one is enough
                result = torch.empty(chunk.tensor.shape, dtype=chunk.tensor.dtype, device=self._device)
            into = result.view(-1).view(torch.uint8)[chunk.offset : chunk.offset + chunk.nbytes]
            self._send(buffer, self._buffers[buffer][: chunk.nbytes], into)
            if chunk.last:
                return result

    def copy(self, value: Tensor) -> Tensor:
        """The same tensor, of a mapped file, on the device; torch's threads take its page faults."""
        result = torch.empty(value.shape, dtype=value.dtype, device=self._device)
        rows = (len(value), -1) if value.dim() < 3 else (-1, value.shape[-1])
        source, target = value.reshape(rows), result.view(rows)
        row_bytes = source[0].nbytes
        if row_bytes > CHUNK:
            raise ValueError(f"has rows of {row_bytes} bytes; at most {CHUNK} can be loaded")
        for part, into in zip(*(each.split(CHUNK // row_bytes) for each in (source, target)), strict=True):
            buffer = self._take_buffer()
            filled = self._buffers[buffer][: part.nbytes].view(part.dtype).view(part.shape)
            filled.copy_(part)
            self._send(buffer, filled, into)
        return result

    def _read_ahead(self) -> None:
        while len(self._reading) < AHEAD and (chunk := next(self._chunks, None)):
            buffer = self._take_buffer()
            into = self._buffers[buffer].numpy().data[: chunk.nbytes]
            try:
                file = self._open(chunk.tensor.path)
            except OSError as error:  # of this chunk, not of the tensor that is asked for now
                read: Future[None] = Future()
                read.set_exception(error)
            else:
                read = self._threads.submit(_read, file, into, chunk.tensor.start + chunk.offset)
            self._reading.append((chunk, buffer, read))

    def _open(self, path: Path) -> int:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._files[path]

    def _take_buffer(self) -> int:
        """One whose bytes have arrived."""
        buffer = self._free.popleft()
        if self._cuda:
            self._events[buffer].synchronize()  # at once, where it has never been recorded
        return buffer

    def _send(self, buffer: int, source: Tensor, target: Tensor) -> None:
        target.copy_(source, non_blocking=True)
        if self._cuda:
            self._events[buffer].record()
        self._free.append(buffer)


def _chunks(tensors: Iterable[FileRange]) -> Iterator[_Chunk]:
    for tensor in tensors:
        size = torch.Size(tensor.shape).numel() * tensor.dtype.itemsize
        for offset in range(0, size, CHUNK):
            end = min(size, offset + CHUNK)
            yield _Chunk(tensor, offset, end - offset, last=end == size)


def _read(file: int, into: memoryview, start: int) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(file, [into[done:]], start + done)
        if not count:
            raise ValueError(f"ends in the file after {start + done} bytes: is its download complete?")
        done += count
