# SPDX-License-Identifier: Apache-2.0
"""Which processes look after a model and compute for it: files in its run directories."""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TypeVar

import msgspec

from flashinfer_backend.transport import rundir

ENGINE, KEEPER = "engine.json", "keeper.json"
STOP_S = 5.0


class ProcessRecord(msgspec.Struct):
    """A process by its pid and when it started: pids are used again."""

    pid: int = 0
    start_ticks: int = -1

    @property
    def alive(self) -> bool:
        return rundir.start_ticks(self.pid) == self.start_ticks


class EngineRecord(ProcessRecord):
    """The engine that was started last. ready: it takes requests. ever_ready: it does, or one before it did.
    error: why none ever did, and none will be started; empty otherwise."""

    ready: bool = False
    ever_ready: bool = False
    error: str = ""


R = TypeVar("R", bound=ProcessRecord)


def read_engine(run_dir: Path) -> EngineRecord | None:
    """None where no engine was started in this run directory."""
    return _read(run_dir / ENGINE, EngineRecord)


def read_keeper(run_dir: Path) -> ProcessRecord | None:
    """The latest keeper of a model's engines (launch/keeper.py); None before the first."""
    return _read(run_dir / KEEPER, ProcessRecord)


def write(path: Path, record: ProcessRecord) -> None:
    """Readers see the whole record, or the one before."""
    unfinished = path.with_suffix(".new")
    unfinished.write_bytes(msgspec.json.encode(record))
    unfinished.replace(path)


def stop(*records: R, within_s: float = STOP_S) -> list[R]:
    """Ends processes that may have ended: SIGTERM to all, and SIGKILL where that is not enough in time.
    Returns those that had to be killed."""
    living: list[R] = []
    for number, timeout in ((signal.SIGTERM, within_s), (signal.SIGKILL, 1.0)):
        living = [record for record in records if record.alive]
        for record in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(record.pid, number)
        deadline = time.monotonic() + timeout
        while any(record.alive for record in living) and time.monotonic() < deadline:
            time.sleep(0.02)
    return living


def _read(path: Path, kind: type[R]) -> R | None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return msgspec.json.decode(path.read_bytes(), type=kind)
    return None
