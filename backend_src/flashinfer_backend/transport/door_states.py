# SPDX-License-Identifier: Apache-2.0
"""Which doors of a server are up, and how often each was started again: serve writes it to a file, and each
door shows it in its metrics, so that one door tells that the other is down."""

import contextlib
import os
import threading
from pathlib import Path

import msgspec

TRITON, OPENAI = "triton", "openai"


class DoorState(msgspec.Struct):
    """up: whether it answers requests. restarts: since the server started."""

    up: bool = False
    restarts: int = 0


class DoorStates:
    """The file, `<folder>/doors-<pid>`. Its methods may be called from any thread."""

    def __init__(self, folder: Path, names: tuple[str, ...]) -> None:
        """folder: `paths.processes_dir` of the server, which exists. names: of the doors that there are."""
        self._file = folder / f"doors-{os.getpid()}"
        self._lock = threading.Lock()
        self._states = {name: DoorState() for name in names}
        self._write()

    def note(self, name: str, up: bool, restarts: int) -> None:
        """What has become of a door."""
        with self._lock:
            if (state := DoorState(up, restarts)) != self._states[name]:
                self._states[name] = state
                self._write()

    def close(self) -> None:
        self._file.unlink(missing_ok=True)

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # no door ends for want of its note
            unfinished = self._file.with_name(f"doors.new-{os.getpid()}")
            unfinished.write_bytes(msgspec.json.encode(self._states))
            unfinished.replace(self._file)


def read_door_states(folder: Path) -> dict[str, DoorState]:
    """The doors' states by name; none where no serve writes them."""
    for file in folder.glob("doors-*"):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode(file.read_bytes(), type=dict[str, DoorState])
    return {}
