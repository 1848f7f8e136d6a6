# SPDX-License-Identifier: Apache-2.0
"""What tritonserver leaves in /tmp when it is killed: for each start its Python backend makes a folder for
environments that models bring along, and removes it only if the server ends without a signal."""

import contextlib
import os
import stat
import time
from pathlib import Path

from flashinfer_backend.core import processes

PLACE = Path("/tmp")
PREFIX = "python_env_"


def remove_environments() -> None:
    """Removes empty ones of this user that are older than each of this user's tritonservers that run. Links
    and what belongs to others are left as they are."""
    oldest = min(_servers_started(), default=time.time())
    with contextlib.suppress(OSError):
        for entry in os.scandir(PLACE):
            if not entry.name.startswith(PREFIX):
                continue
            with contextlib.suppress(OSError):  # not empty, or just removed
                status = entry.stat(follow_symlinks=False)
                mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
                if mine and status.st_mtime < oldest:
                    os.rmdir(entry.path)  # follows no link


def _servers_started() -> list[float]:
    """When this user's tritonservers that run were started, in seconds since the epoch."""
    now, since_boot = time.time(), time.clock_gettime(time.CLOCK_BOOTTIME)
    found = []
    for pid, name, fields in processes.running():
        with contextlib.suppress(OSError):  # it has just ended
            if name == "tritonserver" and os.stat(f"/proc/{pid}").st_uid == os.getuid():
                found.append(now - since_boot + int(fields[19]) / os.sysconf("SC_CLK_TCK"))
    return found
