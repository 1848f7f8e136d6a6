# SPDX-License-Identifier: Apache-2.0
"""Ends a model's process that froze: it stood still while tritonserver went on.

tritonserver (2.51, and 26.07 still) gives up what waits for a process that shows no sign of life within a
second: these requests fail, and their memory serves the next ones. A process that only stood still (SIGSTOP,
a debugger, swapping) finds them in its queue when it goes on, and its answers to them are sent to the clients
that have that memory now. Nothing tells it that they were given up. So it ends itself, before it answers: to
tritonserver it is dead already.

Where a machine or container is paused, so is tritonserver, and little is given up. The processes of a
server's models know the difference by each other: each counts tenths of a second in a file that all can see.
"""

import contextlib
import os
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
BUSY_S = 0.1  # CPU time: with more, Python was held up by a thread, and the sign of life has another one
RECENT_S = 1.0  # requests that waited are taken within this time after it
CLOSE_S = 1.0
LOOK_AGAIN_S = 2.0  # how often a process looks which others there are


class FreezeGuard:
    """A process's own file, and its view of the others'."""

    def __init__(self, folder: Path) -> None:
        """folder: `paths.processes_dir` of the server. Raises OSError where there is no room for the file."""
        self._folder = folder
        self._file = folder / f"beat-{os.getpid()}"
        self._lock = threading.Lock()  # guards all below
        self._own = self._make()
        self._others: rundir.SharedArrays = {}
        self._counts: dict[tuple[str, int], int] = {}  # of the others, when this process last looked
        self._look_at = 0.0
        self._at, self._cpu = time.monotonic(), time.process_time()
        self._stood_s, self._stood_until = 0.0, -1.0
        self._closed = threading.Event()
        threading.Thread(target=self._work, name="freeze guard", daemon=True).start()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Around what handles requests. Ends the process where these may have been given up."""
        started = time.monotonic()
        self._check(started - RECENT_S)
        try:
            yield
        finally:
            self._check(started)

    @contextlib.contextmanager
    def held_up(self) -> Iterator[None]:
        """Around what waits for tritonserver and lets no other thread of Python run meanwhile: where that one
        stands still, this process seems to."""
        with self._lock:
            self._look()
            try:
                yield
            finally:
                self._note(time.monotonic(), time.process_time(), self._read())

    def close(self) -> None:
        """Removes the file, and the folder after the last one."""
        self._closed.set()
        locked = self._lock.acquire(timeout=CLOSE_S)  # held_up may wait indefinitely for a killed server
        self._file.unlink(missing_ok=True)
        for folder in (self._folder, self._folder.parent):
            with contextlib.suppress(OSError):  # others have files in it
                folder.rmdir()
        if locked:
            self._lock.release()

    def _check(self, since: float) -> None:
        if time.monotonic() - self._at < STOOD_S and self._stood_until <= since:
            return  # as nearly always: this is in the way of every chunk
        with self._lock:
            self._look()
            if self._stood_until > since:
                self._exit()

    def _work(self) -> None:
        while not self._closed.wait(BEAT_S):
            with self._lock:
                self._look()
                self._own += 1
                if self._at >= self._look_at and not self._closed.is_set():
                    self._look_at = self._at + LOOK_AGAIN_S
                    with contextlib.suppress(OSError):  # no room now, no folder or no descriptor: tried again
                        others = [path for path in self._folder.glob("beat-*") if path != self._file]
                        self._others = rundir.arrays_of_others(others, self._others)
                        if not self._file.exists():  # a cleaner of old files has removed it
                            self._own = self._make()

    def _look(self) -> None:
        """Notices that this process stood still since the last look."""
        now, cpu, counts = time.monotonic(), time.process_time(), self._read()
        if now - self._at >= STOOD_S and cpu - self._cpu < BUSY_S:
            beats = [count - self._counts.get(name, count) for name, count in counts.items()]
            if max(beats, default=0) >= OTHERS_BEATS:
                self._stood_s, self._stood_until = now - self._at, now
        self._note(now, cpu, counts)

    def _read(self) -> dict[tuple[str, int], int]:
        return {name: int(count[0]) for name, count in self._others.items()}

    def _note(self, now: float, cpu: float, counts: dict[tuple[str, int], int]) -> None:
        self._at, self._cpu, self._counts = now, cpu, counts

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
