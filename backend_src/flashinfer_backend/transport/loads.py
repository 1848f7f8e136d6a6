# SPDX-License-Identifier: Apache-2.0
"""What each process of a model has open in each engine, in memory shared by all of them.

`<run dir>/load-<pid>`: int64 [engines, 2], the process's open sequences in an engine, and the prompt tokens
of those that have had no token yet. The process alone writes its file, and reads all. Engines report their
load every 100 ms: by these reports alone all processes would send to the same engine for so long.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flashinfer_backend.transport import rundir

LOOK_AGAIN_S = 1.0  # how often a process looks which others there are


class _Other(NamedTuple):
    """The file of another process."""

    inode: int
    load: np.ndarray


class LoadTable:
    """One process's file, and its view of the others'. For one thread at a time, but for `tell`."""

    def __init__(self, run_dir: Path, engines: int) -> None:
        """run_dir: the model's; it has to exist. Raises OSError where there is no room for the file."""
        self._run_dir, self._engines = run_dir, engines
        self._file = run_dir / f"load-{os.getpid()}"
        self._file.unlink(missing_ok=True)  # a killed process with the same pid left it
        self._own = rundir.shared_array(self._file, np.int64, (engines, 2))
        self._others: dict[str, _Other] = {}  # by the file's name
        self._look_at = 0.0

    def tell(self, engine: int, sequences: int, prompt_tokens: int) -> None:
        """What this process has open in an engine now."""
        self._own[engine] = sequences, prompt_tokens

    def of_others(self) -> np.ndarray:
        """int64 [engines, 2]: open sequences and waiting prompt tokens of all other processes that live."""
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_AGAIN_S
            self._look()
        return sum((other.load for other in self._others.values()), np.zeros((self._engines, 2), np.int64))

    def close(self) -> None:
        self._file.unlink(missing_ok=True)

    def _look(self) -> None:
        found: dict[str, _Other] = {}
        for path in self._run_dir.glob("load-*"):
            try:
                if path == self._file or not rundir.process_alive(int(path.name.rpartition("-")[2])):
                    continue
                inode, known = path.stat().st_ino, self._others.get(path.name)
                if known is None or known.inode != inode:  # else: another process with the same pid
                    known = _Other(inode, rundir.shared_array(path, np.int64, (self._engines, 2)))
                found[path.name] = known
            except FileNotFoundError:
                continue  # that process has just left
        self._others = found
