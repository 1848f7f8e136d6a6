# SPDX-License-Identifier: Apache-2.0
"""Engines on the same GPU take memory for their KV caches in turn, so that each one's cache is its share of
what the weights of all leave, whichever comes first.

An engine waits until the others have read their weights and none is between measuring and being ready. Each
says in a file of its run directory how far it is, and holds a lock on that file while it lives. Files are
read and written under a lock on the user's directory, so an engine with several GPUs gets its turn on all at
once. Engines meet where their run directories are next to each other: those of one user, with the same
XDG_RUNTIME_DIR.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from flashinfer_backend.core.progress import telling

FILE = "gpu-turn"
LOOK_S = 0.1
WAITED_FOR = {"loads": "reads its weights", "takes": "takes memory"}


class Turn(msgspec.Struct):
    """gpus: UUIDs, of rank 0, 1 and so on. cache: bytes of the KV cache on each, once the engine is ready."""

    gpus: list[str]
    state: Literal["loads", "waits", "takes", "ready"]
    cache: int = 0


@dataclass(frozen=True)
class Neighbours:
    """The other engines on a GPU. cache: bytes of their KV caches. waiting: how many have none yet."""

    cache: int = 0
    waiting: int = 0


class GpuTurn:
    """An engine's place among those on its GPUs, from before it reads weights until this object is gone."""

    def __init__(self, run_dir: Path, gpus: Sequence[str]) -> None:
        self._run_dir, self._gpus = run_dir, list(gpus)
        with self._alone():
            self._file = open(run_dir / FILE, "a+b")  # noqa: SIM115
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._write("loads")

    def take(self) -> list[Neighbours]:
        """Waits for this engine's turn to measure the memory of its GPUs, which lasts until `ready`. Returns
        what the others have on each."""
        with self._alone():
            self._write("waits")
        ahead: list[str] = []

        def how_far() -> str:
            return f"the KV cache waits for other engines on this GPU: {', '.join(ahead)}"

        with telling(how_far, done=time.monotonic):  # its own keeper watches each engine that is waited for
            while True:
                with self._alone():
                    others = dict(self._others())
                    ahead[:] = [
                        f"{name} {WAITED_FOR[turn.state]}"
                        for name, turn in others.items()
                        if turn.state in WAITED_FOR
                    ]
                    if not ahead:
                        self._write("takes")
                        return [_on(gpu, list(others.values())) for gpu in self._gpus]
                time.sleep(LOOK_S)

    def ready(self, cache: int) -> None:
        """cache: bytes on each GPU."""
        with self._alone():
            self._write("ready", cache)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        user_dir = os.open(self._run_dir.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(user_dir, fcntl.LOCK_EX)
            yield
        finally:
            os.close(user_dir)

    def _write(self, state: Literal["loads", "waits", "takes", "ready"], cache: int = 0) -> None:
        self._file.truncate(0)
        self._file.write(msgspec.json.encode(Turn(self._gpus, state, cache)))
        self._file.flush()

    def _others(self) -> Iterator[tuple[str, Turn]]:
        """Those that live and have a GPU in common with this one, by the names of their run directories."""
        for path in self._run_dir.parent.glob(f"*/{FILE}"):
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                if path.parent.name == self._run_dir.name or not _is_locked(file.fileno()):
                    continue
                turn = msgspec.json.decode(file.read(), type=Turn)
                if not set(turn.gpus).isdisjoint(self._gpus):
                    yield path.parent.name, turn


def _is_locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _on(gpu: str, others: Sequence[Turn]) -> Neighbours:
    here = [turn for turn in others if gpu in turn.gpus]
    waiting = sum(turn.state == "waits" for turn in here)
    return Neighbours(sum(turn.cache for turn in here), waiting)
