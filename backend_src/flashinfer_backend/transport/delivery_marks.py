# SPDX-License-Identifier: Apache-2.0
"""Marks of the chunks that postprocessing has had of each sequence, in memory shared with the llm stubs.

`<run dir>/marks-<pid>` belongs to the llm stub with that pid: int64 [2, ENTRIES], CLOCK_MONOTONIC times in
nanoseconds. For the sequence with that local id (modulo ENTRIES): when a chunk of it was last seen, 0 for
never, and when the newest of those was sent. A sequence that finds its entry used by another only looks
alive, and keeping up, for longer.
"""

import time
from pathlib import Path

import numpy as np

from flashinfer_backend.transport import rundir
from flashinfer_backend.transport.protocol import split_handle

ENTRIES = 65536
LOOK_AGAIN_NS = 1_000_000_000  # how often postprocessing maps the stubs' files anew


def _path(run_dir: Path, pid: int) -> Path:
    return run_dir / f"marks-{pid}"


class DeliveryMarks:
    """An llm stub's own table; made anew, so it has to exist before the stub's first chunk. Raises OSError
    where there is no room for it."""

    def __init__(self, run_dir: Path, pid: int) -> None:
        self._file = _path(run_dir, pid)
        # A killed stub's leftover, which other processes may still map.
        self._file.unlink(missing_ok=True)
        self._times = rundir.shared_array(self._file, np.int64, (2, ENTRIES))

    def last(self, handle: int) -> int:
        """time.monotonic_ns() at the latest chunk of one of this stub's sequences, 0 for none."""
        return int(self._times[0, split_handle(handle)[1] % ENTRIES])

    def newest(self, handle: int) -> int:
        """sent_ns of the newest chunk that was seen; before that, what `begin` was told."""
        return int(self._times[1, split_handle(handle)[1] % ENTRIES])

    def begin(self, handle: int, now: int) -> None:
        """Makes the entry ready for a new sequence, whose first chunk is sent `now`."""
        self._times[:, split_handle(handle)[1] % ENTRIES] = 0, now

    def close(self) -> None:
        self._file.unlink(missing_ok=True)


class DeliveryMarker:
    """Postprocessing's access to the marks of all llm stubs."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._times: dict[int, np.ndarray | None] = {}  # by pid; None: that stub keeps no marks
        self._look_again = 0

    def mark(self, handle: int, sent_ns: int) -> None:
        """A chunk of this sequence, sent at `sent_ns`, is here. Handle 0 has no sequence behind it."""
        pid, local_id = split_handle(handle)
        now = time.monotonic_ns()
        if now > self._look_again:
            self._look_again = now + LOOK_AGAIN_NS
            self._times.clear()  # stubs may have ended, and others have their pids
        if pid not in self._times:
            self._times[pid] = self._map(pid)
        times = self._times[pid]
        if times is not None:
            entry = local_id % ENTRIES
            times[0, entry] = now
            # Of two instances that do this at once the older chunk may win, until the next one is seen.
            if sent_ns > times[1, entry]:
                times[1, entry] = sent_ns

    def _map(self, pid: int) -> np.ndarray | None:
        try:
            return np.asarray(np.memmap(_path(self._run_dir, pid), np.int64, "r+", shape=(2, ENTRIES)))
        except FileNotFoundError:
            return None
