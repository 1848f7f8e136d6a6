# SPDX-License-Identifier: Apache-2.0
"""Keeps the workers of the OpenAI API running: they share a port, and each connects to the engines. One that
ends, is stopped or hangs is replaced, with growing delays and without end; while all of them are down a
maintenance server answers. One that exits before any has served would do so again, and ends the API.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from flashinfer_backend.core.output import say
from flashinfer_backend.core.parent import end_with_parent
from flashinfer_backend.core.paths import run_dir
from flashinfer_backend.openai.model import NO_MODEL, WorkerOptions
from flashinfer_backend.transport import rundir
from flashinfer_backend.transport.addresses import Address, cut_stalled_clients, reachable_at
from flashinfer_backend.transport.keeper_handle import EngineStartError, KeeperHandle, end_engines
from flashinfer_backend.transport.maintenance_server import RESTARTING, maintenance_server
from flashinfer_backend.transport.restarts import RESTARTS, STOPPED_S, Restarts, Stopped

POLL_S = 0.2
STOOD_S = 2.0  # between two looks: then it is this process that stood still
SAY_AFTER_S = 2.0  # of waiting for open requests at the end
SILENT_S = 20.0  # a process whose event loop has not turned for so long hangs
WORKER = (sys.executable, "-m", "flashinfer_backend.openai.worker")
BACKLOG = 2048


class Supervisor:
    """The workers (openai/worker.py) of the API. All but `stop` is for one thread."""

    def __init__(
        self,
        options: WorkerOptions,
        address: Address,
        port: int,
        workers: int,
        stalled_s: int,
        restarts: int = RESTARTS,
        keeper: KeeperHandle | None = None,
    ) -> None:
        """stalled_s: seconds until a client that does not read is cut; 0: never. restarts: of Restarts, for
        each process. keeper: of engines that are the API's own; None where a server's stubs start them."""
        self._keeper = keeper
        self._options, self._address, self._port = options, address, port
        self._workers, self._stalled_s = workers, stalled_s
        self._restarts = [Restarts(restarts) for _ in range(workers)]
        self._replaced = 0
        # All by a process's number:
        self._listeners: dict[int, socket.socket] = {}  # the kernel spreads connections over them
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._again: dict[int, float] = {}  # when to start a process again
        self._served: set[int] = set()  # those that have ever been ready
        # By pid, of processes that run:
        self._ready_at: dict[int, float] = {}
        self._beat_at: dict[int, float] = {}  # when the event loop last turned
        self._stopped = Stopped()
        self._looked_at = time.monotonic()
        self._maintenance = contextlib.ExitStack()  # open while no process runs
        self._stopping = self._failed = False
        self._told = b""  # the beginning of a line
        self._read, self._notify = os.pipe()
        for end in (self._read, self._notify):  # a process does not wait for this one to read
            os.set_blocking(end, False)

    def run(self, told: Callable[[bool, int], None] = lambda up, restarts: None) -> int:
        """Until `stop`; the exit status: 1 where the processes cannot serve. told: at each look, whether a
        process serves, and how often one was replaced. Raises OSError for a port or a folder."""
        metrics = Path(self._options.metrics_dir)
        rundir.claim(metrics)
        try:
            for number in range(self._workers):
                self._listen(number)
            self._again = dict.fromkeys(range(self._workers), 0.0)
            while not self._stopping and not self._failed:
                self._start_due()
                self._ensure_engines()
                select.select([self._read], [], [], POLL_S)
                self._look()
                told(bool(self._ready_at), self._replaced)
            told(False, self._replaced)
            self._end()
            return 1 if self._failed else 0
        finally:
            if self._keeper is not None:
                end_engines([Path(model.run_dir) for model in self._options.models])
            self._close()
            rundir.remove(metrics)

    def stop(self, *_: object) -> None:
        """Has `run` end the processes and return. For any thread, and for signals."""
        self._stopping = True

    def _ensure_engines(self) -> None:
        try:
            if self._keeper is not None:
                self._keeper.ensure()
        except (EngineStartError, OSError) as error:
            if isinstance(error, EngineStartError) or not self._served:
                _say(str(error))
                self._failed = True

    def _listen(self, number: int) -> None:
        """Makes a process's socket. It lives here, so connections wait while that one is replaced."""
        is_v6 = self._address.version == 6
        self._listeners[number] = listener = socket.create_server(
            (str(self._address), self._port),
            family=socket.AF_INET6 if is_v6 else socket.AF_INET,
            backlog=BACKLOG,
            reuse_port=True,
            # By default, create_server keeps IPv4 off "::".
            dualstack_ipv6=is_v6 and socket.has_dualstack_ipv6(),
        )
        cut_stalled_clients(listener, self._stalled_s)
        self._port = listener.getsockname()[1]

    def _start_due(self) -> None:
        for number, due in list(self._again.items()):
            if time.monotonic() < due:
                continue
            del self._again[number]
            try:
                if number not in self._listeners:
                    self._listen(number)
                self._maintenance.close()
                self._running[number] = self._start(number)
                for waiting in set(self._again) & set(self._listeners):
                    if self._again[waiting] > time.monotonic():
                        self._listeners.pop(waiting).close()
            except OSError as error:  # too many open files or processes, say
                self._wait(number, f"a process cannot be started ({error})", 0.0)

    def _look(self) -> None:
        """Takes what processes say, and sees to those that have ended, are stopped or hang."""
        self._take_messages()
        now = time.monotonic()
        if now - self._looked_at > STOOD_S:
            self._beat_at = dict.fromkeys(self._beat_at, now)
            self._stopped = Stopped()
        self._looked_at = now
        for number, process in list(self._running.items()):
            if process.poll() is not None:
                self._take_messages()  # it may have been ready, just before
                del self._running[number]
                self._ended(number, process)
            elif reason := self._hangs(process.pid, now):
                _say(f"process {process.pid} {reason}: it is killed")
                process.kill()

    def _hangs(self, pid: int, now: float) -> str:
        if self._stopped.for_long(pid, rundir.start_ticks(pid)):
            return f"has been stopped for {STOPPED_S:g} s"
        if now > self._beat_at.get(pid, now) + SILENT_S:
            return f"has not come to its event loop for {SILENT_S:g} s"
        return ""

    def _take_messages(self) -> None:
        """Notes which processes are ready and whose event loops turn, and says it once all are ready."""
        with contextlib.suppress(BlockingIOError):
            self._told += os.read(self._read, 1 << 16)
        *lines, self._told = self._told.split(b"\n")
        numbers = {process.pid: number for number, process in self._running.items()}
        now = time.monotonic()
        for kind, pid in ((line[:1], int(line[1:])) for line in lines):
            if pid not in numbers:
                continue
            self._beat_at[pid] = now
            if kind == b"+":
                if not self._ready_at and self._served:
                    _say("ready again")
                self._ready_at[pid] = now
                before = len(self._served)
                self._served.add(numbers[pid])
                if before < self._workers == len(self._served):
                    self._announce()

    def _ended(self, number: int, process: subprocess.Popen[bytes]) -> None:
        """Says so, and when another takes the place."""
        ready_at = self._ready_at.pop(process.pid, None)
        self._beat_at.pop(process.pid, None)
        if self._stopping:
            return
        status = process.returncode
        ended = f"a process ended {f'by signal {-status}' if status < 0 else f'with status {status}'}"
        if not self._served and status >= 0:  # it was not killed: the next one would come to the same end
            if status != NO_MODEL:
                _say(f"{ended} before it could serve; what it said stands above")
            self._failed = True
            return
        self._wait(number, ended, time.monotonic() - ready_at if ready_at is not None else 0.0)

    def _wait(self, number: int, reason: str, lived_s: float) -> None:
        """Notes when the next process takes a place. Meanwhile its connections go to others, or the
        maintenance server."""
        delay = self._restarts[number].after(lived_s)
        if delay is None:
            _say(f"{reason}; that is once too often in a row, giving up")
            self._failed = True
            return
        self._replaced += 1
        _say(f"{reason}; another takes its place" + (f" in {delay:g} s" if delay else ""))
        self._again[number] = time.monotonic() + delay
        if not delay:
            return  # connections wait for it
        self._maintenance.close()
        for waiting in set(self._again) & set(self._listeners):
            if self._running:
                self._listeners.pop(waiting).close()
            else:
                here = self._address, self._port, _answer
                self._maintenance.enter_context(maintenance_server(*here, self._listeners[waiting]))

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        listener = self._listeners[number]
        own = {"number": number, "listener": listener.fileno(), "notify": self._notify}
        options = msgspec.structs.replace(self._options, **own)
        process = subprocess.Popen(
            WORKER,
            stdin=subprocess.PIPE,
            pass_fds=(listener.fileno(), self._notify),
            start_new_session=True,  # Ctrl-C comes to this process alone, which passes one signal on
            preexec_fn=partial(end_with_parent, signal.SIGKILL),  # it may be stopped, or hang
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode(options))
            process.stdin.close()
        return process

    def _close(self) -> None:
        self._maintenance.close()
        for listener in self._listeners.values():
            listener.close()

    def _end(self) -> None:
        """Ends the processes; running requests have their time. New connections are refused meanwhile, once
        the processes have closed their sockets as well."""
        self._close()
        for process in self._running.values():
            process.terminate()
        left_s = self._options.drain_s + 1.0
        deadline = time.monotonic() + left_s
        words = f"waiting for open requests, up to {left_s - SAY_AFTER_S:.0f} s more"
        late = threading.Timer(SAY_AFTER_S, _say, [words])
        late.start()
        for process in self._running.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _say(f"process {process.pid} did not end within {left_s:g} s and is killed")
                process.kill()
                process.wait()
        late.cancel()

    def _announce(self) -> None:
        url = reachable_at(self._address, self._port)
        several = f", {self._workers} processes" if self._workers > 1 else ""
        if len(self._options.models) > 1:
            several += f", models {', '.join(model.names[0] for model in self._options.models)}"
        say(f"\nOpenAI API ready: {url}/v1{several}, a page to try it: {url}/\n", 1)


def _say(text: str) -> None:
    say(f"openai: {text}")


def _answer(path: str) -> bytes:
    """As openai/errors.py has it, which needs packages that serve does without."""
    error = {"message": RESTARTING, "type": "server_error", "param": None, "code": "engine_unavailable"}
    return msgspec.json.encode({"error": error})


def metrics_dir() -> Path:
    """Where this supervisor's workers share their metrics. What a killed one leaves is removed like
    a run directory."""
    return run_dir(os.getpid(), "openai-metrics")
