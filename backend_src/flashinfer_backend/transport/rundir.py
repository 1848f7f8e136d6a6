# SPDX-License-Identifier: Apache-2.0
"""The run directory: where the stubs of one model of one server meet their engine.

`paths.run_dir` names it. It holds the engine's socket, its record and its keeper's (records.py), and one
datagram socket per stub (peers.py). Nothing in it outlives the server; what a server leaves behind
that was killed together with its keeper is removed by the next one.
"""

import contextlib
import fcntl
import math
import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from flashinfer_backend.core import processes

# A unix socket's address holds 107 bytes; the longest name in a run directory is "stubs/<pid>.sock".
_LONGEST_RUN_DIR = 107 - len("/stubs/4194304.sock")


def create(run_dir: Path) -> None:
    """Makes the run directory of an engine, readable by this user only, and removes those of dead servers."""
    if len(str(run_dir)) > _LONGEST_RUN_DIR:
        raise ValueError(
            f"run directory {run_dir} is longer than {_LONGEST_RUN_DIR} characters, too long for a unix"
            " socket; set XDG_RUNTIME_DIR to a shorter path or shorten the model's name"
        )
    claim(run_dir)
    (run_dir / "stubs").mkdir(mode=0o700, parents=True, exist_ok=True)


def claim(run_dir: Path) -> None:
    """Makes a run directory without anything in it, as `create`."""
    user_dir = run_dir.parent
    try:
        _make(user_dir)
    except OSError as error:
        # Never FileNotFoundError, on which `locked` would try again without end.
        raise OSError(
            f"{user_dir} cannot be made ({error.strerror}); set XDG_RUNTIME_DIR to another folder"
        ) from None
    with _own_folder(user_dir) as folder:
        if folder is None:
            raise PermissionError(
                f"{user_dir} is no folder of this user, but another user's, a file or a link; remove it or"
                " set XDG_RUNTIME_DIR"
            )
        os.fchmod(folder, 0o700)
    for other in user_dir.iterdir():
        pid = other.name.partition("-")[0]
        if pid.isdigit() and not process_alive(int(pid)):
            shutil.rmtree(other, ignore_errors=True)
    _make(run_dir)


@contextlib.contextmanager
def _own_folder(path: Path) -> Iterator[int | None]:
    """Opens a folder of this user; None where it is anything else. In /tmp all users can make links and
    folders, and none can replace those of others. Raises FileNotFoundError where there is nothing, as when
    another server has just removed it: `locked` tries again."""
    try:
        found = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError:
        yield None
        return
    try:
        yield found if os.fstat(found).st_uid == os.getuid() else None
    finally:
        os.close(found)


def _make(folder: Path) -> None:
    # FileExistsError is raised for a file of this name, but also for a folder that was there and is gone when
    # it is looked at: the last one of another server removes it.
    for _ in range(100):
        with contextlib.suppress(FileExistsError):
            return folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def remove(run_dir: Path) -> None:
    """Removes the run directory, and the user's directory around it when that was the last one."""
    shutil.rmtree(run_dir, ignore_errors=True)
    with contextlib.suppress(OSError):
        run_dir.parent.rmdir()


def forget_stubs(run_dir: Path) -> None:
    """Removes what stubs that were killed leave in the run directory."""
    _forget([*run_dir.glob("stubs/*.sock"), *run_dir.glob("marks-*"), *run_dir.glob("load-*")])


def forget_processes(folders: Iterable[Path], ending: Collection[int] = ()) -> None:
    """Removes what stubs that have ended, or whose pids are among `ending`, leave in folders of
    `paths.processes_dir`, and those that are empty then."""
    for folder in folders:
        try:
            with _own_folder(folder.parent) as own:
                if own is None:
                    continue
        except FileNotFoundError:
            continue
        _forget([*folder.glob("beat-*"), *folder.glob("apis*-*")], ending)
        for empty in (folder, folder.parent):
            with contextlib.suppress(OSError):
                empty.rmdir()


def _forget(files: Iterable[Path], ending: Collection[int] = ()) -> None:
    """Removes those whose names end with the pid of a process that has ended, or of one in `ending`."""
    for path in files:
        pid = path.stem.rpartition("-")[2]
        if pid.isdigit() and (int(pid) in ending or not process_alive(int(pid))):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[int]:
    """Holds the run directory's lock, creating the directory when it is not there. A process that inherits
    the lock's descriptor, which this yields, holds it on.

    The last stub removes the directory while it holds the lock, so a process that waited for the lock may
    get that of a removed file and must look again.
    """
    path = run_dir / "lock"
    while True:
        try:
            create(run_dir)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # removed between the two calls
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if _is_at(path, fd):
                yield fd
                return
        finally:
            os.close(fd)


def _is_at(path: Path, fd: int) -> bool:
    """Whether an open file is the one that has this path now."""
    try:
        return os.stat(path).st_ino == os.fstat(fd).st_ino
    except FileNotFoundError:
        return False


def shared_array(path: Path, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    """A file of a run directory as an array, zeros where it is new, shared by all who map it. Raises OSError
    where there is no room for it."""
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
        # Else a disk that is full would be a SIGBUS later.
        try:
            os.posix_fallocate(file.fileno(), 0, math.prod(shape) * np.dtype(dtype).itemsize)
        except OSError as error:  # which names no file
            text = f"{error.strerror}; make room there, or set XDG_RUNTIME_DIR to another folder"
            raise OSError(error.errno, text, str(path)) from None
        return np.asarray(np.memmap(file, dtype=dtype, mode="r+", shape=shape))


SharedArrays = dict[tuple[str, int], np.ndarray]  # by a file's name and inode: it may be made again


def arrays_of_others(paths: Iterable[Path], known: SharedArrays) -> SharedArrays:
    """int64 [n] for each file that another process shares by `shared_array`; those in `known` are kept. A
    file that was just removed, or has no room yet, is left out, and neither made nor enlarged."""
    found: SharedArrays = {}
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            key = path.name, path.stat().st_ino
            found[key] = known[key] if key in known else np.asarray(np.memmap(path, np.int64, "r"))
    return found


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when it has ended (a zombie has, unless threads
    of it are left: a driver may free memory in one).

    Together with the pid it names a process for good, since pids are used again.
    """
    try:
        _, fields = processes.stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" and int(fields[17]) <= 1 else int(fields[19])


def memory_bytes(pid: int) -> int:
    """Private memory of a process that is not swapped out, in bytes; 0 when it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    return 0


def parent_pid(pid: int) -> int:
    """The process that started one, or has inherited it; 0 when it has ended."""
    with contextlib.suppress(OSError):
        return int(processes.stat(pid)[1][1])
    return 0


def is_stopped(pid: int) -> bool:
    """Whether a process has been stopped by a signal (one that a debugger looks at has not)."""
    with contextlib.suppress(OSError):
        return processes.stat(pid)[1][0] == "T"
    return False


def process_alive(pid: int) -> bool:
    """Whether a process with this pid runs (a zombie does not)."""
    return start_ticks(pid) is not None
