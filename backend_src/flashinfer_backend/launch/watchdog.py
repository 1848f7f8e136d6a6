# SPDX-License-Identifier: Apache-2.0
"""Keeps tritonserver serving: whatever of it dies, it is started again; the engine stays meanwhile.

tritonserver replaces no process that a model loses and goes on saying that it is ready, and this release has
no sound way to reload a model (docs/notes/triton-server.md). So the end of a stub, of the engine or of the
server itself has one answer: what is open gets an error, the server is ended with all its stubs, and started
again. Between, a stand-in answers on the HTTP port.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flashinfer_backend.core.output import say
from flashinfer_backend.core.parent import end_with_parent
from flashinfer_backend.core.paths import SERVE_PID, processes_dir, replica_of, run_dir
from flashinfer_backend.launch.asking import ask
from flashinfer_backend.launch.environments import remove_environments
from flashinfer_backend.launch.idle import Idleness
from flashinfer_backend.launch.openai_door import OpenAiDoor
from flashinfer_backend.launch.postprocessing_watch import PostprocessingWatch
from flashinfer_backend.launch.server_log import ServerLog, memory_of_stubs
from flashinfer_backend.launch.server_sockets import (
    close_silent_clients,
    limit_stalled_clients,
    widen_thread_pipes,
)
from flashinfer_backend.transport import peers, rundir
from flashinfer_backend.transport.addresses import STALLED_S, Address, raise_open_files, reachable_at
from flashinfer_backend.transport.doors import OPENAI, TRITON, Doors
from flashinfer_backend.transport.keeper import end_engines
from flashinfer_backend.transport.orphans import (
    Stub,
    close_regions,
    end_orphans,
    regions_of,
    remove_regions,
    stubs_of,
)
from flashinfer_backend.transport.records import EngineRecord, read_engine
from flashinfer_backend.transport.restarts import RESTARTS, STOPPED_S, Restarts
from flashinfer_backend.transport.stand_in import stand_in
from flashinfer_backend.triton_server.standstill import Standstill

TICK_S = 0.1
DRAIN_S = 4.0  # how long running requests may go on after SIGTERM
END_S = 5.0  # how long the server may take to end after that
ERRORS_S = 0.5  # how long clients have to be given their errors before the server is ended
START_STUCK_S = 5.0  # a server that has lost a stub while it starts should end in that time
HANGS_S = 20.0  # without an answer for so long the server is taken for dead
LOOK_EVERY_S = 1.0
SAY_AFTER_S = 1.0  # of waiting for an engine's end
# Threads of the server parse JSON by recursion, up to 270 bytes of stack a bracket. With 8 MiB, 31 000
# brackets in one request end the server. Memory is only taken where a thread gets that deep.
STACK_BYTES = 256 << 20
MIB = 1 << 20
Process = tuple[int, int | None]  # its pid and when it started: pids are used again
GROWN = "The server is being started again; please try again."
LOST = "A process of the server ended unexpectedly, and the server is being started again; please try again."
STOPPING = "The server is shutting down."


@dataclass(frozen=True)
class Policy:
    """drain_s: seconds that open requests have after SIGTERM. restarts: give up after this many starts of
    tritonserver in a row that did not live for a minute; 0: never. growth_mib: how much its memory may grow
    before it is started again; 0: as it likes. shm_prefix: what the names of this server's shared memory
    begin with, and no others: what has such a name is removed when the server has ended. stalled_s: seconds
    until a client that does not read is cut; 0: never."""

    drain_s: float = DRAIN_S
    restarts: int = RESTARTS
    growth_mib: int = 0
    shm_prefix: str = ""
    stalled_s: int = STALLED_S


class Watchdog:
    """Runs one command line of tritonserver for as long as this process is not told to stop."""

    def __init__(
        self,
        args: list[str],
        env: dict[str, str],
        address: Address,
        port: int,
        policy: Policy,
        door: OpenAiDoor,
    ) -> None:
        """args: tritonserver and its arguments, listening at `address` with its HTTP port `port`. door: the
        OpenAI API on the same engine, which goes on whatever becomes of tritonserver."""
        self._args, self._policy, self._door = args, policy, door
        self._env = {**env, SERVE_PID: str(os.getpid())}
        self._address, self._port = address, port
        self._url = reachable_at(address, port)
        self._started_again = 0
        self._asked_at = 0.0  # when this process was told to stop; 0: not yet
        self._was_ready = False
        self._restarts = Restarts(policy.restarts)
        self._stand_in = contextlib.ExitStack()  # open from a death until the server is ready again

    def run(self) -> int:
        """Until SIGINT, SIGTERM or SIGHUP, or until starting again is given up; the exit status."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._stop)
        # So that a single process of a model knows by this one whether it stood still alone.
        try:
            counting = Standstill(processes_dir(os.getpid()))
        except OSError as error:
            _say(f"the server's processes have no place to meet: {error}")
            return 1
        names = (TRITON,) if self._door.port is None else (TRITON, OPENAI)
        self._doors = Doors(processes_dir(os.getpid()), names)
        try:
            self._door.start(partial(self._doors.note, OPENAI))
            while True:
                remove_environments()
                server = _Run(self._args, self._env, self._url, self._policy)
                reason = self._watch(server)
                if self._asked_at:
                    self._door.stop()
                    server.stop(self._asked_at, STOPPING)
                    return 1 if self._door.failed else 0
                self._started_again += 1
                self._doors.note(TRITON, False, self._started_again)
                if not self._was_ready and (why := server.gave_up()):
                    _say(why)
                    return abs(server.end()) or 1
                if server.grown:
                    self._start_again(server, reason)
                elif not self._restart_after(server, reason):
                    return 0 if self._asked_at else 1
        finally:
            self._stand_in.close()
            self._door.close()
            self._doors.close()
            counting.close()
            _end_engines()

    def _stop(self, *_: object) -> None:
        self._asked_at = self._asked_at or time.monotonic()

    def _watch(self, server: _Run) -> str:
        """Why the server has to be started again; nothing that counts when this process should end."""
        while not self._asked_at:
            if self._door.failed:
                _say("the OpenAI API cannot serve, and the server ends")
                self._stop()
                break
            if reason := server.problem():
                return reason
            if not server.ready_at and server.look_ready():
                self._stand_in.close()
                self._doors.note(TRITON, True, self._started_again)
                if self._was_ready:
                    _say("ready again")
                else:
                    _announce(self._url, self._door.url)
                self._was_ready = True
            server.wait(TICK_S)
        return ""

    def _start_again(self, server: _Run, reason: str) -> None:
        """Ends a server that is well, once what is open has ended or had its time."""
        _say(f"{reason}; starting the server again")
        self._stand_in.close()
        self._stand_in.enter_context(stand_in(self._address, self._port))
        server.stop(time.monotonic(), GROWN, end_s=ERRORS_S)

    def _restart_after(self, server: _Run, reason: str) -> bool:
        """Ends what is left of a server and waits until the next one is due; False where none is."""
        lived = time.monotonic() - server.ready_at if server.ready_at else 0.0
        delay = self._restarts.after(lived)
        if delay is not None:
            _say(f"{reason}; starting the server again" + (f" in {delay:g} s" if delay else ""))
            self._stand_in.close()
            self._stand_in.enter_context(stand_in(self._address, self._port))
        else:
            _say(f"{reason}; started again {self._policy.restarts} times in a row, giving up")
        server.fail_open_requests(LOST)
        server.end()
        until = time.monotonic() + (delay or 0.0)
        while not self._asked_at and time.monotonic() < until:
            time.sleep(0.02)
        return delay is not None and not self._asked_at


class _Run:
    """One tritonserver, from its start to its end."""

    def __init__(self, args: list[str], env: dict[str, str], url: str, policy: Policy) -> None:
        # A separate group: Ctrl-C comes to us alone, and we pass on one signal (a second one makes the
        # server leave everything as it is). Whatever ends us ends the server.
        self._url, self._policy = url, policy
        self._log = ServerLog()
        self._child = self._log.popen(args, env=env, start_new_session=True, preexec_fn=_before_start)
        self._pidfds = {os.pidfd_open(self._child.pid): "tritonserver"}
        self._seen: set[Stub] = set()
        self._lost_at = 0.0  # when a stub was found to be gone while the server was starting
        # By run directory; None: it has ended, and another one serves.
        self._engines: dict[Path, EngineRecord | None] = {}
        self._stopped: dict[Process, float] = {}  # since when
        self._next_look = self._answered_at = 0.0
        self._ready_bytes = 0  # the server's memory when it was ready
        self._postprocessing: PostprocessingWatch | None = None  # from when the server is ready
        self.ready_at = 0.0
        self.grown = False  # by more than the policy allows

    def problem(self) -> str:
        """What of the server has died; empty while all is well."""
        if self._child.poll() is not None:
            return f"tritonserver ended ({_how(self._child.returncode)})"
        if not self.ready_at:
            return self._problem_at_start()
        for fd, _ in self._poll(0.0):
            return f"the process of {self._pidfds[fd]} ended"
        if reason := self._growth():
            return reason
        for folder, engine in list(self._engines.items()):
            if engine is not None and not engine.alive:
                if not self._others_serve(folder):
                    return f"the engine process {engine.pid} ended"
                self._engines[folder] = None
                _say(f"{_name(folder)} (process {engine.pid}) ended and is started again; the others go on")
            elif engine is None:
                record = read_engine(folder)
                if record is not None and record.alive and record.ready:
                    self._engines[folder] = record
                    _say(f"{_name(folder)} is ready again")
        return self._hangs()

    def _others_serve(self, folder: Path) -> bool:
        """Whether another engine of the same model is ready. Then the server goes on: the keeper starts the
        one that has ended again."""
        model, _ = replica_of(folder)
        others = [each for each in self._engines if each != folder and replica_of(each)[0] == model]
        records = [read_engine(each) for each in others]
        return any(record is not None and record.alive and record.ready for record in records)

    def _problem_at_start(self) -> str:
        close_regions(regions_of(self._policy.shm_prefix))
        now = time.monotonic()
        if now < self._next_look:
            return ""
        self._next_look = now + 0.5
        stubs = stubs_of(self._child.pid)
        self._seen.update(stubs)
        if not self._lost_at and len(stubs) < len(self._seen):
            self._lost_at = now
        if reason := self._log.cannot_start(self._child.pid):
            return f"the server cannot start ({reason})"
        if self._lost_at and now > self._lost_at + START_STUCK_S:
            return "a model's process ended while it was loaded"
        return ""

    def _hangs(self) -> str:
        now = time.monotonic()
        if now < self._next_look:
            return ""
        self._next_look = now + LOOK_EVERY_S
        if closed := close_silent_clients(self._child.pid):
            _say(f"tritonserver had hardly a descriptor left; closed {closed} connections that were silent")
        engines = {(e.pid, e.start_ticks): folder for folder, e in self._engines.items() if e is not None}
        stubs = [(stub.pid, stub.start_ticks) for stub in self._seen]
        for process in [(self._child.pid, rundir.start_ticks(self._child.pid)), *engines, *stubs]:
            pid, ticks = process
            if not rundir.is_stopped(pid) or rundir.start_ticks(pid) != ticks:
                self._stopped.pop(process, None)
            elif now > self._stopped.setdefault(process, now) + STOPPED_S:
                if process not in engines or not self._others_serve(engines[process]):
                    return f"process {pid} of the server has been stopped for {STOPPED_S:g} s"
                name = _name(engines[process])
                _say(f"{name} (process {pid}) has been stopped for {STOPPED_S:g} s: it is killed")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if _answers(f"{self._url}/v2/health/live", 200):
            self._answered_at = now
        if now > self._answered_at + HANGS_S:
            return f"tritonserver has not answered for {HANGS_S:g} s"
        if self._postprocessing is not None and self._postprocessing.stuck:
            return f"postprocessing has not answered for {HANGS_S:g} s"
        return ""

    def _growth(self) -> str:
        """Why the server has to be started again as it has grown. One request can take gigabytes in a second,
        so this is looked at as often as anything else."""
        if (growth := self._grown_mib()) <= self._policy.growth_mib:
            return ""
        self.grown = not self._grows_on
        said = f"tritonserver's memory has grown by {growth:.0f} MiB, more than {self._policy.growth_mib}"
        return said + (", and grows on" if self._grows_on else "")

    def _grown_mib(self) -> float:
        """Since it was ready; 0 where that has no bound."""
        if not self._policy.growth_mib:
            return 0.0
        return (rundir.memory_bytes(self._child.pid) - self._ready_bytes) / MIB

    @property
    def _grows_on(self) -> bool:
        """Whether it cannot be given the time to end what is open."""
        return self._grown_mib() > 2 * self._policy.growth_mib

    def look_ready(self) -> bool:
        """Whether the server is ready now, with every process that its models should have."""
        if not _answers(f"{self._url}/v2/health/ready", 200):
            return False
        try:
            due = _stubs_due(self._url)
        except (OSError, ValueError, KeyError):
            return False  # asked again
        stubs = stubs_of(self._child.pid)
        self._seen.update(stubs)
        close_regions(regions_of(self._policy.shm_prefix))
        for stub in stubs:
            name = f"a model ({stub.model}, {stub.pid})"
            if name not in self._pidfds.values():  # not counted by an earlier look
                with contextlib.suppress(ProcessLookupError):
                    pidfd = os.pidfd_open(stub.pid)
                    self._pidfds[pidfd] = name
                    if not stub.alive:  # it has ended meanwhile, and another process may have its pid
                        os.close(pidfd)
                        del self._pidfds[pidfd]
        if len(self._pidfds) - 1 < due:
            self._lost_at = self._lost_at or time.monotonic() - START_STUCK_S
            return False
        for folder in _run_dirs():
            record = read_engine(folder)
            if record is not None:
                self._engines[folder] = record
        self._log.ready()
        widen_thread_pipes(self._child.pid)
        limit_stalled_clients(self._child.pid, self._policy.stalled_s)
        self.ready_at = self._answered_at = time.monotonic()
        self._next_look = self.ready_at + LOOK_EVERY_S
        self._ready_bytes = rundir.memory_bytes(self._child.pid)
        self._postprocessing = PostprocessingWatch(self._url, HANGS_S)
        return True

    def gave_up(self) -> str:
        """Why a server that was never ready would not be the next time either: a model that does not load,
        or an exit. Empty where it died or lost a process. Ends the server."""
        ended_itself = self._child.poll() is not None and self._child.returncode >= 0
        status = self.end()
        said = self._log.summary()
        if ended_itself:
            return said or f"tritonserver ended ({_how(status)}) before it was ready"
        return said if self._log.hopeless else ""

    def wait(self, seconds: float) -> None:
        """Returns early when a process of the server ends."""
        self._poll(seconds)

    def fail_open_requests(self, message: str) -> None:
        """Has every request that is open answered with an error, as far as its processes live."""
        if self._child.poll() is None:
            _tell_stubs(peers.FAIL + message.encode())
            self._poll_child(ERRORS_S)

    def stop(self, asked_at: float, message: str, end_s: float = END_S) -> None:
        """Lets open requests go on for a while, refuses new ones, and ends the server. message: what requests
        are told that had not ended by then; end_s: how long the server may take after that."""
        self._seen.update(stubs_of(self._child.pid))
        self._child.send_signal(signal.SIGTERM)
        drained, told = asked_at + self._policy.drain_s, False
        idleness = Idleness(folder for folder, engine in self._engines.items() if engine is not None)
        try:
            while self._child.poll() is None:
                now = time.monotonic()
                if now > drained and not told:
                    told = True
                    _tell_stubs(peers.FAIL + message.encode())
                if now > drained + end_s or self._grows_on:
                    break
                self._seen.update(stubs_of(self._child.pid))  # a model that is being loaded still starts some
                if self.ready_at and idleness.idle(self._child.pid, [stub.pid for stub in self._seen]):
                    break
                self._poll_child(TICK_S)
        finally:
            idleness.close()
        self.end()

    def end(self) -> int:
        """Ends the server and its stubs at once, and removes what they leave; the server's exit status."""
        if self._postprocessing is not None:
            self._postprocessing.close()
        stubs = self._seen.union(stubs_of(self._child.pid))
        memory: set[str] = set()  # of stubs that have not taken it over
        if self._child.poll() is None:
            self._child.send_signal(signal.SIGSTOP)  # it must not make more meanwhile
            if not self.ready_at:  # later, what it has mapped may be memory that clients have registered
                memory = memory_of_stubs(self._child.pid)
            self._child.kill()
        status = self._child.wait()
        stubs.update(stubs_of(self._child.pid))
        end_orphans(self._child.pid, stubs, grace_s=0.0)
        for folder in _run_dirs():
            rundir.forget_stubs(folder)
        remove_regions([*regions_of(self._policy.shm_prefix), *memory])
        for fd in self._pidfds:
            os.close(fd)
        self._pidfds.clear()
        return status

    def _poll(self, seconds: float, fds: Iterable[int] | None = None) -> list[tuple[int, int]]:
        poller = select.poll()
        for fd in self._pidfds if fds is None else fds:
            poller.register(fd, select.POLLIN)
        return poller.poll(seconds * 1000)

    def _poll_child(self, seconds: float) -> None:
        self._poll(seconds, [fd for fd, name in self._pidfds.items() if name == "tritonserver"])


def _run_dirs() -> list[Path]:
    mine = os.getpid()
    return list(run_dir(mine, "").parent.glob(f"{mine}-*"))


def _tell_stubs(message: bytes) -> None:
    for folder in _run_dirs():
        peers.tell_all(folder, message)


def _end_engines() -> None:
    records = [read_engine(folder) for folder in _run_dirs()]
    living = [str(record.pid) for record in records if record is not None and record.alive]
    words = f"waiting for the end of the engine (process {' and '.join(living)})"
    late = threading.Timer(SAY_AFTER_S, _say, [words])
    if living:
        late.start()
    end_engines(_run_dirs())
    late.cancel()


def _name(folder: Path) -> str:
    """An engine, by its run directory."""
    return f"engine {replica_of(folder)[1]}"


def _before_start() -> None:
    end_with_parent()
    raise_open_files()
    os.umask(0o077)  # what the server and its processes write is for this user alone
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited:
        wanted = max(soft, STACK_BYTES if hard == unlimited else min(STACK_BYTES, hard))
        resource.setrlimit(resource.RLIMIT_STACK, (wanted, hard))


def _how(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit status {status}"


def _say(text: str) -> None:
    say(f"serve: {text}")


def _answers(url: str, status: int) -> bool:
    with contextlib.suppress(OSError):
        return ask(url, timeout_s=2)[0] == status
    return False


def _stubs_due(url: str) -> int:
    """How many processes the server's models should have. Raises OSError where it does not say."""

    def told(path: str, body: bytes | None = None) -> Any:
        status, text = ask(url + path, body)
        if status != 200:
            raise OSError(f"{path}: status {status}")
        return json.loads(text)

    count = 0
    for entry in told("/v2/repository/index", b"{}"):
        config = told(f"/v2/models/{entry['name']}/config")
        if config.get("backend") == "python":
            count += sum(int(group.get("count", 1)) for group in config["instance_group"])
    return count


def _announce(url: str, openai_url: str) -> None:
    """openai_url: empty without the OpenAI API."""
    body = json.dumps({"text_input": "Once upon a time", "max_tokens": 32, "stream": True})
    openai = (
        f"The OpenAI API is at {openai_url}/v1, a page to try it at {openai_url}/\n" if openai_url else ""
    )
    say(
        f"\nReady. Try:\n\n  curl -N {url}/v2/models/ensemble/generate_stream -d '{body}'\n\n{openai}"
        "Ctrl-C stops the server.\n",
        1,
    )
