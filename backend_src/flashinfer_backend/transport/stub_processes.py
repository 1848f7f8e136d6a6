# SPDX-License-Identifier: Apache-2.0
"""Finds the stubs of a tritonserver, ends those that a killed one leaves behind, and removes shared memory
that stubs did not remove.

A stub notices that its server is gone and ends, unless it was just exchanging something with the server:
it then waits for the answer indefinitely, some kinds with the interpreter's lock held, so that no thread
in it can help. A stub that was just started when its server gave up waiting for the models to stop ends,
but leaves its memory behind (both seen with tritonserver 2.51).
"""

import contextlib
import os
import signal
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from flashinfer_backend.core import processes
from flashinfer_backend.core.output import say
from flashinfer_backend.core.paths import processes_dirs
from flashinfer_backend.transport import rundir

SHARED_MEMORY = Path("/dev/shm")
GRACE_S = 3.0  # how long stubs have to end by themselves


class Stub(NamedTuple):
    pid: int
    server: str  # pid of its tritonserver
    region: str  # name of its shared memory
    model: str = ""  # its name
    start_ticks: int | None = None  # with the pid, its name for good: pids are used again

    @property
    def alive(self) -> bool:
        """Whether it runs, and no other process has its pid by now."""
        return self.start_ticks is not None and rundir.start_ticks(self.pid) == self.start_ticks

    def memory_bytes(self) -> int:
        """How large its shared memory is by now; it grows by what does not fit, and never shrinks."""
        return (SHARED_MEMORY / self.region).stat().st_size


def end_orphans(server_pid: int, known: Iterable[Stub] = (), grace_s: float | None = None) -> None:
    """Waits until all stubs of a server that has ended are gone, and kills those that are not soon. What
    shared memory they leave is removed, also that of the `known` ones, which have ended before.
    When this process is one of them, it does not return. grace_s: other than GRACE_S."""
    deadline = time.monotonic() + (GRACE_S if grace_s is None else grace_s)
    found = set(known)
    while (stubs := stubs_of(server_pid)) and time.monotonic() < deadline:
        found.update(stubs)
        time.sleep(0.1)
    remove_regions(stub.region for stub in found.union(stubs))
    rundir.forget_processes(processes_dirs(), {stub.pid for stub in stubs})
    for stub in sorted(stubs, key=lambda stub: stub.pid == os.getpid()):  # ourselves last
        if stub.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(stub.pid, signal.SIGKILL)


def regions_of(prefix: str) -> list[str]:
    """Names of shared memory that begin so; none where `prefix` is empty."""
    return [name for name in os.listdir(SHARED_MEMORY) if name.startswith(prefix)] if prefix else []


def remove_regions(names: Iterable[str]) -> None:
    """Takes names of shared memory of this user away. A process that has it mapped keeps the memory."""
    for name in names:
        with _own_region(name) as found:
            if found is not None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(SHARED_MEMORY / name)


def close_regions(names: Iterable[str]) -> None:
    """Takes other users' access to shared memory of this user away. tritonserver lets every user read it,
    whatever the umask."""
    for name in names:
        with _own_region(name) as found:
            if found is not None:
                os.fchmod(found, 0o600)


_skipped: set[str] = set()  # names of which the log has said so


@contextlib.contextmanager
def _own_region(name: str) -> Iterator[int | None]:
    """Opens a region; None where there is none. Every user can make entries there, links to files of others
    too, so what is not a regular file of this user with this name alone is left as it is. No other user can
    replace one that is: the folder is sticky."""
    try:
        # O_NONBLOCK: a FIFO is not waited for.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        found = -1 if "/" in name else os.open(SHARED_MEMORY / name, flags)
    except FileNotFoundError:
        yield None
        return
    except OSError:  # a link, or another user's file
        found = -1
    try:
        status = os.fstat(found) if found >= 0 else None
        if (
            status is not None
            and stat.S_ISREG(status.st_mode)
            and (status.st_uid, status.st_nlink) == (os.getuid(), 1)
        ):
            yield found
            return
        removed = status is not None and not status.st_nlink  # just now
        if not removed and name not in _skipped:
            _skipped.add(name)
            say(f"{SHARED_MEMORY / name} is left as it is: it is no file of this user with one name")
        yield None
    finally:
        if found >= 0:
            os.close(found)


def find_stub(pid: int) -> Stub | None:
    """The process, if it is a stub of this user: others can give theirs the same command line."""
    with contextlib.suppress(OSError):
        if os.stat(f"/proc/{pid}").st_uid != os.getuid():
            return None
        if words := processes.stub_words(pid):
            return Stub(pid, words[5], words[2], Path(words[1]).parent.parent.name, rundir.start_ticks(pid))
    return None


def stubs_of(server_pid: int) -> list[Stub]:
    """The stubs of a server that run, or that it has left behind."""
    pids = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    found = [stub for pid in pids if (stub := find_stub(pid)) and stub.server == str(server_pid)]
    # A stub that starts a program is there twice for a moment: its child has its command line until it has
    # become that program. No pid is 0, which stands for a process that has ended meanwhile.
    copies_of = {0, *(stub.pid for stub in found)}
    return [stub for stub in found if rundir.parent_pid(stub.pid) not in copies_of]
