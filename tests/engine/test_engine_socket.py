# SPDX-License-Identifier: Apache-2.0
"""What the engine hears of stubs that end."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.transport import protocol
from flashinfer_backend.transport.engine_socket import EngineSocket

TIMEOUT_S = 120


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineSocket]:
    socket = EngineSocket(tmp_path, os.getpid())
    yield socket
    socket.close()


@pytest.fixture
def send(engine: EngineSocket, tmp_path: Path) -> Iterator[Callable[[protocol.ToEngine], None]]:
    """Says something as some stub."""
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(protocol.socket_address(tmp_path))
    yield lambda message: socket.send(protocol.encode(message))
    socket.close(linger=0)


def heard(engine: EngineSocket, last: type[protocol.ToEngine]) -> list[protocol.ToEngine]:
    """All up to the first of a kind."""
    found: list[protocol.ToEngine] = []
    deadline = time.monotonic() + TIMEOUT_S
    while not found or not isinstance(found[-1], last):
        assert time.monotonic() < deadline, found
        found += engine.receive(100, time.monotonic() + 1)
    return found


def asked(pid: int, local_id: int) -> protocol.Submit:
    params = SamplingParams(max_tokens=1, context_logits=True)
    return protocol.Submit(protocol.make_handle(pid, local_id), b"1234", params, 0, 0, 0)


def test_what_a_stub_sent_before_its_end_and_comes_after_it_is_dropped(
    engine: EngineSocket, send: Callable[[protocol.ToEngine], None]
) -> None:
    stub = subprocess.Popen(["sleep", "1000"])
    send(protocol.Hello(stub.pid, wants_status=True))
    send(asked(stub.pid, 1))
    assert len(heard(engine, protocol.Submit)) == 2
    stub.kill()
    stub.wait()
    assert [type(message) for message in heard(engine, protocol.Goodbye)] == [protocol.Goodbye]
    engine.forget(stub.pid)
    send(asked(stub.pid, 2))
    send(protocol.Cancel(7))
    assert heard(engine, protocol.Cancel) == [protocol.Cancel(7)]


def test_a_stub_that_ends_right_after_its_hello_is_not_told_anything(
    engine: EngineSocket, send: Callable[[protocol.ToEngine], None], caplog: pytest.LogCaptureFixture
) -> None:
    stub = subprocess.Popen(["true"])
    stub.wait()
    send(protocol.Hello(stub.pid, wants_status=True))
    send(asked(stub.pid, 1))
    send(protocol.Cancel(7))
    assert heard(engine, protocol.Cancel) == [protocol.Cancel(7)]
    caplog.clear()
    engine.send_status(protocol.Status(1, "cpu", 1, 1, 1, 1, 1, 1))
    assert not caplog.records, "it would be tried for ever, ten times a second"


def test_a_stub_that_comes_as_another_one_ends_is_not_taken_for_it(
    engine: EngineSocket, send: Callable[[protocol.ToEngine], None]
) -> None:
    """Its process is watched by the file descriptor that has just become free."""
    ends, comes = (subprocess.Popen(["sleep", "1000"]) for _ in range(2))
    try:
        send(protocol.Hello(ends.pid, wants_status=True))
        heard(engine, protocol.Hello)
        ends.kill()
        ends.wait()
        send(protocol.Goodbye(ends.pid))
        send(protocol.Hello(comes.pid, wants_status=True))
        send(asked(comes.pid, 1))
        time.sleep(0.05)  # they should be there together
        left, submitted = set(), False
        deadline = time.monotonic() + TIMEOUT_S
        while not submitted or not left:
            assert time.monotonic() < deadline, (left, submitted)
            for message in engine.receive(100, deadline):
                submitted |= isinstance(message, protocol.Submit)
                if isinstance(message, protocol.Goodbye):  # as the loop does
                    left.add(message.pid)
                    engine.forget(message.pid)
        assert left == {ends.pid}
    finally:
        for stub in (ends, comes):
            stub.kill()
            stub.wait()
