# SPDX-License-Identifier: Apache-2.0
"""One process's end of the link to one engine: one thread owns the ZeroMQ socket.

Other threads hand it messages through a queue and an eventfd. The same thread watches the engine's
pidfd, so an engine that dies is noticed within a wake-up, and connects to the next one that is recorded.
"""

import contextlib
import math
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

import zmq

from flashinfer_backend.core.bounds import MOST_SENT
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.transport import protocol
from flashinfer_backend.transport.keeper_handle import EngineStartError
from flashinfer_backend.transport.records import EngineRecord, read_engine

RETRY_S = 0.1
ENGINE_LOST = "The engine process ended unexpectedly and is being restarted; please try again."
ENGINE_DOWN = "The engine process is not available, it is being started; please try again."
LINK_LOST = "The connection to the engine process failed and is being made anew; please try again."
LARGEST_ID = 0x7FFFFFFF  # of a sequence: both halves of a handle have 31 bits


LEADS = -1  # share_prompt_with of a sequence whose prompt later ones will share


class EngineDown(RuntimeError):
    """There is currently no engine to submit to."""


class Sink(Protocol):
    """Takes what the engine sends for one sequence; called on the link's thread, must not block."""

    handle: int  # set by submit() before anything can arrive; not set where it is refused

    def on_token(self, token: int, code: int, report: protocol.RowReport | None) -> None:
        """A token (or NO_TOKEN) and a finish code; nothing follows a code other than RUNNING."""

    def on_failure(self, message: str, refused: bool) -> None:
        """The sequence ends without result; `refused`: the engine never admitted it. By submit() as well."""


class Endpoint:
    """The link of one process to one engine. Handles are made here; a sequence is known until its end."""

    def __init__(
        self,
        run_dir: Path,
        ensure: Callable[[], None],
        on_status: Callable[[protocol.Status], None],
        on_load: Callable[[], None],
        index: int,
        count: int,
    ) -> None:
        """run_dir: the engine's run directory. ensure: called while there is no engine, to have one
        started (KeeperHandle.ensure). on_load: open_sequences or tokens_to_compute has changed; called on any
        thread. index, count: of this engine among those of the model; local ids are `index` modulo `count`,
        so that a handle tells its engine."""
        self._run_dir, self._ensure = run_dir, ensure
        self._on_status, self._on_load = on_status, on_load
        self._pid = os.getpid()
        # Guards up, _sinks, _prompts, _profiled and, outside the thread, _closing.
        self._lock = threading.Lock()
        self.up = False  # whether an engine is there and ready
        self._sinks: dict[int, Sink] = {}
        self._prompts: dict[int, int] = {}  # tokens to compute before the first one comes, by local id
        self.tokens_to_compute = 0  # the sum of these
        self._profiled: dict[int, Future[protocol.Profiled]] = {}  # answers to come, by local id
        self._count, self._last_id = count, index
        self._outbox: deque[bytes] = deque()
        self._wake = os.eventfd(0)
        self._closing = False
        self._refusal = ""  # why nothing more is submitted, once serve has said so
        self._was_ready = False
        self._said = ""  # what failed last
        self._known = threading.Event()  # ready, failed to get there, or started again after it was ready
        self.error: Exception | None = None  # which ended this link
        self.status: protocol.Status | None = None
        self.reported_at = 0.0  # time.monotonic() when the status came
        self._thread = threading.Thread(target=self._run, name="engine link", daemon=True)
        self._thread.start()

    def wait_known(self) -> Exception | None:
        """Waits until the engine is ready, or could not be started (the error), or one that has run before is
        being started again, which may take any time."""
        self._known.wait()
        return self.error

    @property
    def open_sequences(self) -> int:
        return len(self._sinks)

    def submit(
        self,
        sink: Sink,
        prompt: bytes,
        params: SamplingParams,
        share_prompt_with: int,
        priority: int,
        timeout_us: int,
        to_compute: int = 0,
    ) -> int:
        """Hands a sequence to the engine and returns its handle; 0 where it is refused. Raises EngineDown.

        share_prompt_with: handle of the first sequence with this prompt, LEADS for that first one. priority,
        timeout_us: as in protocol.Submit. to_compute: tokens of the prompt that are probably not cached.
        """
        with self._lock:
            local_id, refusal = self._next_id(), None if self.room >= 1 else self.refusal
            if refusal is None:
                sink.handle = handle = protocol.make_handle(self._pid, local_id)
                self._sinks[local_id] = sink
                if to_compute:
                    self._prompts[local_id] = to_compute
                    self.tokens_to_compute += to_compute
                shared = handle if share_prompt_with == LEADS else share_prompt_with
                self._send(protocol.Submit(handle, prompt, params, shared, priority, timeout_us))
        if refusal is not None:
            sink.on_failure(refusal, True)
            return 0
        self._on_load()
        return handle

    @property
    def room(self) -> float:
        """How many more sequences are submitted for now. Without the lock, others may take it at any time."""
        status = self.status
        if status is None or not status.max_queue_size:
            return math.inf
        return MOST_SENT * (status.max_num_seqs + status.max_queue_size) - len(self._sinks)

    @property
    def refusal(self) -> str:
        """What those are told for whom there is no room."""
        size = self.status.max_queue_size if self.status else 0
        return f"{protocol.QUEUE_FULL} of {size} has been reached, please try again later"

    def profile(self, steps: int) -> Future[protocol.Profiled]:
        """Asks the engine to trace steps, or (0) to end that. Gives its answer, or EngineDown. Raises
        EngineDown."""
        future: Future[protocol.Profiled] = Future()
        future.set_running_or_notify_cancel()  # who waits for it cannot end it
        with self._lock:
            local_id = self._next_id()
            self._profiled[local_id] = future
            self._send(protocol.Profile(protocol.make_handle(self._pid, local_id), steps))
        return future

    def _next_id(self) -> int:
        """With the lock. Raises EngineDown."""
        if not self.up or self._refusal:
            raise EngineDown(self._refusal or ENGINE_DOWN)
        self._last_id += self._count
        if self._last_id > LARGEST_ID:
            self._last_id = self._last_id % self._count + self._count
        return self._last_id

    def cancel(self, handle: int) -> None:
        """Asks the engine to end a sequence; its sink gets FINISHED_CANCELLED if it still runs."""
        self._tell(protocol.Cancel(handle))

    def freed(self, handle: int) -> None:
        """Tells the engine that this process holds none of a sequence's logits any more (protocol.Freed)."""
        self._tell(protocol.Freed(handle))

    def _tell(self, message: protocol.Cancel | protocol.Freed) -> None:
        with self._lock:
            if not self._closing:  # the link's end is that of its sequences, and the descriptor may be closed
                self._send(message)

    def _send(self, message: protocol.ToEngine) -> None:
        """With the lock."""
        self._outbox.append(protocol.encode(message))
        os.eventfd_write(self._wake, 1)

    def refuse(self, message: str) -> None:
        """From now on nothing is submitted, and what is open fails, with this message."""
        with self._lock:
            self._refusal = message
            if not self._closing:
                os.eventfd_write(self._wake, 1)
        self._fail_all(message)

    def close(self) -> None:
        """Ends the link; open sequences fail. Whether the engine ends is the keeper's part (`leave`)."""
        with self._lock:
            self._closing = True
            os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        context = zmq.Context()
        try:
            while not self._closing:
                with self._tried_again():
                    self._ensure()
                with self._tried_again():
                    record = read_engine(self._run_dir)
                    alive = record is not None and record.alive
                    if record is not None and record.ever_ready and not (alive and record.ready):
                        self._known.set()
                    if record is not None and alive:
                        self._serve(context, record)
                        continue
                time.sleep(RETRY_S)
        except Exception as error:
            self.error = error
            if self._was_ready:  # else wait_known() gives it
                traceback.print_exc()
        finally:
            self._go_down(f"The model is being unloaded. {self.error or ''}".rstrip())
            self._known.set()
            context.destroy(linger=200)

    @contextlib.contextmanager
    def _tried_again(self) -> Iterator[None]:
        """Once an engine was ready, what fails is said once, and done again: the machine, or this process,
        may lack room or descriptors for a while."""
        try:
            yield
        except (OSError, zmq.ZMQError, EngineStartError) as error:
            if not self._was_ready:
                raise
            if self._said != str(error):
                self._said = str(error)
                traceback.print_exc()

    def _serve(self, context: zmq.Context, record: EngineRecord) -> None:
        """Exchanges messages with one engine until it ends or the stub leaves."""
        # A new socket, and so a new identity, for each engine: nothing meant for another one is sent.
        socket, pidfd = context.socket(zmq.DEALER), -1
        try:
            try:
                pidfd = os.pidfd_open(record.pid)
            except ProcessLookupError:
                return
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.connect(protocol.socket_address(self._run_dir))
            socket.send(protocol.encode(protocol.Hello(self._pid)))
            poller = zmq.Poller()
            for readable in (socket, self._wake, pidfd):
                poller.register(readable, zmq.POLLIN)
            while not self._closing:
                ready = dict(poller.poll())
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                    while self._outbox:
                        socket.send(self._outbox.popleft())
                    if self._refusal:  # serve may end this process at once: its end is no news then
                        socket.send(protocol.encode(protocol.Goodbye(self._pid)))
                if socket in ready:
                    self._receive(socket)
                if pidfd in ready:
                    self._receive(socket)  # what the engine sent before it ended still counts
                    self._go_down(ENGINE_LOST)
                    return
            socket.send(protocol.encode(protocol.Goodbye(self._pid)))
        except Exception:
            if not self._was_ready or pidfd < 0:
                raise
            # Whatever one message did, the stub must not stay without an engine: it reconnects.
            traceback.print_exc()
            for local_id in list(self._sinks):
                socket.send(protocol.encode(protocol.Cancel(protocol.make_handle(self._pid, local_id))))
            self._go_down(LINK_LOST)
            time.sleep(RETRY_S)
        finally:
            if pidfd >= 0:
                os.close(pidfd)
            socket.close(linger=200)

    def _receive(self, socket: zmq.Socket) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                kind, payload = socket.recv(zmq.NOBLOCK), socket.recv()
                if kind == protocol.TOKENS:
                    reports: list[bytes | memoryview] = []
                    while socket.getsockopt(zmq.RCVMORE):  # without a copy, since logits may be among them
                        reports.append(socket.recv(copy=False).buffer)
                    self._deliver(payload, reports)
                elif kind == protocol.FAILURE:
                    failure = protocol.decode_failure(payload)
                    sink = self._forget(protocol.split_handle(failure.handle)[1])
                    self._on_load()
                    if sink is not None:
                        sink.on_failure(failure.message, failure.refused)
                elif kind == protocol.STATUS:
                    self._take_status(protocol.decode_status(payload))
                elif kind == protocol.PROFILED:
                    profiled = protocol.decode_profiled(payload)
                    with self._lock:
                        future = self._profiled.pop(protocol.split_handle(profiled.handle)[1], None)
                    if future is not None:
                        future.set_result(profiled)
                else:
                    raise ValueError(f"the engine sent a message of unknown kind {kind!r}")

    def _deliver(self, payload: bytes, frames: list[bytes | memoryview]) -> None:
        reports = protocol.unpack_reports(frames)
        frames.clear()  # from here on context logits belong to who takes them
        sinks, prompts = self._sinks, self._prompts
        changed = False
        for local_id, token, code, report in protocol.with_reports(payload, reports):
            if local_id in prompts:
                with self._lock:
                    self._forget_prompt(local_id)
                changed = True
            if code == protocol.RUNNING:
                sink = sinks.get(local_id)
            else:
                sink, changed = self._forget(local_id), True
            if sink is not None:
                sink.on_token(token, code, report)
        if changed:
            self._on_load()

    def _take_status(self, status: protocol.Status) -> None:
        self.status, self.reported_at = status, time.monotonic()
        if not self.up:
            with self._lock:
                self.up = True
            self._was_ready = True
            self._known.set()
        self._on_status(status)

    def _forget(self, local_id: int) -> Sink | None:
        with self._lock:
            self._forget_prompt(local_id)
            return self._sinks.pop(local_id, None)

    def _forget_prompt(self, local_id: int) -> None:
        self.tokens_to_compute -= self._prompts.pop(local_id, 0)

    def _go_down(self, message: str) -> None:
        with self._lock:
            self.up = False
            self._outbox.clear()
        self._fail_all(message)

    def _fail_all(self, message: str) -> None:
        with self._lock:
            sinks, self._sinks = self._sinks, {}
            profiled, self._profiled = self._profiled, {}
            self._prompts.clear()
            self.tokens_to_compute = 0
        self._on_load()
        for future in profiled.values():
            future.set_exception(EngineDown(message))
        for sink in sinks.values():
            sink.on_failure(message, False)
