# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's tensors on their way from a file in memory to the device."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 64 << 20  # bytes of a buffer: as long to copy as to fill
BUFFERS = 2
SMALL = 1 << 16  # bytes: norms and scales, of which some are looked at on the host


class Uploader:
    """Copies tensors of mapped files to a device: torch's threads fill a pinned buffer, which takes the page
    faults with it, while the buffer before is on its way. The driver's own way, one thread page by page, is
    several times slower.

    Pinned memory of BUFFERS * CHUNK bytes is its own until it is dropped; on a CPU nothing is pinned.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._buffers = [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=self._cuda) for _ in range(BUFFERS)]
        self._events = [torch.cuda.Event() for _ in range(BUFFERS)] if self._cuda else []
        self._turn = 0

    def __call__(self, value: Tensor) -> Tensor:
        """The same tensor on the device, for work on the current stream; a small one as it is."""
        if value.nbytes <= SMALL:
            return value
        result = torch.empty(value.shape, dtype=value.dtype, device=self._device)
        source, target = value.reshape(len(value), -1), result.view(len(value), -1)
        row_bytes = source[0].nbytes
        if row_bytes > CHUNK:
            raise ValueError(f"has rows of {row_bytes} bytes; at most {CHUNK} can be loaded")
        rows = CHUNK // row_bytes
        for part, into in zip(source.split(rows), target.split(rows), strict=True):
            self._send(part, into)
        return result

    def _send(self, source: Tensor, target: Tensor) -> None:
        turn, self._turn = self._turn, (self._turn + 1) % BUFFERS
        if self._cuda:
            self._events[turn].synchronize()  # at once, where it has never been recorded
        buffer = self._buffers[turn][: source.nbytes].view(source.dtype).view(source.shape)
        buffer.copy_(source)
        target.copy_(buffer, non_blocking=True)
        if self._cuda:
            self._events[turn].record()
