# SPDX-License-Identifier: Apache-2.0
"""Host memory that a step's data crosses: one vector to the device, one vector back.

On CUDA the buffers are pinned and copies asynchronous. A buffer is written again only after an
event recorded behind its last copy has passed, so steps may be launched ahead of the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

DEPTH = 3  # a step being read, one running, one being prepared
# Vectors of a step, at most about: block table, inputs, sampling, and four for rows that ask for more than a
# temperature.
UPLOADS = 7


class StagingRing:
    """int32 vectors from the host to the device."""

    def __init__(self, length: int, device: torch.device) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._buffers = [self._allocate(length) for _ in range(DEPTH * UPLOADS)]
        self._arrays = [buffer.numpy() for buffer in self._buffers]
        # One for UPLOADS buffers, behind the last one's copy: recording costs more than a copy.
        self._events: list[torch.cuda.Event | None] = [None] * DEPTH
        self._turn = 0

    def begin(self, length: int) -> np.ndarray:
        """A vector of `length` words with undefined content, to be filled and sent before anything else is
        uploaded. Grows the buffer if the step is larger than any before."""
        turn = self._turn
        event = self._events[turn // UPLOADS]
        if event is not None and turn % UPLOADS == 0:
            event.synchronize()
        if length > len(self._arrays[turn]):
            self._buffers[turn] = self._allocate(2 * length)
            self._arrays[turn] = self._buffers[turn].numpy()
        return self._arrays[turn][:length]

    def send(self, target: torch.Tensor) -> None:
        """Copy the vector that `begin` gave to `target`, int32 [its length] on the device."""
        turn, self._turn = self._turn, (self._turn + 1) % len(self._buffers)
        target.copy_(self._buffers[turn][: target.shape[0]], non_blocking=True)
        if self._pinned and self._turn % UPLOADS == 0:
            event = self._events[turn // UPLOADS]
            if event is None:
                event = self._events[turn // UPLOADS] = torch.cuda.Event()
            event.record()

    def upload(self, parts: list[np.ndarray]) -> torch.Tensor:
        """Copy the concatenation of `parts` (int32 or 4-byte views) to a new tensor on the device."""
        length = sum(map(len, parts))
        np.concatenate(parts, out=self.begin(length))
        target = torch.empty(length, dtype=torch.int32, device=self._device)
        self.send(target)
        return target

    def _allocate(self, length: int) -> torch.Tensor:
        return torch.empty(length, dtype=torch.int32, pin_memory=self._pinned)


class ReadbackRing:
    """Small tensors from the device to the host."""

    def __init__(self, length: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._cuda = pinned
        self._buffers = [torch.empty(length, dtype=torch.int32, pin_memory=pinned) for _ in range(DEPTH)]
        # A blocking event sleeps instead of spinning on the driver's lock.
        self._events = [torch.cuda.Event(blocking=True) for _ in range(DEPTH)] if pinned else []
        self._arrays = [buffer.numpy() for buffer in self._buffers]
        self._next = 0

    def download(self, source: torch.Tensor) -> Download:
        """Start copying `source` (int32 [n]). At most DEPTH - 1 downloads may be outstanding."""
        index, self._next = self._next, (self._next + 1) % DEPTH
        length = source.shape[0]
        self._buffers[index][:length].copy_(source, non_blocking=True)
        event = self._events[index] if self._cuda else None
        if event is not None:
            event.record()
        return Download(self._arrays[index][:length], event)


@dataclass
class Download:
    """A tensor on its way to the host, behind everything that was launched before it."""

    buffer: np.ndarray
    event: torch.cuda.Event | None  # None: it is there

    @property
    def done(self) -> bool:
        return self.event is None or self.event.query()

    def wait(self) -> np.ndarray:
        """The values, int32 [n], when they are there."""
        if self.event is not None:
            self.event.synchronize()
        return self.buffer.copy()
