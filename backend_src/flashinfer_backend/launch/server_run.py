# SPDX-License-Identifier: Apache-2.0
"""One tritonserver, from its start to its end: whether it is ready, what of it has died or hangs, and how it
is ended so that nothing of it is left."""

import contextlib
import math
import os
import resource
import select
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass

from flashinfer_backend.core.bounds import MIB
from flashinfer_backend.core.output import say
from flashinfer_backend.core.parent import end_with_parent
from flashinfer_backend.launch.engine_watch import EngineWatch, run_dirs
from flashinfer_backend.launch.idle import Idleness
from flashinfer_backend.launch.local_http import ask, model_configs
from flashinfer_backend.launch.postprocessing_watch import PostprocessingWatch
from flashinfer_backend.launch.server_log import ServerLog, memory_of_stubs
from flashinfer_backend.launch.server_sockets import (
    close_silent_clients,
    limit_stalled_clients,
    widen_thread_pipes,
)
from flashinfer_backend.transport import peers, rundir
from flashinfer_backend.transport.addresses import STALLED_S, raise_open_files
from flashinfer_backend.transport.restarts import RESTARTS, STOPPED_S, Stopped
from flashinfer_backend.transport.stub_processes import (
    Stub,
    close_regions,
    end_orphans,
    regions_of,
    remove_regions,
    stubs_of,
)

TICK_S = 0.1
DRAIN_S = 4.0  # how long running requests may go on after SIGTERM
END_S = 5.0  # how long the server may take to end after that
SAY_AFTER_S = 2.0  # of waiting for open requests
ERRORS_S = 0.5  # how long clients have to be given their errors before the server is ended
START_STUCK_S = 5.0  # a server that has lost a stub while it starts should end in that time
HANGS_S = 20.0  # without an answer for so long the server is taken for dead
LOOK_EVERY_S = 1.0
# Threads of the server parse JSON by recursion, up to 270 bytes of stack a bracket. With 8 MiB, 31 000
# brackets in one request end the server. Memory is only taken where a thread gets that deep.
STACK_BYTES = 256 << 20


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


class ServerRun:
    def __init__(self, args: list[str], env: dict[str, str], url: str, policy: Policy) -> None:
        """Starts it. Raises OSError."""
        # A separate group: Ctrl-C comes to us alone, and we pass on one signal (a second one makes the
        # server leave everything as it is). Whatever ends us ends the server.
        self._url, self._policy = url, policy
        self._log = ServerLog()
        self._child = self._log.popen(args, env=env, start_new_session=True, preexec_fn=_before_start)
        try:
            self._pidfds = {os.pidfd_open(self._child.pid): "tritonserver"}
        except OSError:
            self._child.kill()
            self._child.wait()
            raise
        self._seen: set[Stub] = set()
        self._lost_at = 0.0  # when a stub was found to be gone while the server was starting
        self._engines = EngineWatch()
        self._stopped = Stopped()
        self._next_look = self._answered_at = 0.0
        self._ready_bytes = 0  # the server's memory when it was ready
        self._postprocessing: PostprocessingWatch | None = None  # from when the server is ready
        self.ready_at = 0.0
        self.grown = False  # by more than the policy allows

    def problem(self) -> str:
        """What of the server has died; empty while all is well."""
        if self._child.poll() is not None:
            return f"tritonserver ended ({_how(self._child.returncode)})"
        if reason := self._log.crashed():
            return reason
        if not self.ready_at:
            return self._problem_at_start()
        for fd, _ in self._poll(0.0):
            return f"the process of {self._pidfds[fd]} ended"
        if reason := self._growth():
            return reason
        return self._engines.lost() or self._hangs()

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
            known = f"closed {closed} connections that were silent"
            say(f"serve: tritonserver had hardly a descriptor left; {known}")
        self._engines.kill_stopped()
        server = (self._child.pid, rundir.start_ticks(self._child.pid))
        for pid, ticks in [server, *((stub.pid, stub.start_ticks) for stub in self._seen)]:
            if self._stopped.for_long(pid, ticks):
                return f"process {pid} of the server has been stopped for {STOPPED_S:g} s"
        if _answers(f"{self._url}/v2/health/live"):
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
        if not _answers(f"{self._url}/v2/health/ready"):
            return False
        try:
            configs = model_configs(self._url).values()
            groups = [each["instance_group"] for each in configs if each.get("backend") == "python"]
            due = sum(int(each.get("count", 1)) for group in groups for each in group)
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
        if not self._engines.begin():
            return False
        self._log.ready()
        widen_thread_pipes(self._child.pid)
        limit_stalled_clients(self._child.pid, self._policy.stalled_s)
        self.ready_at = self._answered_at = time.monotonic()
        self._next_look = self.ready_at + LOOK_EVERY_S
        self._ready_bytes = rundir.memory_bytes(self._child.pid)
        models = {stub.model for stub in stubs if stub.model.endswith("postprocessing")}
        self._postprocessing = PostprocessingWatch(self._url, HANGS_S, models=models)
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
        said_at = time.monotonic() + SAY_AFTER_S
        idleness = Idleness(self._engines.serving())
        try:
            while self._child.poll() is None:
                now = time.monotonic()
                if now > drained and not told:
                    told = True
                    _tell_stubs(peers.FAIL + message.encode())
                if now > drained + end_s or self._grows_on:
                    break
                if now > said_at:
                    said_at = math.inf
                    left = drained + end_s - now
                    say(f"serve: waiting for {idleness.waits_for}, up to {left:.0f} s more")
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
        for folder in run_dirs():
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


def _tell_stubs(message: bytes) -> None:
    for folder in run_dirs():
        peers.tell_all(folder, message)


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


def _answers(url: str) -> bool:
    with contextlib.suppress(OSError):
        return ask(url, timeout_s=2)[0] == 200
    return False
