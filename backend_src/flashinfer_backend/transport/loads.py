# SPDX-License-Identifier: Apache-2.0
"""What each process of a model has open in each engine, in memory shared by all of them.

`<run dir>/load-<start>-<pid>`: int64 [engines, 2], the process's open sequences in an engine, and the prompt
tokens of those that have had no token yet. The process alone writes its file, and reads all. Engines report
their load every 100 ms: by these reports alone all processes would send to the same engine for so long.
<start>: when the process started, in clock ticks since boot. Else a killed process's load would count again
for the next process with its pid.
"""

import contextlib
import os
import threading
import time
from pathlib import Path

import numpy as np

from flashinfer_backend.core.output import say
from flashinfer_backend.transport import rundir

LOOK_AGAIN_S = 1.0  # how often a process looks which others there are, and whether its own file is there


class LoadTable:
    """One process's file, and its view of the others'. `of_others` is for one thread at a time."""

    def __init__(self, run_dir: Path, engines: int) -> None:
        """run_dir: the model's. The file is made by the first `of_others`; where there is no room for it that
        is said once, and tried again with each look."""
        pid = os.getpid()
        self._run_dir = run_dir
        self._file = run_dir / f"load-{rundir.start_ticks(pid)}-{pid}"
        self._lock = threading.Lock()  # guards _own, _made and _closed
        self._own = np.zeros((engines, 2), np.int64)
        self._made = False  # whether _own is in the file
        self._closed = self._complained = False
        self._others: rundir.SharedArrays = {}
        self._look_at = 0.0

    def tell(self, engine: int, sequences: int, prompt_tokens: int) -> None:
        """What this process has open in an engine now."""
        with self._lock:
            self._own[engine] = sequences, prompt_tokens

    def of_others(self) -> np.ndarray:
        """int64 [engines, 2]: open sequences and waiting prompt tokens of all other processes that live."""
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_AGAIN_S
            self._keep_own()
            with contextlib.suppress(OSError):  # no descriptors for a while: what it knew counts on
                self._look()
        total = np.zeros(self._own.size, np.int64)
        for load in self._others.values():  # of a process that may know of more engines, or fewer
            size = min(len(load) // 2 * 2, len(total))  # whole pairs alone
            total[:size] += load[:size]
        return total.reshape(self._own.shape)

    def close(self) -> None:
        """Removes the file; it is not made again."""
        with self._lock:
            self._closed = True
            self._file.unlink(missing_ok=True)

    def _keep_own(self) -> None:
        """Makes the file where there is none: at first, or when somebody has removed it since."""
        with self._lock:
            if self._closed or (self._made and self._file.exists()):
                return
            try:
                own = rundir.shared_array(self._file, np.int64, self._own.shape)
            except OSError as error:
                with contextlib.suppress(OSError):
                    self._file.unlink()  # it is there, without its room
                if not self._complained:
                    self._complained = True
                    say(f"others do not know what this process has open ({error})")
                return
            own[:] = self._own
            self._own, self._made, self._complained = own, True, False

    def _look(self) -> None:
        living = []
        for path in self._run_dir.glob("load-*-*"):
            with contextlib.suppress(FileNotFoundError, PermissionError, ValueError):
                _, started, pid = path.name.split("-")
                if rundir.start_ticks(int(pid)) != int(started):
                    path.unlink()  # its process has ended, and no other one can have this name
                elif path != self._file:
                    living.append(path)
        self._others = rundir.arrays_of_others(living, self._others)
