# SPDX-License-Identifier: Apache-2.0
"""When postprocessing last had a chunk of each sequence, in memory shared with the llm stubs.

`<run dir>/seen-<pid>` belongs to the llm stub with that pid: int64 [SLOTS], the CLOCK_MONOTONIC time in
nanoseconds at which a chunk of the sequence with that local id (modulo SLOTS) was last seen, 0 for
never. A sequence that finds its slot used by another only looks alive for longer.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from flashinfer_backend.transport.protocol import split_handle

SLOTS = 65536


def _path(run_dir: Path, pid: int) -> Path:
    return run_dir / f"seen-{pid}"


class SeenTable:
    """An llm stub's own table; made anew, so it has to exist before the stub's first chunk."""

    def __init__(self, run_dir: Path, pid: int) -> None:
        self._file = _path(run_dir, pid)
        self._times = np.asarray(np.memmap(self._file, dtype=np.int64, mode="w+", shape=(SLOTS,)))

    def last(self, handle: int) -> int:
        """time.monotonic_ns() at the latest chunk of one of this stub's sequences, 0 for none."""
        return int(self._times[split_handle(handle)[1] % SLOTS])

    def forget(self, handle: int) -> None:
        """Makes the slot ready for a new sequence; to be called before its first chunk."""
        self._times[split_handle(handle)[1] % SLOTS] = 0

    def close(self) -> None:
        self._file.unlink(missing_ok=True)


class SeenMarker:
    """Postprocessing's access to the tables of all llm stubs."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._times: dict[int, np.ndarray | None] = {}  # by pid; None: that stub keeps no table

    def mark(self, handle: int) -> None:
        """A chunk of this sequence is here. Handle 0 has no sequence behind it."""
        pid, local_id = split_handle(handle)
        if pid not in self._times:
            self._times[pid] = self._map(pid)
        times = self._times[pid]
        if times is not None:
            times[local_id % SLOTS] = time.monotonic_ns()

    def _map(self, pid: int) -> np.ndarray | None:
        try:
            return np.asarray(np.memmap(_path(self._run_dir, pid), dtype=np.int64, mode="r+", shape=(SLOTS,)))
        except FileNotFoundError:
            return None
