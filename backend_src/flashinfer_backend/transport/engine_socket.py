# SPDX-License-Identifier: Apache-2.0
"""The engine's end of the socket, and its watch over the processes it serves."""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import zmq

from flashinfer_backend.transport import protocol
from flashinfer_backend.transport.stub_processes import Stub, find_stub, remove_regions

log = logging.getLogger(__name__)

LARGE_PART = 1 << 20  # bytes from which zmq sends a frame without copying it
LEAST_RECEIVE_S = 0.001  # of taking in messages when a step is due: cancellations should arrive


class EngineSocket:
    """ROUTER socket bound in `run_dir`. A process that ends is noticed through its pidfd:
    the parent's end closes the engine, a stub's end is reported as that stub's Goodbye."""

    def __init__(self, run_dir: Path, parent_pid: int) -> None:
        self.pid = os.getpid()
        self.closed = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.sndhwm = 0  # a slow stub must not make the engine drop or wait
        self._socket.rcvhwm = 0
        self._socket.router_mandatory = True  # a stub that has left is an error we see, not a silent drop
        self._path = run_dir / protocol.SOCKET
        self._parent = os.pidfd_open(parent_pid)  # before others can see that the engine is there
        self._socket.bind(protocol.socket_address(run_dir))
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._parent, zmq.POLLIN)
        self._identity: dict[int, bytes] = {}  # by stub pid
        self._pidfd: dict[int, int] = {}
        self._stubs: dict[int, Stub | None] = {}  # looked up while they live

    def receive(self, timeout_ms: int, until: float) -> Iterator[protocol.ToEngine]:
        """Messages that are here; waits up to `timeout_ms` for the first.

        Ends at the time.monotonic() `until`, though not within LEAST_RECEIVE_S: what is left comes with the
        next call.
        """
        events = dict(self._poller.poll(timeout_ms))
        if self._parent in events:
            self.closed = True
            return
        # Before any message: one that leaves gives its descriptor's number to one that comes.
        ended = [pid for pid, pidfd in self._pidfd.items() if pidfd in events]
        if self._socket in events:
            until = max(until, time.monotonic() + LEAST_RECEIVE_S)
            while True:
                if time.monotonic() > until:
                    return  # a stub's Goodbye comes after all that it has sent
                try:
                    identity, body = self._socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                except ValueError:
                    log.error("dropped a message that has not exactly two frames")
                    continue
                message = self._decode(body)
                if isinstance(message, protocol.Hello) and not self._greet(message, identity):
                    continue
                if isinstance(message, protocol.Submit) and not self._is_here(message):
                    continue
                if message is not None:
                    yield message
        for pid in ended:
            if pid in self._pidfd:  # else it has said goodbye
                if (stub := self._stubs.get(pid)) is not None:
                    remove_regions([stub.region])  # tritonserver would leave it behind
                yield protocol.Goodbye(pid, said=False)

    def _decode(self, body: bytes) -> protocol.ToEngine | None:
        try:
            return protocol.decode_to_engine(body)
        except msgspec.DecodeError as error:
            log.error("dropped a message that does not follow the protocol: %s", error)
            return None

    def _greet(self, hello: protocol.Hello, identity: bytes) -> bool:
        """Whether the stub is still there: it may have ended right after its Hello."""
        if hello.pid not in self._pidfd:
            try:
                self._pidfd[hello.pid] = os.pidfd_open(hello.pid)
            except ProcessLookupError:
                log.warning("stub %d has ended already", hello.pid)
                return False
            self._stubs[hello.pid] = find_stub(hello.pid)
            self._poller.register(self._pidfd[hello.pid], zmq.POLLIN)
        self._identity[hello.pid] = identity
        return True

    def _is_here(self, submit: protocol.Submit) -> bool:
        """Whether the stub that wants it can hear of it. What it sent may come after its end was seen, and
        then the sequence would never end nor give its room for logits back."""
        pid, local_id = protocol.split_handle(submit.handle)
        if pid not in self._identity:
            log.warning("request %d of stub %d, which has left, is dropped", local_id, pid)
            return False
        return True

    def forget(self, pid: int) -> None:
        self._identity.pop(pid, None)
        self._stubs.pop(pid, None)
        pidfd = self._pidfd.pop(pid, None)
        if pidfd is not None:
            self._poller.unregister(pidfd)
            os.close(pidfd)

    def send_tokens(self, pid: int, frame: bytes, reports: list[protocol.RowReport] | None) -> None:
        parts: list[bytes | memoryview] = [protocol.TOKENS, frame]
        if reports:
            parts += protocol.pack_reports(reports)
        self._send(pid, parts)

    def send_failure(self, failure: protocol.Failure) -> None:
        self._send(failure.handle >> 32, [protocol.FAILURE, protocol.encode_answer(failure)])

    def send_profiled(self, profiled: protocol.Profiled) -> None:
        self._send(profiled.handle >> 32, [protocol.PROFILED, protocol.encode_answer(profiled)])

    def send_status(self, status: protocol.Status) -> None:
        body = protocol.encode_answer(status)
        for pid in self._identity:
            self._send(pid, [protocol.STATUS, body])

    def _send(self, pid: int, parts: Sequence[bytes | memoryview]) -> None:
        identity = self._identity.get(pid)
        if identity is None:
            log.warning("a message for stub %d, which is not connected, is dropped", pid)
            return
        try:
            # Every stream waits while context logits would be copied.
            copy = max(map(len, parts)) < LARGE_PART
            self._socket.send_multipart([identity, *parts], zmq.NOBLOCK, copy=copy)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # it has left: its Goodbye or its end comes next
                log.warning("stub %d is unreachable (%s)", pid, error)

    def close(self) -> None:
        self._socket.close()
        self._context.term()
        self._path.unlink(missing_ok=True)
