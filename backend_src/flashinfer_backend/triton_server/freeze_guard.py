# SPDX-License-Identifier: Apache-2.0
"""Ends a model's process that froze: it stood still while tritonserver went on.

tritonserver (2.51, and 26.07 still) gives up what waits for a process that shows no sign of life within a
second: these requests fail, and their memory serves the next ones. A process that only stood still (SIGSTOP,
a debugger, swapping) finds them in its queue when it goes on, and its answers to them are sent to the clients
that have that memory now. Nothing tells it that they were given up. So it ends itself, before it answers: to
tritonserver it is dead already.

Where a machine or container is paused, so is tritonserver, and little is given up. The processes of a
server's models know the difference by each other: each counts tenths of a second in a file that all can see.

Where a thread keeps Python's lock, as it computes or waits for a busy tritonserver, the guard's thread cannot
count. But the sign of life, which has a thread without Python, goes on. The guard's thread then wakes up at
every switch interval (5 ms) to ask for the lock, and the kernel counts this.
"""

import contextlib
import os
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from flashinfer_backend.core.output import say
from flashinfer_backend.transport import rundir

BEAT_S = 0.1
# A process says that it lives every 0.3 s, and has to within 1 s of being handed a request.
STOOD_S = 0.7
OTHERS_BEATS = 3  # of another process meanwhile: on a machine that stood still it has one, or two
# Wakes of the guard's thread a second, for a process that ran: 150 to 180 were measured while it asked for
# Python's lock on a busy machine, 2 for a process that was stopped.
WAKES = 30
LOOKS_S = 0.002
RECENT_S = 1.0  # requests that waited are taken within this time after it
LOOK_AGAIN_S = 2.0  # how often a process looks which others there are


class FreezeGuard:
    """A process's own file, and its view of the others'."""

    def __init__(self, folder: Path) -> None:
        """folder: `paths.processes_dir` of the server. Raises OSError where there is no room for the file."""
        self._folder = folder
        self._file = folder / f"beat-{os.getpid()}"
        self._own = self._make()
        self._others: rundir.SharedArrays = {}
        self._counts: dict[tuple[str, int], int] = {}  # of the others, when this process last looked
        self._look_at = 0.0
        self._at, self._wakes = time.monotonic(), 0
        self._stood_s, self._stood_until = 0.0, -1.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="freeze guard", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Around what handles requests. Ends the process where these may have been given up."""
        started = time.monotonic()
        self._check(started - RECENT_S)
        try:
            yield
        finally:
            self._check(started)

    def close(self) -> None:
        """Removes the file, and the folder after the last one."""
        self._closed.set()
        self._thread.join()
        self._file.unlink(missing_ok=True)
        for folder in (self._folder, self._folder.parent):
            with contextlib.suppress(OSError):  # others have files in it
                folder.rmdir()

    def _check(self, since: float) -> None:
        while time.monotonic() - self._at >= STOOD_S and self._thread.is_alive():
            time.sleep(LOOKS_S)  # the thread is about to look
        if self._stood_until > since:
            self._exit()

    def _work(self) -> None:
        while not self._closed.wait(BEAT_S):
            self._look()
            self._own += 1
            if self._at >= self._look_at:
                self._look_at = self._at + LOOK_AGAIN_S
                with contextlib.suppress(OSError):  # no room now, no folder or no descriptor: tried again
                    others = [path for path in self._folder.glob("beat-*") if path != self._file]
                    self._others = rundir.arrays_of_others(others, self._others)
                    if not self._file.exists():  # a cleaner of old files has removed it
                        self._own = self._make()

    def _look(self) -> None:
        """Notices that this process stood still since the last look."""
        now, wakes = time.monotonic(), resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        counts = {name: int(count[0]) for name, count in self._others.items()}
        passed = now - self._at
        if passed >= STOOD_S and wakes - self._wakes < WAKES * passed:
            beats = [count - self._counts.get(name, count) for name, count in counts.items()]
            if max(beats, default=0) >= OTHERS_BEATS:
                self._stood_s, self._stood_until = passed, now
        self._at, self._wakes, self._counts = now, wakes, counts

    def _make(self) -> np.ndarray:
        while True:
            with contextlib.suppress(FileNotFoundError):  # another start's last process removed the folder
                rundir.claim(self._folder)
                return rundir.shared_array(self._file, np.int64, (1,))

    def _exit(self) -> None:
        self._file.unlink(missing_ok=True)
        say(
            f"this process stood still for {self._stood_s:.1f} s while others of the server went on. It ends,"
            " as tritonserver may have given up what waited for it, and other requests would get the answers"
        )
        os._exit(1)
