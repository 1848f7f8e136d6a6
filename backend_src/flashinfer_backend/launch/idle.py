# SPDX-License-Identifier: Apache-2.0
"""Whether a server that is to end has anything left to do.

tritonserver 2.51 counts a streaming client of the ensemble that has left among its open requests for good,
and waits for it in vain; with nothing open at all it takes seconds to end. So serve asks those that know: the
engines, the processors' clock and the kernel's queues.
"""

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

import zmq

from flashinfer_backend.core import processes
from flashinfer_backend.launch.server_sockets import has_unsent
from flashinfer_backend.transport import protocol

IDLE_S = 1.0
BUSY_SHARE = 0.3  # of a core: a process with more does something for somebody
FRESH_S = 0.5  # how old an engine's report may be


class Idleness:
    def __init__(self, run_dirs: Iterable[Path]) -> None:
        """run_dirs: the engines' run directories."""
        self._context = zmq.Context()
        self._engines: list[zmq.Socket] = []
        for folder in run_dirs:
            engine = self._context.socket(zmq.DEALER)
            engine.linger = 0
            engine.connect(protocol.socket_address(folder))
            engine.send(protocol.encode(protocol.Hello(os.getpid())))
            self._engines.append(engine)
        self._idle_at: dict[zmq.Socket, float] = {}  # when an engine last said that it has nothing to do
        self._since = time.monotonic()
        self._cpu: dict[int, float] = {}  # by pid, then
        self._open: dict[zmq.Socket, int] = {}  # sequences, as an engine last said
        self.waits_for = "the engines' state"  # what was not idle when it was last asked

    def idle(self, server_pid: int, stub_pids: Iterable[int]) -> bool:
        """Whether nothing has been open for IDLE_S: no sequence in an engine, no process that computes, no
        answer that its client has not taken. To be called several times in that time."""
        now = time.monotonic()
        quiet = all([self._has_nothing(engine, now) for engine in self._engines])
        used = {pid: _cpu_seconds(pid) for pid in (server_pid, *stub_pids)}
        if not quiet or has_unsent(server_pid) is not False:
            self._since, self._cpu = now, used
            count = sum(self._open.values())
            self.waits_for = "answers that clients have not taken" if quiet else f"open sequences ({count})"
        elif now > self._since + IDLE_S:
            busy = BUSY_SHARE * (now - self._since)
            working = [pid for pid, cpu in used.items() if cpu - self._cpu.get(pid, cpu) >= busy]
            if not working:
                return True
            self._since, self._cpu = now, used
            self.waits_for = f"process {working[0]}, which is busy"
        else:
            self.waits_for = "a second without open requests"
        return False

    def close(self) -> None:
        for engine in self._engines:
            with contextlib.suppress(zmq.ZMQError):
                engine.send(protocol.encode(protocol.Goodbye(os.getpid())), zmq.NOBLOCK)
        self._context.destroy(linger=50)

    def _has_nothing(self, engine: zmq.Socket, now: float) -> bool:
        while engine.poll(0):
            status = protocol.decode_status(engine.recv_multipart()[1])
            self._open[engine] = status.requests_active
            if status.requests_active or status.requests_waiting:
                self._idle_at.pop(engine, None)
            else:
                self._idle_at[engine] = now
        return now < self._idle_at.get(engine, -FRESH_S) + FRESH_S


def _cpu_seconds(pid: int) -> float:
    """0 when it has ended."""
    with contextlib.suppress(OSError):
        return processes.cpu_seconds(processes.stat(pid)[1])
    return 0.0
