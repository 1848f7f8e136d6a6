# SPDX-License-Identifier: Apache-2.0
"""Keeps the door's processes running: they share a port, and each attaches to the engine by itself. One that
ends before any has served would do so the next time, and ends the whole."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from flashinfer_backend.core.output import say
from flashinfer_backend.core.paths import engine_dir, run_dir
from flashinfer_backend.openai.worker import NO_ENGINE, WorkerOptions
from flashinfer_backend.transport import rundir
from flashinfer_backend.transport.addresses import Address, cut_stalled_clients, reachable_at
from flashinfer_backend.transport.restarts import RESTARTS, Restarts

POLL_S = 0.2
WORKER = (sys.executable, "-m", "flashinfer_backend.openai.worker")
BACKLOG = 2048


class Parent:
    """Starts processes, replaces those that end, and ends all of them with the server."""

    def __init__(
        self,
        options: WorkerOptions,
        address: Address,
        port: int,
        workers: int,
        stalled_s: int,
        restarts: int = RESTARTS,
    ) -> None:
        """stalled_s: seconds until a client that does not read is cut; 0: never. restarts: of Restarts, for
        each process."""
        self._options, self._address, self._port = options, address, port
        self._workers, self._stalled_s = workers, stalled_s
        self._restarts = [Restarts(restarts) for _ in range(workers)]
        self._ready_at: dict[int, float] = {}  # by pid, of processes that run
        self._served: set[int] = set()  # numbers of those that have ever been ready
        self._running: dict[int, subprocess.Popen[bytes]] = {}  # by number
        self._again: dict[int, float] = {}  # when to start a process again
        self._stopping = False
        self._read, self._notify = os.pipe()
        os.set_blocking(self._read, False)

    def run(self) -> int:
        """Until SIGTERM, SIGINT or the server's end; the exit status. Raises OSError for a port."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)
        metrics = Path(self._options.metrics_dir)
        metrics.mkdir(mode=0o700, parents=True)
        try:
            with self._listeners() as listeners:
                status = self._keep(listeners)
            self._end()
            return status
        finally:
            shutil.rmtree(metrics, ignore_errors=True)
            with contextlib.suppress(OSError):
                metrics.parent.rmdir()  # the user's, if it was the last one

    def _stop(self, *_: object) -> None:
        self._stopping = True

    @contextlib.contextmanager
    def _listeners(self) -> Iterator[list[socket.socket]]:
        """A socket for each process; the kernel spreads connections over them. They live here, so connections
        wait while a process is replaced."""
        family = socket.AF_INET6 if self._address.version == 6 else socket.AF_INET
        with contextlib.ExitStack() as stack:
            sockets = []
            for _ in range(self._workers):
                listener = stack.enter_context(socket.socket(family))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                listener.bind((str(self._address), self._port))
                self._port = listener.getsockname()[1]
                sockets.append(listener)
            for listener in sockets:
                cut_stalled_clients(listener, self._stalled_s)
                listener.listen(BACKLOG)
            yield sockets

    def _keep(self, listeners: list[socket.socket]) -> int:
        self._again = dict.fromkeys(range(self._workers), 0.0)
        told = b""  # pids of processes that are ready, one a line
        while not self._stopping:
            if self._options.follow and not rundir.process_alive(self._options.server_pid):
                return 0
            for number, due in list(self._again.items()):
                if time.monotonic() >= due:
                    del self._again[number]
                    self._running[number] = self._start(listeners[number])
            for number, process in list(self._running.items()):
                if process.poll() is not None:
                    told = self._take_ready(told)  # it may have been, just before
                    del self._running[number]
                    for file in Path(self._options.metrics_dir).glob(f"gauge_live*_{process.pid}.db"):
                        file.unlink()  # what it held it holds no more
                    if process.returncode == NO_ENGINE:
                        return 1
                    if self._options.follow and not rundir.process_alive(self._options.server_pid):
                        continue  # the server has ended, which is seen next
                    if (delay := self._delay(number, process)) is None:
                        return 1
                    self._again[number] = time.monotonic() + delay
            select.select([self._read], [], [], POLL_S)
            told = self._take_ready(told)
        return 0

    def _take_ready(self, told: bytes) -> bytes:
        """Notes which processes say that they are ready, and says so once all have. told: the beginning of a
        line; returned is that of the next one."""
        with contextlib.suppress(BlockingIOError):
            told += os.read(self._read, 4096)
        *lines, rest = told.split(b"\n")
        numbers = {process.pid: number for number, process in self._running.items()}
        for pid in map(int, lines):
            if pid in numbers:
                self._ready_at[pid] = time.monotonic()
                before = len(self._served)
                self._served.add(numbers[pid])
                if before < self._workers == len(self._served):
                    self._announce()
        return rest

    def _delay(self, number: int, process: subprocess.Popen[bytes]) -> float | None:
        """Seconds until another takes the place of a process that has ended; None where none should. Says
        what happens."""
        ready_at = self._ready_at.pop(process.pid, None)
        lived = time.monotonic() - ready_at if ready_at is not None else 0.0
        status = process.returncode
        ended = f"a process ended {f'by signal {-status}' if status < 0 else f'with status {status}'}"
        delay = self._restarts[number].after(lived)
        if not self._served and status >= 0:  # it was not killed: the next one would come to the same end
            _say(f"{ended} before it could serve; what it said stands above")
            return None
        if delay is None:
            _say(f"{ended}; that is once too often in a row, giving up")
            return None
        _say(f"{ended}; another takes its place" + (f" in {delay:g} s" if delay else ""))
        return delay

    def _start(self, listener: socket.socket) -> subprocess.Popen[bytes]:
        options = msgspec.structs.replace(self._options, listener=listener.fileno(), notify=self._notify)
        process = subprocess.Popen(
            WORKER,
            stdin=subprocess.PIPE,
            pass_fds=(listener.fileno(), self._notify),
            start_new_session=True,  # Ctrl-C comes to this process alone, which passes one signal on
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode(options))
            process.stdin.close()
        return process

    def _end(self) -> None:
        """Ends the processes; running requests have their time."""
        for process in self._running.values():
            process.terminate()
        deadline = time.monotonic() + self._options.drain_s + 10.0
        for process in self._running.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if not self._options.follow:
            for number in range(self._options.engine.replicas):  # where a process was killed
                rundir.remove(engine_dir(Path(self._options.run_dir), number))

    def _announce(self) -> None:
        url = reachable_at(self._address, self._port)
        say(f"\nOpenAI API ready: {url}/v1, a page to try it: {url}/\n", 1)


def _say(text: str) -> None:
    say(f"openai: {text}")


def metrics_dir() -> Path:
    """Where this parent's processes share their metrics. What is left of one that was killed is removed like
    a run directory."""
    return run_dir(os.getpid(), "openai-metrics")
