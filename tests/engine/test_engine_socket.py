# SPDX-License-Identifier: Apache-2.0
"""What the engine hears of stubs that end, and what an API makes of odd tokens of an engine."""

import asyncio
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from flashinfer_backend.core.paths import resolve_model_dir
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.openai.link import EngineLink, Streams
from flashinfer_backend.serving.engines import Engines
from flashinfer_backend.serving.generation import GenerationRequest
from flashinfer_backend.text.delta import DeltaDecoder
from flashinfer_backend.text.tokenizer import TextTokenizer
from flashinfer_backend.transport import engine_socket, protocol, records, rundir, stub_processes
from flashinfer_backend.transport.engine_socket import EngineSocket
from waiting import wait_for

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
    engine: EngineSocket,
    send: Callable[[protocol.ToEngine], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its shared memory is removed, as tritonserver would not."""
    monkeypatch.setattr(stub_processes, "SHARED_MEMORY", tmp_path)
    (tmp_path / "region").touch()
    line = ["/triton_python_backend_stub", "/llm/1/model.py", "region", "1", "1", "4194305"]
    # `yes` takes any arguments, and stands still once the pipe is full.
    stub = subprocess.Popen(line, executable="/usr/bin/yes", stdout=subprocess.PIPE)
    wait_for(lambda: stub_processes.find_stub(stub.pid))
    for _ in range(2):  # it may lose its link and make it anew
        send(protocol.Hello(stub.pid))
    send(asked(stub.pid, 1))
    assert len(heard(engine, protocol.Submit)) == 3
    stub.kill()
    stub.communicate()
    assert heard(engine, protocol.Goodbye) == [protocol.Goodbye(stub.pid, said=False)]
    assert not (tmp_path / "region").exists()
    descriptors = len(os.listdir("/proc/self/fd"))
    engine.forget(stub.pid)
    engine.forget(stub.pid)
    assert len(os.listdir("/proc/self/fd")) == descriptors - 1
    engine.send_failure(protocol.Failure(protocol.make_handle(stub.pid, 1), "late"))
    assert f"a message for stub {stub.pid}, which is not connected, is dropped" in caplog.text
    send(asked(stub.pid, 2))
    send(protocol.Cancel(7))
    assert heard(engine, protocol.Cancel) == [protocol.Cancel(7)]


def test_a_stub_that_ends_right_after_its_hello_is_not_told_anything(
    engine: EngineSocket, send: Callable[[protocol.ToEngine], None], caplog: pytest.LogCaptureFixture
) -> None:
    stub = subprocess.Popen(["true"])
    stub.wait()
    send(protocol.Hello(stub.pid))
    send(asked(stub.pid, 1))
    send(protocol.Cancel(7))
    assert heard(engine, protocol.Cancel) == [protocol.Cancel(7)]
    caplog.clear()
    engine.send_status(protocol.Status(1, "cpu", 1, 1, 1, 1, 1, 1))
    assert not caplog.records, "it would be tried for ever, ten times a second"


def test_what_is_no_message_is_dropped(
    engine: EngineSocket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.connect(protocol.socket_address(tmp_path))
        socket.send(b"no message")
        socket.send_multipart([b"one frame", b"too many"])
        socket.send(protocol.encode(protocol.Cancel(7)))
        assert heard(engine, protocol.Cancel) == [protocol.Cancel(7)]
    assert "does not follow the protocol" in caplog.text and "not exactly two frames" in caplog.text


def test_a_stub_that_reads_nothing_for_long_loses_nothing(engine: EngineSocket, tmp_path: Path) -> None:
    with zmq.Context.instance().socket(zmq.DEALER) as slow:
        slow.connect(protocol.socket_address(tmp_path))
        slow.send(protocol.encode(protocol.Hello(os.getpid())))
        heard(engine, protocol.Hello)
        frames = [n.to_bytes(2, "little") * 500 for n in range(5000)]
        for frame in frames:
            engine.send_tokens(os.getpid(), frame, None)
        assert [slow.recv_multipart() for _ in frames] == [[protocol.TOKENS, frame] for frame in frames]


def test_text_that_no_message_can_hold_arrives_as_its_escapes(engine: EngineSocket, tmp_path: Path) -> None:
    pid, half = os.getpid(), "a\udce9\ud800"
    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.connect(protocol.socket_address(tmp_path))
        socket.send(protocol.encode(protocol.Hello(pid)))
        heard(engine, protocol.Hello)
        handle = protocol.make_handle(pid, 1)
        engine.send_failure(protocol.Failure(handle, half, refused=True))
        engine.send_profiled(protocol.Profiled(handle, [half, "b"], half))
        engine.send_status(protocol.Status(pid, "cpu", 1, 1, 1, 1, 1, 1, adapters_running=[half]))
        assert socket.poll(TIMEOUT_S * 1000)
        bodies = [socket.recv_multipart()[1] for _ in range(3)]
    escaped = r"a\udce9\ud800"
    assert protocol.decode_failure(bodies[0]) == protocol.Failure(handle, escaped, refused=True)
    assert protocol.decode_profiled(bodies[1]) == protocol.Profiled(handle, [escaped, "b"], escaped)
    assert protocol.decode_status(bodies[2]).adapters_running == [escaped]


def test_when_a_step_is_due_what_is_left_comes_with_the_next_call(
    engine: EngineSocket, send: Callable[[protocol.ToEngine], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though some time is left for messages in each call."""
    for n in range(200):
        send(protocol.Cancel(n))
    time.sleep(0.1)
    monkeypatch.setattr(engine_socket, "LEAST_RECEIVE_S", 0.0)
    few = [message.handle for message in engine.receive(1000, 0.0)]
    monkeypatch.setattr(engine_socket, "LEAST_RECEIVE_S", float(TIMEOUT_S))
    all_of_them = few + [message.handle for message in engine.receive(1000, 0.0)]
    assert len(few) < 200 and all_of_them == list(range(200))
    assert list(engine.receive(0, time.monotonic() + TIMEOUT_S)) == [], "it is not waited for"


def test_the_end_of_the_parent_closes_the_engine(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "1000"]) as parent:
        engine = EngineSocket(tmp_path, parent.pid)
        assert list(engine.receive(0, 0.0)) == [] and not engine.closed
        parent.kill()
    assert list(engine.receive(1000 * TIMEOUT_S, 0.0)) == [] and engine.closed
    engine.close()


def test_a_stub_that_comes_as_another_one_ends_is_not_taken_for_it(
    engine: EngineSocket, send: Callable[[protocol.ToEngine], None]
) -> None:
    """Its process is watched by the file descriptor that has just become free."""
    ends, comes = (subprocess.Popen(["sleep", "1000"]) for _ in range(2))
    try:
        send(protocol.Hello(ends.pid))
        heard(engine, protocol.Hello)
        ends.kill()
        ends.wait()
        send(protocol.Goodbye(ends.pid))
        send(protocol.Hello(comes.pid))
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


def test_tokens_that_cannot_be_read_fail_their_request_alone(engine: EngineSocket, tmp_path: Path) -> None:
    """One frame has them, and then the end of another request."""
    decoder = DeltaDecoder(TextTokenizer(resolve_model_dir("bundled")).backend)
    params = SamplingParams(max_tokens=5)
    prompt = np.array([5, 6], np.int32)
    asked = [GenerationRequest(prompt, params, stop_words=["zzz"]), GenerationRequest(prompt, params)]

    async def chunks(streams: Streams) -> list[list[int]]:
        return [list(chunk.ids) async for _, chunk in streams]

    async def both() -> list[Any]:
        ticks = rundir.start_ticks(os.getpid())
        records.write(tmp_path / records.ENGINE, records.EngineRecord(os.getpid(), ticks, ready=True))
        link = EngineLink(Engines(tmp_path, 1), asyncio.get_running_loop())
        await asyncio.to_thread(heard, engine, protocol.Hello)
        engine.send_status(protocol.Status(os.getpid(), "cpu", 2048, 64, 64, 4, 16, 100))
        await asyncio.to_thread(link.engines.wait_ready)
        streams = []
        for row in asked:
            streams.append(link.generate([(row, 1)], decoder))
            await asyncio.to_thread(heard, engine, protocol.Submit)
        ids = [protocol.split_handle(each.all[0].handle)[1] for each in streams]
        codes = [protocol.RUNNING, protocol.FINISHED_LENGTH]
        frame = protocol.pack_tokens(np.array(ids), np.array([10**9, 7]), np.array(codes))
        engine.send_tokens(os.getpid(), frame, None)
        answers = asyncio.gather(*map(chunks, streams), return_exceptions=True)
        try:
            return await asyncio.wait_for(answers, TIMEOUT_S)
        finally:
            link.engines.close()

    error, tokens = asyncio.run(both())
    assert isinstance(error, ValueError) and tokens == [[7]]
