# SPDX-License-Identifier: Apache-2.0
"""What attacks and soaks share: a request and what came of it, and what a server's processes take."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from running import BothApis

SILENT_S = 30.0  # a client that hears nothing for so long has been forgotten
# Kinds of processes, by a part of their command lines.
PARTS = {
    "engine": "flashinfer_backend.engine",
    "preprocessing": "/preprocessing/1/",
    "llm": "/llm/1/",
    "postprocessing": "/postprocessing/1/",
    "tritonserver": "bin/tritonserver",
    "OpenAI API": "flashinfer_backend.openai.worker",
}
# And what only looks after others.
KEEPERS = {"serve": "flashinfer_backend.serve", "keeper": "flashinfer_backend.launch.keeper"}
MIB = 1 << 20


def ports(server: BothApis) -> dict[str, int]:
    """Of the APIs over HTTP."""
    return {"triton": int(urlsplit(server.url).port or 0), "openai": server.openai_port}


def attempt(port: int, path: str, body: bytes, timeout_s: float = SILENT_S) -> tuple[str, str]:
    """(outcome, text) of one request to either API: whole, worded, cut or silent."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        text = connection.getresponse().read().decode(errors="replace")
    except TimeoutError:
        return "silent", ""
    except (OSError, http.client.HTTPException):
        return "cut", ""
    finally:
        connection.close()
    if '"error":' in text:
        return "worded", text
    return ("whole" if '"finish_reason":"' in text else "silent"), text


@dataclass
class Usage:
    """What the processes of one kind take. memory: bytes of their own, without what they share; shared
    memory has a Usage of its own, of memory alone."""

    memory: int = 0
    files: int = 0
    threads: int = 0

    def add(self, other: Usage) -> None:
        self.memory += other.memory
        self.files += other.files
        self.threads += other.threads


def usage(server: BothApis) -> dict[str, Usage]:
    """By kind of process, and "shared memory"."""
    found: dict[str, Usage] = {}
    for process, line in server.commands().items():
        name = next((name for name, part in {**PARTS, **KEEPERS}.items() if part in line), "others")
        with contextlib.suppress(psutil.Error, OSError):
            one = Usage(_own_bytes(process.pid), process.num_fds(), process.num_threads())
            found.setdefault(name, Usage()).add(one)
    found["shared memory"] = Usage(_allocated(Path("/dev/shm").glob(f"{server.shm_prefix}*")))
    return found


def cpu_seconds(server: BothApis) -> dict[psutil.Process, float]:
    """CPU time that each of its processes has had, of the kernel's too."""
    found = {}
    for process in server.commands():
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            found[process] = float(times.user + times.system)
    return found


def _own_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "VmSwap:")))


def _allocated(files: Iterable[Path]) -> int:
    total = 0
    for path in files:
        with contextlib.suppress(OSError):
            total += path.stat().st_blocks * 512
    return total
