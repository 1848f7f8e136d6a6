# SPDX-License-Identifier: Apache-2.0
"""What Linux says about a process."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # "max 100000", or microseconds of CPU time and in how many


def usable_cores() -> int:
    """Cores that this process may run on; in a container no more than its limit of CPU time."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = map(int, QUOTA.read_text().split())
        cores = min(cores, max(1, quota // period))
    return cores


def stat(pid: int | str) -> tuple[str, list[str]]:
    """(name, fields behind it: state, parent's pid, ...) of /proc/<pid>/stat, which the manual page proc(5)
    lists. Raises OSError where there is no such process."""
    # A name is cut to 15 bytes, perhaps inside of a character, and may hold spaces and brackets.
    head, _, rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
    return head.partition("(")[2], rest.split()


def running() -> Iterator[tuple[int, str, list[str]]]:
    """pid, and name and fields as of `stat`, of each process; also of zombies."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            yield int(folder.name), *stat(folder.name)


def cpu_seconds(fields: Sequence[str]) -> float:
    """CPU time of a process so far, by the fields of `stat`."""
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def stub_words(pid: int | str) -> list[str]:
    """The command line of a stub of Triton's Python backend: stub, model.py, shared memory, two sizes, pid of
    the server, ...; nothing for another process. Raises OSError where there is no such process."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return words if words[0].endswith("/triton_python_backend_stub") and len(words) > 5 else []
