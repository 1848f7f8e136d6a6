# SPDX-License-Identifier: Apache-2.0
"""A trace of one rank's steps, host and device, by torch.profiler."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

_malloc_trim = ctypes.CDLL(None).malloc_trim
MOST_BYTES = 512 << 20  # of one file. Some 800 bytes an event; a step has hundreds to thousands


def warm_up() -> None:
    """The first profiler of a process imports for seconds, in which no step would run."""
    with profile(activities=[ProfilerActivity.CPU]):
        pass


class StepTrace:
    """From its creation on, what the thread that makes it asks of the host, and all that the device does.
    Writing takes a second for 80 MB, in which the process does nothing else."""

    def __init__(self, device: torch.device, file: Path) -> None:
        self.file, self._device = file, device
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()

    def write(self) -> None:
        """Ends it. Half a file is never seen. Raises OSError, and ValueError where it is too large."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the device's events come with the end of its work
        self._profile.stop()
        unfinished = self.file.with_suffix(".part")
        try:
            self._profile.export_chrome_trace(str(unfinished))
            if (size := unfinished.stat().st_size) > MOST_BYTES:
                raise ValueError(
                    f"the trace has {size >> 20} MiB, and may have {MOST_BYTES >> 20}: ask for fewer steps"
                )
            unfinished.replace(self.file)
        finally:
            unfinished.unlink(missing_ok=True)
            # A trace's events refer to each other, and the allocator would keep their memory.
            del self._profile
            gc.collect()
            _malloc_trim(0)
