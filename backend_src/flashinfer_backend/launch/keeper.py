# SPDX-License-Identifier: Apache-2.0
"""The parent of a model's engines: `python -m flashinfer_backend.launch.keeper`, one process a model.

The first process that needs the engines starts it (transport/keeper_handle.py): a stub of the model, with
serve or without, or the OpenAI API with its own engines. It starts the engines, passes on what they say,
starts those that end again, and ends with its owner: serve, tritonserver or the OpenAI API. Owned by
tritonserver it also ends when no stub is left. It alone writes the engines' records, from which all others
know them.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec

from flashinfer_backend.core import progress
from flashinfer_backend.core.arguments import program
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.output import say, write
from flashinfer_backend.core.paths import engine_dir
from flashinfer_backend.transport import records, rundir
from flashinfer_backend.transport.gpus import DEVICES_VARIABLE, visible_devices
from flashinfer_backend.transport.keeper_handle import CONFIG
from flashinfer_backend.transport.peers import living_stubs
from flashinfer_backend.transport.protocol import SOCKET
from flashinfer_backend.transport.records import EngineRecord, ProcessRecord
from flashinfer_backend.transport.restarts import Restarts
from flashinfer_backend.transport.stub_processes import end_orphans, find_stub

TICK_S = 0.1
LOOK_S = 1.0  # between two looks at the stubs
TOUCH_S = 6 * 3600
SAY_AFTER_S = 1.0  # of waiting for the engines' end
LOG_TAIL_LINES = 20


class KeptEngine:
    """One engine, which is started again whenever it ends, unless none has ever been ready."""

    def __init__(
        self, name: str, folder: Path, command: Sequence[str], devices: str | None, stall_s: float
    ) -> None:
        """folder: its run directory. devices: its CUDA_VISIBLE_DEVICES, None for this process's own. stall_s:
        how long its start may go without progress; 0: indefinitely."""
        self._name, self._folder, self._command, self._stall_s = name, folder, command, stall_s
        self._env = None if devices is None else {**os.environ, DEVICES_VARIABLE: devices}
        rundir.create(folder)
        before = records.read_engine(folder)
        if before is not None:  # of a keeper that was killed: it may have the GPU still
            records.stop(before)
        self.record = EngineRecord(ever_ready=before is not None and before.ever_ready)
        self._written: EngineRecord | None = None
        self._restarts = Restarts()
        self._process: subprocess.Popen[bytes] | None = None
        self._tail: deque[str] = deque(maxlen=LOG_TAIL_LINES)
        self._due = self._started_at = self._ready_at = 0.0
        self._write()

    def look(self) -> None:
        """Starts it when it is due, and notes what has become of it."""
        now = time.monotonic()
        if self._process is None:
            if now >= self._due and not self.record.error:
                self._start(now)
        elif self._process.poll() is not None:
            self._ended(now, self._process.returncode)
        elif not self.record.ready:
            if (self._folder / SOCKET).exists():
                if self.record.ever_ready:
                    say(f"{self._name} is ready again")
                self.record = msgspec.structs.replace(self.record, ready=True, ever_ready=True)
                self._ready_at = now
            elif self._stall_s:
                self._end_stalled(now)
        self._write()

    def _start(self, now: float) -> None:
        for name in (SOCKET, progress.FILE):
            (self._folder / name).unlink(missing_ok=True)
        try:
            self._process = subprocess.Popen(
                self._command,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:  # there is no room for another process
            if self.record.ever_ready:
                self._wait(now, 0.0, f"cannot be started ({error})")
            else:
                self._give_up(f"the engine process cannot be started ({error})")
            return
        assert self._process.stdout is not None
        self._tail.clear()
        self._reader = threading.Thread(target=self._pass_on, args=(self._process.stdout,), daemon=True)
        self._reader.start()
        self._started_at = now
        ticks = rundir.start_ticks(self._process.pid)
        self.record = EngineRecord(
            self._process.pid, -1 if ticks is None else ticks, ever_ready=self.record.ever_ready
        )

    def _pass_on(self, source: IO[bytes]) -> None:
        with source:
            for line in source:
                self._tail.append(line.decode(errors="replace").rstrip("\n"))
                write(1, line)

    def _end_stalled(self, now: float) -> None:
        if now < max(self._started_at, progress.last_progress(self._folder)) + self._stall_s:
            return
        minutes = self._stall_s / 60
        words = (
            f"engine (pid {self.record.pid}) made no progress for {minutes:g} minutes during startup;"
            " stopping it (start_stall_minutes)"
        )
        say(words)
        records.stop(self.record)
        self._reader.join(1.0)
        self._tail.append(words)

    def _ended(self, now: float, status: int) -> None:
        self._reader.join(1.0)  # its ranks may hold the pipe for a little longer
        self._process = None
        how = f"ended with signal {-status}" if status < 0 else f"ended with status {status}"
        if self.record.ever_ready:
            lived_s = now - self._ready_at if self.record.ready else 0.0
            self._wait(now, lived_s, f"(process {self.record.pid}) {how}")
        else:
            self._give_up("\n".join([f"the engine process {how} before it was ready", *self._tail]))

    def _wait(self, now: float, lived_s: float, reason: str) -> None:
        """Notes when the next one is due."""
        delay = self._restarts.after(lived_s) or 0.0
        self._due = now + delay
        when = f" in {delay:g} s" if delay else ""
        say(f"{self._name} {reason}; the next one is started{when}")

    def read_last_words(self) -> None:
        """Passes on what it said before it ended."""
        if self._process is not None:
            self._reader.join(1.0)

    def __str__(self) -> str:
        return f"{self._name} (process {self.record.pid})"

    def _give_up(self, reason: str) -> None:
        """There is no next one, as none was ever ready."""
        self.record = msgspec.structs.replace(self.record, error=reason)

    def _write(self) -> None:
        if self.record != self._written:
            with contextlib.suppress(OSError):  # there may be no room for a while: tried again
                records.write(self._folder / records.ENGINE, self.record)
                self._written = self.record


class Engines:
    def __init__(
        self, run_dir: Path, owner: int, config: EngineConfig, stays: bool, command: Sequence[str]
    ) -> None:
        """owner: they end with this process. stays: they also live while there is no stub."""
        self._run_dir, self._owner, self._stays = run_dir, owner, stays
        several, devices = config.replicas > 1, visible_devices(config, os.environ)
        self._folders = [engine_dir(run_dir, number) for number in range(config.replicas)]
        self._engines = []
        for number, (folder, shown) in enumerate(zip(self._folders, devices, strict=True)):
            line = [*command, "--run-dir", str(folder), "--parent-pid", str(os.getpid())]
            line += ["--config", str(run_dir / CONFIG), *(["--replica", str(number)] if several else [])]
            name = f"engine {number}" if several else "engine"
            stall_s = config.start_stall_minutes * 60.0
            self._engines.append(KeptEngine(name, folder, line, shown, stall_s))
        self._servers = {owner}  # pids of tritonservers whose stubs have been here
        self._touched_at = time.monotonic()
        self._look_at = 0.0

    def run(self, ending: int) -> None:
        """Until the owner has ended, `ending` can be read, or no stub is left."""
        poller = select.poll()
        poller.register(ending, select.POLLIN)
        self._look_at_stubs()
        with contextlib.suppress(ProcessLookupError):  # a stub that the owner left behind has started this
            poller.register(os.pidfd_open(self._owner), select.POLLIN)
            wait_ms = 0.0  # the first engines are due at once
            while not poller.poll(wait_ms):
                wait_ms = 1000 * TICK_S
                for engine in self._engines:
                    engine.look()
                if time.monotonic() > self._look_at and not self._look_at_stubs():
                    with rundir.locked(self._run_dir):  # no stub comes meanwhile
                        if not living_stubs(self._run_dir):
                            self.end()
                            return
        self.end()

    def end(self) -> None:
        """Ends the engines, and what a server that has gone leaves behind."""
        end_kept(self._engines)
        if not rundir.process_alive(self._owner):
            for server in self._servers:
                end_orphans(server)
        for folder in reversed(self._folders):  # the model's own, with the lock, at last
            rundir.remove(folder)

    def _look_at_stubs(self) -> bool:
        """Whether there is one, or need not be. Also keeps the run directories young."""
        now = time.monotonic()
        self._look_at = now + LOOK_S
        stubs = living_stubs(self._run_dir)
        self._servers.update(int(stub.server) for pid in stubs if (stub := find_stub(pid)) is not None)
        if now > self._touched_at + TOUCH_S:
            self._touched_at = now
            self._touch()
        return bool(stubs) or self._stays

    def _touch(self) -> None:
        """Without XDG_RUNTIME_DIR the run directories are in /tmp, where systemd removes files that were not
        touched for ten days."""
        with contextlib.suppress(OSError):  # another process has just removed it
            os.utime(self._run_dir.parent)
            for folder in self._folders:
                for path in (folder, *folder.rglob("*")):
                    os.utime(path)


def end_kept(engines: Sequence[KeptEngine], within_s: float = records.STOP_S) -> None:
    """Ends engines, and says which of them it waits for."""
    names = {engine.record.pid: str(engine) for engine in engines if engine.record.alive}
    late = threading.Timer(SAY_AFTER_S, say, [f"waiting for the end of {' and '.join(names.values())}"])
    late.start()
    killed = records.stop(*(engine.record for engine in engines), within_s=within_s)
    late.cancel()
    for record in killed:
        left = " and is still there: a driver may be freeing its memory" if record.alive else ""
        say(f"{names[record.pid]} did not end within {within_s:g} s; it got SIGKILL{left}")
    for engine in engines:
        engine.read_last_words()


def main() -> int:
    parser = program("flashinfer_backend.launch.keeper", __doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="of the model; with the configuration")
    parser.add_argument("--owner", type=int, required=True, help="the engines end with this process")
    parser.add_argument("--lock", type=int, required=True, help="descriptor of the run directory's lock")
    parser.add_argument("--stay", action="store_true", help="also while there is no stub")
    engine = [sys.executable, "-m", "flashinfer_backend.engine"]
    parser.add_argument("engine", nargs="*", default=engine, help="the engine's program")
    options = parser.parse_args()
    ending, end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(end)
    signal.signal(signal.SIGTERM, lambda *_: None)
    config = msgspec.json.decode((options.run_dir / CONFIG).read_bytes(), type=EngineConfig)
    engines = Engines(options.run_dir, options.owner, config, options.stay, options.engine)
    ticks = rundir.start_ticks(os.getpid())
    assert ticks is not None
    records.write(options.run_dir / records.KEEPER, ProcessRecord(os.getpid(), ticks))
    os.close(options.lock)
    engines.run(ending)
    return 0


if __name__ == "__main__":
    sys.exit(main())
