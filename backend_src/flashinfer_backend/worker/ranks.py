# SPDX-License-Identifier: Apache-2.0
"""Rank 0's hand on the other ranks of its engine: their processes, and the plans that they run.

Each has a pair of sockets with rank 0. Down go its settings, then plans' bytes in the order of the launches
and adapters to load, and an empty message at the end; up come READY, a BEAT every BEAT_S, and what came of
each adapter. A socket tells at once when the process at its other end has gone, so that either side ends with
the other. (Shared memory would spare a copy, and tell of no death.)
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import msgspec

from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.parent import end_with_parent
from flashinfer_backend.core.progress import telling
from flashinfer_backend.core.step import StepPlan
from flashinfer_backend.models.adapters import Adapter, AdapterError, State

log = logging.getLogger(__name__)

BEAT_S = 1.0
# A rank whose process shows no life for so long hangs. Before it is ready it may compile, or read weights,
# for longer than that without giving its other threads a turn.
SILENT_S = 8.0
STEP_S = 8.0  # no step on a GPU takes longer, unless a rank waits for another in vain
WATCH_S = 0.5
# For what runs on the devices and then for the other ranks to end, before these are killed, and for killed
# ones to be gone. The two together are no more than an engine has to end in (engine/__main__.py).
END_S = 2.0
KILLED_S = 1.0
SAY_AFTER_S = 1.0  # of that, before the log tells what is waited for
TOLD_S = 1.0  # between a collective that fails as another rank has ended, and what tells that it has
BEAT, READY = b".", b"!"
LOADED = b"l"  # begins what came of an adapter
PLAN, ADAPTER, TRACE = b"p", b"a", b"t"  # kinds of messages from rank 0
LENGTH = struct.Struct("<I")


def plan_message(plan: StepPlan) -> bytes:
    """For Runner.obey of another rank."""
    return PLAN + plan.to_bytes()


def adapter_message(place: int, folder: str) -> bytes:
    """The same, to load an adapter."""
    return ADAPTER + msgspec.msgpack.encode((place, folder))


def loaded_message(future: Future[Adapter]) -> bytes:
    """What came of an adapter on another rank, for Loads of rank 0."""
    error = future.exception()
    if error is not None and not isinstance(error, AdapterError):
        log.error("an adapter could not be loaded", exc_info=error)
    problem = "" if error is None else str(error) or type(error).__name__
    state = None if error is not None else future.result().state
    return LOADED + msgspec.msgpack.encode((problem, state))


class Loads:
    """The adapters that another rank is to load, in its order. For any thread."""

    def __init__(self) -> None:
        self._futures: deque[Future[State]] = deque()

    def begin(self) -> Future[State]:
        """The state of the files that the rank will have read; raises AdapterError in the future."""
        future: Future[State] = Future()
        self._futures.append(future)
        return future

    def end(self, message: bytes) -> None:
        """Take in the rank's loaded_message of the oldest."""
        problem, state = msgspec.msgpack.decode(message[1:], type=tuple[str, State | None])
        with contextlib.suppress(IndexError):  # in another thread, `lose` has taken it
            future = self._futures.popleft()
            if state is None:
                future.set_exception(AdapterError(problem))
            else:
                future.set_result(state)

    def lose(self) -> None:
        """The rank ends."""
        with contextlib.suppress(IndexError):
            while True:
                self._futures.popleft().set_exception(RanksLostError("the other ranks end"))


class RanksLostError(RuntimeError):
    """Another rank has ended or hangs; the engine cannot go on."""


class OtherRanks:
    """Ranks 1 to tensor_parallel_size - 1 of an engine, started here. `on_loss` is called once, in a thread,
    with what has happened to one of them (None: this process ends, as it may wait for that rank in a call
    that nothing else ends); afterwards `send` raises RanksLostError. They end with the thread that starts
    them. name: of the engine, in front of their lines in the log."""

    def __init__(
        self,
        config: EngineConfig,
        folder: Path | None,
        on_loss: Callable[[str], None] | None,
        name: str = "engine",
    ) -> None:
        self._own_folder: tempfile.TemporaryDirectory[str] | None = None
        if folder is None:
            self._own_folder = tempfile.TemporaryDirectory(prefix="flashinfer_backend-")
            folder = Path(self._own_folder.name)
        self.rendezvous = str(folder / f"ranks-{os.getpid()}")
        with contextlib.suppress(FileNotFoundError):  # of an engine that was killed, whose pid is used again
            os.unlink(self.rendezvous)
        self._on_loss = on_loss or self._end
        self._lost = ""
        self._closed = False
        self._ready = threading.Event()  # all other ranks are
        self._told = threading.Event()  # on_loss was
        self._unready = config.tensor_parallel_size - 1
        self._limits_steps = False
        self._launched: deque[float] = deque()  # when, of the steps that have not been read
        self._sockets: dict[int, socket.socket] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._loads: dict[int, Loads] = {}
        settings = msgspec.json.encode(config)
        for rank in range(1, config.tensor_parallel_size):
            ours, theirs = socket.socketpair()
            command = [sys.executable, "-m", "flashinfer_backend.worker", "--rank", str(rank), "--name", name]
            with theirs:
                self._processes[rank] = subprocess.Popen(
                    [*command, "--socket", str(theirs.fileno()), "--rendezvous", self.rendezvous],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    # From its first moment on, and also while it is stopped or in a call that no thread of it
                    # can interrupt.
                    preexec_fn=functools.partial(end_with_parent, signal.SIGKILL),
                )
            self._sockets[rank], self._loads[rank] = ours, Loads()
            _send(ours, settings)
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def serve(self, limits_steps: bool) -> None:
        """Wait until all other ranks are ready. From then on silence means a rank that hangs, and with
        limits_steps, so does a step that takes longer than STEP_S. Raises RanksLostError."""
        self._limits_steps = limits_steps
        with telling(lambda: f"{self._unready} of {len(self._sockets)} other ranks are not ready yet"):
            self._ready.wait()
        if self._lost:
            raise RanksLostError(self._lost)

    def send(self, plan: StepPlan) -> None:
        """Let the other ranks run their part in a step."""
        if self._lost:
            raise RanksLostError(self._lost)
        self._launched.append(time.monotonic())
        self._send(plan_message(plan))

    def load_adapter(self, place: int, folder: str) -> list[Future[State]]:
        """Let the other ranks load an adapter (AdapterLoader.load), next to their steps. Returns each one's
        state of the files that it has read; a future raises AdapterError where it could not."""
        begun = [loads.begin() for loads in self._loads.values()]
        self._send(adapter_message(place, folder))
        return begun

    def trace(self, stem: str) -> None:
        """Let the other ranks trace their steps to files of this name; "": let them write these."""
        self._send(TRACE + stem.encode())

    def _send(self, data: bytes) -> None:
        for rank, other in self._sockets.items():
            try:
                _send(other, data)
            except OSError:
                raise RanksLostError(f"rank {rank} has ended") from None

    def step_read(self) -> None:
        """The oldest of the steps sent has come to its end."""
        self._launched.popleft()

    def wait_loss(self) -> None:
        """A step has failed, maybe as another rank has ended: wait TOLD_S for `on_loss` to be told so."""
        self._told.wait(TOLD_S)

    def close(self, settle: Callable[[], None] = lambda: None) -> None:
        """End the other ranks, those that hang too, within END_S + KILLED_S. settle: waits for this rank's
        device, whose steps use the memory of the others; it is not waited for longer than END_S."""
        self._closed = True
        if not self._lost:
            self._end_in_order(settle)
        self.kill()
        for loads in self._loads.values():
            loads.lose()
        for other in self._sockets.values():
            other.close()

    def _end_in_order(self, settle: Callable[[], None]) -> None:
        deadline = time.monotonic() + END_S
        settling = threading.Thread(target=settle, name="settle", daemon=True)

        def waits_for() -> str:
            if settling.is_alive():
                return "the steps on the device of rank 0"
            return " and ".join(
                f"rank {rank} (process {process.pid})"
                for rank, process in self._processes.items()
                if process.poll() is None
            )

        late = threading.Timer(SAY_AFTER_S, lambda: log.info("ending: waiting for %s", waits_for()))
        late.start()
        settling.start()
        settling.join(END_S)
        for other in self._sockets.values():
            with contextlib.suppress(OSError):  # one that hangs may have left no room
                other.send(LENGTH.pack(0), socket.MSG_DONTWAIT)
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        late.cancel()
        if left := waits_for():
            log.warning("not ended within %.1f s: %s; the other ranks are killed", END_S, left)

    def kill(self) -> None:
        """End the other ranks at once, and wait up to KILLED_S until their devices are free. For any thread,
        also while another one closes them."""
        self._closed = True
        for process in self._processes.values():
            process.kill()
        deadline = time.monotonic() + KILLED_S
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(OSError):
            os.unlink(self.rendezvous)
        if self._own_folder is not None:
            self._own_folder.cleanup()

    def _watch(self) -> None:
        ranks = {other: rank for rank, other in self._sockets.items()}
        received = {other: bytearray() for other in ranks}
        seen: dict[socket.socket, float] = {}  # when those that are ready last showed life
        now = resumed = time.monotonic()
        while not self._lost and not self._closed:
            before = now
            readable, _, _ = select.select(list(ranks), [], [], WATCH_S)
            now = time.monotonic()
            if now - before > 2 * WATCH_S:  # it is this process that stood still
                seen, resumed = dict.fromkeys(seen, now), now
            for other in readable:
                data = _received(other)
                if not data:
                    self._lose(f"rank {ranks[other]} has ended")
                received[other] += data
                for message in _messages(received[other]):
                    if message.startswith(LOADED):
                        self._loads[ranks[other]].end(message)
                    elif message == READY or other in seen:
                        seen[other] = now
            for other, last in seen.items():
                if now - last > SILENT_S:
                    self._lose(f"rank {ranks[other]} has shown no life for {SILENT_S:.0f} s")
            self._unready = len(ranks) - len(seen)
            if not self._unready:
                self._ready.set()
            with contextlib.suppress(IndexError):  # read meanwhile
                if self._limits_steps and now - max(self._launched[0], resumed) > STEP_S:
                    self._lose(f"a step has not ended within {STEP_S:.0f} s: a rank hangs")

    def _lose(self, why: str) -> None:
        if not self._lost and not self._closed:
            self._lost = why
            self._ready.set()
            self._on_loss(why)
            self._told.set()

    def _end(self, why: str) -> None:
        """End this process, and with it the other ranks."""
        log.critical("%s; this process ends", why)
        self.kill()
        sys.stderr.flush()
        os._exit(1)


def _received(other: socket.socket) -> bytes:
    """What has come; nothing where the other end is closed."""
    try:
        return other.recv(4096)
    except OSError:
        return b""


def _messages(data: bytearray) -> Iterator[bytes]:
    """The messages that are whole, which go from the front of what has come."""
    while len(data) >= LENGTH.size and len(data) >= (end := LENGTH.size + LENGTH.unpack_from(data)[0]):
        yield bytes(data[LENGTH.size : end])
        del data[:end]


def _send(other: socket.socket, data: bytes) -> None:
    other.sendall(LENGTH.pack(len(data)) + data)


class RankLink:
    """Another rank's end of the socket. Its process ends with rank 0's."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._received = self._socket.makefile("rb")
        self._lock = threading.Lock()  # one thread at a time sends

    def beat(self) -> None:
        """Show life from now on, from a thread; end this process when rank 0 has gone."""

        def beat() -> None:
            poll = select.poll()
            poll.register(self._socket, select.POLLRDHUP | select.POLLHUP)
            while not poll.poll(BEAT_S * 1000):
                try:
                    with self._lock:
                        self._socket.send(LENGTH.pack(len(BEAT)) + BEAT, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    pass  # rank 0 has not looked for a while
                except OSError:
                    break
            os._exit(0)

        threading.Thread(target=beat, name="beat", daemon=True).start()

    def ready(self) -> None:
        """Tell rank 0 that this one waits for plans."""
        self.send(READY)

    def send(self, message: bytes) -> None:
        with self._lock:
            _send(self._socket, message)

    def receive(self) -> bytes | None:
        """The next message, empty at the end, or None when rank 0 has gone."""
        with contextlib.suppress(OSError, struct.error):  # struct's: its socket ended
            (size,) = LENGTH.unpack(self._received.read(LENGTH.size))
            data = self._received.read(size)
            return data if len(data) == size else None
        return None
