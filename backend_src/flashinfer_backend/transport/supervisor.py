# SPDX-License-Identifier: Apache-2.0
"""Starts the engine process, exactly once, whichever of a model's stubs comes first.

The stubs share no memory, only the run directory: `engine.json` there is the record of the engine
that was started last, read and written under the directory's lock. Whoever finds the recorded
engine dead starts the next one; that is the same act at load time and after a crash.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TypeVar

import msgspec

from flashinfer_backend.core import progress
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.paths import engine_dir
from flashinfer_backend.transport import rundir
from flashinfer_backend.transport.gpus import DEVICES_VARIABLE, visible_devices
from flashinfer_backend.transport.peers import living_stubs
from flashinfer_backend.transport.restarts import STABLE_AFTER_S, restart_delay

LOG_TAIL_LINES = 20
LOG_BYTES = 4 << 20  # of an engine's log in the run directory, which often lies in memory
TOUCH_S = 6 * 3600
STOP_TIMEOUT_S = 5.0


S = TypeVar("S", bound="Supervisor")


class EngineStartError(RuntimeError):
    """The engine ended before it was ready; the text ends with the last lines of its log."""


class EngineRecord(msgspec.Struct):
    """An engine process. Times are those of time.monotonic(), which all processes share."""

    pid: int
    start_ticks: int
    started_at: float
    ready: bool = False
    died_at: float = 0.0  # 0: nobody has found it dead yet
    failures: int = 0  # engines in a row, this one included once it is dead, that did not live long
    ever_ready: bool = False  # whether an engine in this run directory has ever been ready

    @property
    def alive(self) -> bool:
        return rundir.start_ticks(self.pid) == self.start_ticks


class Supervisor:
    """One stub's hand on an engine of its model."""

    takes_part = True  # whether the engine lives as long as this stub, which the others tell what they do

    def __init__(
        self,
        run_dir: Path,
        server_pid: int,
        config: bytes,
        command: list[str] | None = None,
        stays: bool = False,
        replica: int | None = None,
        devices: str | None = None,
        stall_s: float = 0.0,
    ) -> None:
        """run_dir: the model's, where its stubs are. server_pid: the process that the engine ends with.
        config: EngineConfig as JSON, the engine's --config file. stays: that process keeps the engine while
        it starts a new tritonserver, and ends it; otherwise the engine ends with the last stub. replica: the
        engine's number where the model has several. devices: CUDA_VISIBLE_DEVICES of the engine, None for
        this process's own. stall_s: how long a starting engine may come no further; 0: for ever."""
        self.run_dir = engine_dir(run_dir, replica or 0)
        self._stubs_dir = run_dir
        self._replica, self._devices = replica, devices
        self._stays, self._stall_s = stays, stall_s
        self.server_pid = server_pid
        self._config = config
        self._command = command or [_python(), "-m", "flashinfer_backend.engine"]
        self._children: list[subprocess.Popen[bytes]] = []
        self._record_path = self.run_dir / "engine.json"
        self._touched_at = time.monotonic()

    def attach(self) -> tuple[EngineRecord | None, bool]:
        """(the living engine, whether this call replaced a dead one); starts one when there is none.

        No engine is returned while the delay between two attempts runs (`restart_delay`): call again. Raises
        EngineStartError where no engine has ever been ready, so that a model with a wrong setting fails to
        load at once; one that did run is tried again for ever.
        """
        self.reap()
        with rundir.locked(self.run_dir):
            record = self._read()
            if record is None:
                return self._start(EngineRecord(0, 0, 0.0)), False
            if record.alive:
                return record, False
            now = time.monotonic()
            if not record.died_at:
                record.died_at = now
                stable = record.ready and now - record.started_at > STABLE_AFTER_S
                record.failures = 1 if stable else record.failures + 1
                self._write(record)
            if not record.ever_ready:
                raise EngineStartError(f"the engine process ended before it was ready\n{self.log_tail()}")
            if now < record.died_at + restart_delay(record.failures):
                return None, False
            return self._start(record), True

    def mark_ready(self, pid: int) -> None:
        """Notes that the engine with this pid has reported ready."""
        with rundir.locked(self.run_dir):
            record = self._read()
            if record and record.pid == pid and not record.ready:
                record.ready = record.ever_ready = True
                self._write(record)

    def end_stalled(self, pid: int) -> None:
        """Ends the engine with this pid if it is not ready and comes no further. Its next attach says so."""
        with rundir.locked(self.run_dir):
            record = self._read()
            if not self._stall_s or record is None or record.pid != pid or record.ready or not record.alive:
                return
            latest = max(record.started_at, progress.last_progress(self.run_dir))
            if time.monotonic() < latest + self._stall_s:
                return
            words = (
                f"the engine process {pid} has come no further for {self._stall_s / 60:g} minutes while it"
                " starts, and is ended (start_stall_minutes)"
            )
            stop(record)
            with (self.run_dir / "engine.log").open("a") as log:
                log.write(words + "\n")
        print(words, file=sys.stderr, flush=True)

    def leave(self) -> None:
        """Ends this stub's part; with the last stub of the model go the engine and the run directory, unless
        the engine stays.

        The stub's peer socket must be closed before. Waits at most about STOP_TIMEOUT_S.
        """
        if self._stays or not self.run_dir.exists():
            return
        with rundir.locked(self.run_dir):
            if living_stubs(self._stubs_dir):
                return
            record = self._read()
            if record:
                stop(record)
            self.reap()
            rundir.remove(self.run_dir)

    def reap(self) -> None:
        """Collects ended children of this stub, so that they do not stay as zombies."""
        self._children = [child for child in self._children if child.poll() is None]

    def log_tail(self) -> str:
        """The engine's own last log lines."""
        try:
            text = (self.run_dir / "engine.log").read_text(errors="replace")
        except FileNotFoundError:
            return "(it left no log)"
        return "\n".join(text.splitlines()[-LOG_TAIL_LINES:])

    def tend(self) -> None:
        """Looks after the run directory of an engine that is ready; to be called now and then.

        Empties the log where it has become long. All of it is in the server's output, and it is read again
        only where an engine does not become ready. Files keep a young age: without XDG_RUNTIME_DIR they are
        in /tmp, of which systemd removes what nobody has touched for ten days.
        """
        log, now = self.run_dir / "engine.log", time.monotonic()
        with contextlib.suppress(OSError):  # another process has just removed it
            if log.stat().st_size > LOG_BYTES:
                os.truncate(log, 0)
            if now - self._touched_at > TOUCH_S:
                self._touched_at = now
                for path in (self.run_dir.parent, self.run_dir, *self.run_dir.rglob("*")):
                    os.utime(path)

    def _start(self, previous: EngineRecord) -> EngineRecord:
        config_path = self.run_dir / "config.json"
        config_path.write_bytes(self._config)
        log_path = self.run_dir / "engine.log"
        log_path.unlink(missing_ok=True)
        (self.run_dir / progress.FILE).unlink(missing_ok=True)
        # tee lets the log appear in tritonserver's output and survives the stub that started it. In a
        # session of their own, both are spared the terminal's Ctrl-C: the engine ends with the server.
        tee = subprocess.Popen(["tee", "-i", "-a", log_path], stdin=subprocess.PIPE, start_new_session=True)
        assert tee.stdin is not None
        engine = subprocess.Popen(
            [
                *self._command,
                *("--run-dir", str(self.run_dir)),
                *("--server-pid", str(self.server_pid)),
                *("--config", str(config_path)),
                *(["--stay"] if self._stays else []),
                *([] if self._replica is None else ["--replica", str(self._replica)]),
            ],
            env=None if self._devices is None else {**os.environ, DEVICES_VARIABLE: self._devices},
            stdin=subprocess.DEVNULL,
            stdout=tee.stdin,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        tee.stdin.close()
        self._children += [tee, engine]
        record = EngineRecord(
            pid=engine.pid,
            start_ticks=rundir.start_ticks(engine.pid) or -1,
            started_at=time.monotonic(),
            failures=previous.failures,
            ever_ready=previous.ever_ready,
        )
        self._write(record)
        return record

    def _read(self) -> EngineRecord | None:
        return read_record(self._record_path.parent)

    def _write(self, record: EngineRecord) -> None:
        temporary = self._record_path.with_suffix(".new")
        temporary.write_bytes(msgspec.json.encode(record))
        temporary.replace(self._record_path)


def supervisors(
    kind: type[S], run_dir: Path, server_pid: int, config: EngineConfig, stays: bool = False
) -> list[S]:
    """A hand of this kind on each engine of a model. run_dir, server_pid, stays: as Supervisor's. Raises
    EngineStartError where an engine has no GPU."""
    try:
        devices = visible_devices(config, os.environ)
    except ValueError as error:
        raise EngineStartError(str(error)) from None
    text, several, stall_s = (
        msgspec.json.encode(config),
        config.replicas > 1,
        config.start_stall_minutes * 60.0,
    )
    return [
        kind(
            *(run_dir, server_pid, text),
            stays=stays,
            replica=number if several else None,
            devices=shown,
            stall_s=stall_s,
        )
        for number, shown in enumerate(devices)
    ]


def read_record(run_dir: Path) -> EngineRecord | None:
    """The engine that was started last in a run directory, None where none was."""
    with contextlib.suppress(FileNotFoundError):
        return msgspec.json.decode((run_dir / "engine.json").read_bytes(), type=EngineRecord)
    return None


def stop(*records: EngineRecord) -> None:
    """Ends engines that may have ended: SIGTERM to all, and SIGKILL where that is not enough in
    STOP_TIMEOUT_S."""
    for number, timeout in ((signal.SIGTERM, STOP_TIMEOUT_S), (signal.SIGKILL, 1.0)):
        living = [record for record in records if record.alive]
        for record in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(record.pid, number)
        deadline = time.monotonic() + timeout
        while any(record.alive for record in living) and time.monotonic() < deadline:
            time.sleep(0.02)


def _python() -> str:
    """The interpreter to run the engine with. A stub embeds Python; sys.executable then is the one it
    found on PATH, or empty."""
    if os.path.basename(sys.executable).startswith("python"):
        return sys.executable
    found = shutil.which("python3")
    if found is None:
        raise EngineStartError("no python3 on PATH to start the engine with; put the environment's bin first")
    return found
