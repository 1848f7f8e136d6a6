# SPDX-License-Identifier: Apache-2.0
"""How the processes that use a model's engines start the one that keeps them (launch/keeper.py)."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.output import say
from flashinfer_backend.core.paths import engine_dir
from flashinfer_backend.transport import records, rundir
from flashinfer_backend.transport.gpus import visible_devices
from flashinfer_backend.transport.peers import living_stubs
from flashinfer_backend.transport.records import STOP_S, read_engine, read_keeper

CONFIG = "config.json"  # EngineConfig, in the model's run directory
END_S = STOP_S + 3.0  # for a keeper, which waits for its engines


class EngineStartError(RuntimeError):
    """An engine ended before it was ready; the text ends with the last lines of its log."""


class KeeperHandle:
    """A process's handle on the keeper of its model's engines. Its methods may be called from any thread."""

    def __init__(
        self, run_dir: Path, owner: int, config: EngineConfig, stays: bool = False, engine: Sequence[str] = ()
    ) -> None:
        """run_dir: the model's. owner: the process that the engines end with. stays: they also live while no
        stub uses them. engine: another program than flashinfer_backend.engine. Raises EngineStartError where
        an engine has no GPU."""
        try:
            visible_devices(config, os.environ)
        except ValueError as error:
            raise EngineStartError(str(error)) from None
        self._run_dir, self._stays = run_dir, stays
        self._config = msgspec.json.encode(config)
        self._engines = [engine_dir(run_dir, number) for number in range(config.replicas)]
        self._command = [_python(), "-m", "flashinfer_backend.launch.keeper", "--run-dir", str(run_dir)]
        self._command += ["--owner", str(owner), *(["--stay"] if stays else [])]
        self._engine = ["--", *engine] if engine else []
        self._child: subprocess.Popen[bytes] | None = None

    def ensure(self) -> None:
        """Starts a keeper where there is none; the run directory's lock lets one process do so. Raises
        EngineStartError where an engine cannot start: a model with a wrong setting fails to load at once."""
        keeper = read_keeper(self._run_dir)
        if keeper is None or not keeper.alive:
            with rundir.locked(self._run_dir) as lock:
                keeper = read_keeper(self._run_dir)
                if keeper is None or not keeper.alive:
                    self._start(lock, ever=keeper is not None)
                    return
        for folder in self._engines:
            if (record := read_engine(folder)) is not None and record.error:
                raise EngineStartError(record.error)

    def leave(self) -> None:
        """Ends this stub's part, whose peer socket is closed; with the last stub of the model go the engines,
        unless they stay. Waits at most about END_S."""
        if self._stays or not self._run_dir.exists():
            return
        with rundir.locked(self._run_dir):
            if not living_stubs(self._run_dir):
                end_engines([self._run_dir])
                self._reap()

    def _start(self, lock: int, ever: bool) -> None:
        """lock: the run directory's lock, which the keeper holds until it has noted that it is the one."""
        if (status := self._reap()) and not ever:
            raise EngineStartError(f"the engines' keeper ended with status {status}; what it said is above")
        (self._run_dir / CONFIG).write_bytes(self._config)
        # In a separate session it does not get the terminal's Ctrl-C.
        self._child = subprocess.Popen(
            [*self._command, "--lock", str(lock), *self._engine],
            stdin=subprocess.DEVNULL,
            pass_fds=[lock],
            start_new_session=True,
        )

    def _reap(self) -> int | None:
        """Collects the keeper if it was this process's child and has ended: its status."""
        return None if self._child is None else self._child.poll()


def end_engines(run_dirs: Iterable[Path]) -> None:
    """Ends the keepers in run directories, and with them their engines, and removes the folders."""
    folders = list(run_dirs)
    found = [read_keeper(folder) for folder in folders]
    for keeper in records.stop(*(keeper for keeper in found if keeper is not None), within_s=END_S):
        say(f"the engines' keeper (process {keeper.pid}) did not end within {END_S:g} s and is killed")
    for folder in folders:
        rundir.remove(folder)


def _python() -> str:
    """The interpreter to run the keeper with. A stub embeds Python; sys.executable then is the one it
    found on PATH, or empty."""
    if os.path.basename(sys.executable).startswith("python"):
        return sys.executable
    found = shutil.which("python3")
    if found is None:
        raise EngineStartError("no python3 on PATH to start the engine with; put the environment's bin first")
    return found
