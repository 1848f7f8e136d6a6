# SPDX-License-Identifier: Apache-2.0
"""tritonserver's output on its way to the terminal: it tells why a start failed, or never will succeed.

All lines pass unchanged, but for one that the server repeats 200 000 times a second.
"""

import re
import subprocess
import threading
import time
from pathlib import Path
from typing import IO, Any

from flashinfer_backend.core import processes
from flashinfer_backend.core.output import write

STUB_GRACE_S = 3.0  # how long a stub that ended while it was starting may stay uncollected
_STAMP = r"^[IWE]\d{4} [\d:.]+ \d+ "
# One model's failure.
_FAILED = re.compile(_STAMP + r"model_lifecycle\.cc:\d+\] \"failed to load '(.+?)' version \d+: (.*)\"$")
# A folder of the repository that is no model. Where its config.pbtxt is none, the line before says why.
_REFUSED = re.compile(
    _STAMP + r"model_repository_manager\.cc:\d+\] \"Poll failed for model directory '(.+?)': (.*)\"$"
)
_NO_CONFIG = re.compile(r"^\[libprotobuf ERROR .*\] Error parsing text-format inference\.ModelConfig: (.*)$")
_NOT_BEGUN = re.compile(_STAMP + r"pb_stub\.cc:\d+\]\s+Failed to preinitialize Python stub: (.*)$")
_ENGINE_CANNOT = re.compile(r"^\[engine( \d+)?\] ERROR cannot start: ")
_NOT_LINKED = re.compile(r"triton_python_backend_stub: (error while loading shared libraries: .*)")
# What its own handler says of a signal by which it ends; that handler can then wait forever.
_CRASHED = re.compile(r"^Signal \((4|6|7|8|11)\) received")
CRASH_S = 1.0  # how long the server may take to end then
# Without a free descriptor the server says so 200 000 times a second.
_NO_DESCRIPTOR = "Too many open files"
AGAIN_S = 10.0  # between two such lines that are shown


class ServerLog:
    """What one server writes. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._failures: dict[str, str] = {}  # reason by model that did not load
        self._fatal = ""
        self._no_config = ""  # why and where what was read last is no config.pbtxt
        self._last = ""  # line that is not of the server's own log, or why a stub ended
        self._ready = False
        self._said_at = -AGAIN_S  # when the last line of _NO_DESCRIPTOR was shown
        self._left_out = 0  # such lines since then
        self._threads: list[threading.Thread] = []
        self._ended_stubs: dict[int, float] = {}  # when each was first seen
        self._crash = ""  # the signal that the server said it had, and when
        self._crashed_at = 0.0

    def popen(self, args: list[str], **options: Any) -> subprocess.Popen[bytes]:
        """Starts the server, with its two outputs passing through here. It keeps ignoring SIGPIPE, so that
        its end stays in order should this process be killed."""
        child = subprocess.Popen(
            args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, restore_signals=False, **options
        )
        for source, target in ((child.stdout, 1), (child.stderr, 2)):
            thread = threading.Thread(target=self._pass_on, args=(source, target), daemon=True)
            thread.start()
            self._threads.append(thread)
        return child

    def ready(self) -> None:
        """The start has succeeded."""
        self._ready = True

    def cannot_start(self, server_pid: int) -> str:
        """Why a server that is not ready yet never will be, empty where nothing says so. It waits
        indefinitely for a stub that ended before it could say anything."""
        if self._ready or self._fatal:
            return self._fatal
        now = time.monotonic()
        ended = _ended_stubs(server_pid)
        self._ended_stubs = {pid: self._ended_stubs.get(pid, now) for pid in ended}
        if any(now - since > STUB_GRACE_S for since in self._ended_stubs.values()):
            said = f": {self._last}" if self._last else ""
            self._fatal = f"a process of the Python backend ended while it was starting{said}"
        return self._fatal

    def crashed(self) -> str:
        """What became of a server that said it crashed, and should have ended by now; empty without that."""
        if not self._crash or time.monotonic() < self._crashed_at + CRASH_S:
            return ""
        return f"tritonserver crashed (signal {self._crash}) and does not end"

    @property
    def hopeless(self) -> bool:
        """Whether the server said why it cannot start, and would say so again."""
        return bool(self._fatal or self._failures)

    def summary(self) -> str:
        """Why models did not load, once each; for a server that has ended."""
        for thread in self._threads:  # stubs and the engine may hold the pipes for a little longer
            thread.join(0.5)
        if self._fatal:
            return f"the server cannot start: {self._fatal}"
        return "\n".join(f"{model} did not load: {reason}" for model, reason in self._failures.items())

    def _pass_on(self, source: IO[bytes], target: int) -> None:
        for line in source:
            text = line.decode(errors="replace").rstrip("\n")
            if _NO_DESCRIPTOR in text:
                if (shown := self._seldom(text)) is not None:
                    write(target, shown.encode() + b"\n")
                continue
            if found := _CRASHED.match(text):
                self._crashed_at, self._crash = time.monotonic(), found[1]
            if not self._ready:
                self._learn(text)
            write(target, line)

    def _learn(self, line: str) -> None:
        """Notes what a line says about a start that fails."""
        if found := _FAILED.match(line):
            self._failures.setdefault(found[1], _reason(found[2]))
        elif found := _NO_CONFIG.match(line):
            self._no_config = f": {found[1]}"
        elif found := _REFUSED.match(line):
            self._failures.setdefault(found[1], found[2] + self._no_config)
            self._no_config = ""
        elif found := _NOT_LINKED.search(line):
            self._fatal = found[1]
        elif found := _NOT_BEGUN.match(line):
            self._last = found[1]
        elif line and not re.match(_STAMP, line):
            self._last = line

    def _seldom(self, line: str) -> str | None:
        now = time.monotonic()
        if now < self._said_at + AGAIN_S:
            self._left_out += 1
            return None
        more = f" (and {self._left_out} such lines before)" if self._left_out else ""
        self._said_at, self._left_out = now, 0
        return line + more


def _reason(text: str) -> str:
    """What an exception of a model says: the engine's own line where there is one, else all of it."""
    lines = text.replace("\\n", "\n").strip().splitlines()
    for line in reversed(lines):
        if _ENGINE_CANNOT.match(line):
            return line
    if any("EngineStartError" in line for line in lines):
        return "\n".join(lines[: lines.index("At:")] if "At:" in lines else lines).strip()
    return "\n".join(lines)


def memory_of_stubs(server_pid: int) -> set[str]:
    """Names of shared memory that a server which is starting has made for its stubs. It stays if the server
    is killed before they have taken it over."""
    try:
        lines = Path(f"/proc/{server_pid}/maps").read_text().splitlines()
    except OSError:  # it has ended
        return set()
    return {Path(words[5]).name for line in lines if (words := line.split()) and "/dev/shm/" in words[-1]}


def _ended_stubs(server_pid: int) -> list[int]:
    """Stubs of a server that have ended and that it has not noticed."""
    return [
        pid
        for pid, name, fields in processes.running()
        if name.startswith("triton_python_b") and fields[:2] == ["Z", str(server_pid)]
    ]
