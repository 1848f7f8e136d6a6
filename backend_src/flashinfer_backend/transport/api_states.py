# SPDX-License-Identifier: Apache-2.0
"""Which APIs of a server are up, and how often each was started again: serve writes it to a file, and each
API shows it in its metrics, so that one API tells that the other is down."""

import contextlib
import os
import threading
from pathlib import Path

import msgspec

TRITON, OPENAI = "triton", "openai"


class ApiState(msgspec.Struct):
    """up: whether it answers requests. restarts: since the server started."""

    up: bool = False
    restarts: int = 0


class ApiStates:
    """The file, `<folder>/apis-<pid>`. Its methods may be called from any thread."""

    def __init__(self, folder: Path, names: tuple[str, ...]) -> None:
        """folder: `paths.processes_dir` of the server, which exists. names: of the APIs that there are."""
        self._file = folder / f"apis-{os.getpid()}"
        self._lock = threading.Lock()
        self._states = {name: ApiState() for name in names}
        self._write()

    def note(self, name: str, up: bool, restarts: int) -> None:
        """What has become of an API."""
        with self._lock:
            if (state := ApiState(up, restarts)) != self._states[name]:
                self._states[name] = state
                self._write()

    def close(self) -> None:
        self._file.unlink(missing_ok=True)

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # no API ends for want of its note
            unfinished = self._file.with_name(f"apis.new-{os.getpid()}")
            unfinished.write_bytes(msgspec.json.encode(self._states))
            unfinished.replace(self._file)


def read_api_states(folder: Path) -> dict[str, ApiState]:
    """The APIs' states by name; none where no serve writes them."""
    for file in folder.glob("apis-*"):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode(file.read_bytes(), type=dict[str, ApiState])
    return {}
