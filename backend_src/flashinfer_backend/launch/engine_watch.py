# SPDX-License-Identifier: Apache-2.0
"""A server's engines, as serve sees them: by the records that their keepers write (launch/keeper.py)."""

import contextlib
import os
import signal
from pathlib import Path

from flashinfer_backend.core.output import say
from flashinfer_backend.core.paths import replica_of, run_dir
from flashinfer_backend.transport.records import read_engine, read_keeper
from flashinfer_backend.transport.restarts import STOPPED_S, Stopped


class EngineWatch:
    """A keeper starts its engines again; serve has to know which models have none that serves."""

    def __init__(self) -> None:
        self._models: set[str] = set()
        self._stopped = Stopped()

    def begin(self) -> bool:
        """From now on each model that has engines needs one that serves. False where one has none yet."""
        self._models = {replica_of(folder)[0] for folder in run_dirs() if read_engine(folder) is not None}
        return not self._missing()

    def lost(self) -> str:
        """Which models have no engine any more; empty while one of several models has one: it goes on, and
        the others' stubs find the engines that their keepers start."""
        missing = self._missing()
        if missing != self._models:
            return ""
        return " and ".join(f"the last engine of {each.partition('-')[2]} ended" for each in sorted(missing))

    def _missing(self) -> set[str]:
        return self._models - {replica_of(folder)[0] for folder in self.serving()}

    def serving(self) -> list[Path]:
        """Run directories of engines that take requests."""
        found = {folder: read_engine(folder) for folder in run_dirs()}
        return [folder for folder, each in found.items() if each is not None and each.ready and each.alive]

    def kill_stopped(self) -> None:
        """A process that is stopped for long is taken for dead, and then it has to be: the next one needs its
        GPU."""
        for folder in run_dirs():
            for name, record in (("engine", read_engine(folder)), ("engines' keeper", read_keeper(folder))):
                if record is None or not self._stopped.for_long(record.pid, record.start_ticks):
                    continue
                who = f"serve: the {name} (process {record.pid})"
                say(f"{who} has been stopped for {STOPPED_S:g} s: it is killed")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(record.pid, signal.SIGKILL)


def run_dirs() -> list[Path]:
    """The run directories of the models of this process's server."""
    mine = os.getpid()
    return list(run_dir(mine, "").parent.glob(f"{mine}-*"))
