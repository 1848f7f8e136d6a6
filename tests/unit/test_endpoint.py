# SPDX-License-Identifier: Apache-2.0
"""Both ends of the link between a stub and its engine, in front of an engine process that only waits."""

import math
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import waiting
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.transport import endpoint, protocol, records, rundir
from flashinfer_backend.transport.endpoint import (
    ENGINE_DOWN,
    ENGINE_LOST,
    LEADS,
    LINK_LOST,
    Endpoint,
    EngineDown,
)
from flashinfer_backend.transport.engine_socket import EngineSocket
from flashinfer_backend.transport.keeper_handle import EngineStartError
from flashinfer_backend.transport.protocol import FINISHED_LENGTH, NO_TOKEN, RUNNING, RowReport, Status
from flashinfer_backend.transport.records import EngineRecord

wait_for = partial(waiting.wait_for, timeout_s=30)
PARAMS = SamplingParams(max_tokens=4)
PROMPT = b"12345678"


class Answer:
    """What a sequence was told."""

    handle = 0

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def on_token(self, *told: Any) -> None:
        self.told.append(told)
        if told[0] == 13:
            raise RuntimeError("a token that brings bad luck")

    def on_failure(self, *told: Any) -> None:
        self.told.append(told)


class Ends:
    """An endpoint and an engine's socket. `ensured`: called while there is no engine."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.ensured = run_dir, list[Callable[[], None]]()
        self.statuses, self.loads, self.heard = list[Status](), list[tuple[int, int]](), list[Any]()
        self.socket, self.process = self.start()
        self.link = Endpoint(run_dir, self.ensure, self.statuses.append, self.on_load, index=1, count=3)

    def ensure(self) -> None:
        if self.ensured:
            self.ensured.pop()()

    def on_load(self) -> None:
        self.loads.append((self.link.open_sequences, self.link.tokens_to_compute))

    def start(self, ready: bool = True) -> tuple[EngineSocket, "subprocess.Popen[bytes]"]:
        socket, process = EngineSocket(self.run_dir, os.getpid()), subprocess.Popen(["sleep", "600"])
        ticks = rundir.start_ticks(process.pid)
        assert ticks is not None
        records.write(self.run_dir / records.ENGINE, EngineRecord(process.pid, ticks, ready, ready))
        return socket, process

    def hear(self, kind: type) -> Any:
        """The next message of a kind."""

        def found() -> Any:
            self.heard += self.socket.receive(20, time.monotonic() + 1)
            return next((message for message in self.heard if isinstance(message, kind)), None)

        message = wait_for(found, kind.__name__)
        del self.heard[: self.heard.index(message) + 1]
        return message

    def begin(self) -> Status:
        """The engine greets back: it is ready."""
        assert self.hear(protocol.Hello) == protocol.Hello(os.getpid())
        status = Status(self.process.pid, "cpu", 1, 1, 1, 1, 16, 1)
        self.socket.send_status(status)
        wait_for(lambda: self.link.up)
        return status

    def submit(self, *more: int) -> Answer:
        answer = Answer()
        handle = self.link.submit(answer, PROMPT, PARAMS, *(more or (0, 0, 0)))
        assert handle == answer.handle and protocol.split_handle(handle)[0] == os.getpid()
        return answer

    def tokens(self, *rows: tuple[Answer, int, int], reports: list[RowReport] | None = None) -> None:
        ids = np.array([answer.handle & 0xFFFFFFFF for answer, _, _ in rows])
        frame = protocol.pack_tokens(ids, *(np.array([row[n] for row in rows]) for n in (1, 2)))
        self.socket.send_tokens(os.getpid(), frame, reports)


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    made = Ends(tmp_path)
    yield made
    if made.link._thread.is_alive():
        made.link.close()
    made.process.kill()
    made.process.wait()
    made.socket.close()
    assert not (tmp_path / protocol.SOCKET).exists()


def test_a_sequence_from_its_submission_to_its_end(ends: Ends) -> None:
    with pytest.raises(EngineDown, match=ENGINE_DOWN):
        ends.submit()
    status = ends.begin()
    wait_for(lambda: ends.statuses == [status] and ends.link.status == status)
    assert not any(msgspec.structs.astuple(status)[8:]), "what a report leaves out"
    assert ends.link.wait_known() is None and time.monotonic() - ends.link.reported_at < 60
    first, second = ends.submit(LEADS, -4, 5_000_000, 7), ends.submit(0, 0, 0, 9)
    third = ends.submit(first.handle, 1, 0)
    assert [each.handle & 0xFFFFFFFF for each in (first, second, third)] == [4, 7, 10]
    for answer, *more in (
        (first, first.handle, -4, 5_000_000),
        (second, 0, 0, 0),
        (third, first.handle, 1, 0),
    ):
        assert ends.hear(protocol.Submit) == protocol.Submit(answer.handle, PROMPT, PARAMS, *more)
    assert ends.loads[-3:] == [(1, 7), (2, 16), (3, 16)]
    logits = np.arange(1 << 19, dtype=np.float32)
    reports = [RowReport(4, turn=1, context_logits=logits.data.cast("B"))]
    ends.tokens((first, 5, RUNNING), (first, 6, RUNNING), reports=reports)
    wait_for(lambda: len(first.told) == 2 and ends.loads[-1] == (3, 9))
    assert first.told[0] == (5, RUNNING, None)
    assert bytes(first.told[1][2].context_logits) == logits.tobytes()
    loads = len(ends.loads)
    ends.tokens((first, 7, RUNNING), (third, 8, RUNNING), reports=[RowReport(10, log_prob=-0.5)])
    wait_for(lambda: third.told == [(8, RUNNING, RowReport(10, log_prob=-0.5))])
    ends.tokens((first, 9, RUNNING))
    wait_for(lambda: len(first.told) == 4)
    assert len(ends.loads) == loads, "nothing has changed"
    ends.tokens((third, 8, FINISHED_LENGTH))
    wait_for(lambda: ends.loads[-1] == (2, 9))
    ends.socket.send_failure(protocol.Failure(second.handle, "no room", True))
    wait_for(lambda: second.told == [("no room", True)] and ends.loads[-1] == (1, 0))
    ends.tokens((second, 9, RUNNING), (first, NO_TOKEN, FINISHED_LENGTH))  # what has ended hears nothing
    ends.socket.send_failure(protocol.Failure(second.handle, "no room"))
    wait_for(lambda: ends.loads[-2:] == [(0, 0)] * 2)
    assert first.told[4:] == [(NO_TOKEN, FINISHED_LENGTH, None)] and len(second.told) == 1
    ends.link.cancel(first.handle)
    ends.link.freed(second.handle)
    assert ends.hear(protocol.Cancel) == protocol.Cancel(first.handle)
    assert ends.hear(protocol.Freed) == protocol.Freed(second.handle)
    assert ends.link.up


def test_no_more_is_sent_to_an_engine_than_it_can_run_and_queue_twice(ends: Ends) -> None:
    """It would refuse the rest, once it had read it: clients that leave at once could send it any number.
    What has left counts until the engine has ended it."""
    status = ends.begin()
    refused = Answer()
    for limit in (2, 0):
        ends.socket.send_status(msgspec.structs.replace(status, max_num_seqs=1, max_queue_size=limit))
        wait_for(lambda limit=limit: ends.link.status.max_queue_size == limit)
        room = ends.link.room
        answers = [ends.submit() for _ in range(6)]
        assert (room, ends.link.room) == ((6, 0) if limit else (math.inf, math.inf))
        if limit:
            ends.link.cancel(answers[0].handle)
            assert ends.link.submit(refused, PROMPT, PARAMS, 0, 0, 0) == refused.handle == 0
            ((why, known),) = refused.told
            assert why.startswith(f"{protocol.QUEUE_FULL} of 2 has been reached") and known
            ends.tokens((answers[0], NO_TOKEN, protocol.FINISHED_CANCELLED))
            wait_for(lambda answers=answers: answers[0].told)
            ends.submit()


def test_an_engine_that_ends_fails_what_is_open_and_the_next_one_gets_nothing_of_it(ends: Ends) -> None:
    ends.begin()
    answer, trace = ends.submit(0, 0, 0, 5), ends.link.profile(3)
    assert ends.hear(protocol.Profile).steps == 3 and not trace.cancel()
    ends.tokens((answer, 5, RUNNING))
    wait_for(lambda: answer.told == [(5, RUNNING, None)])
    ends.process.kill()
    wait_for(lambda: answer.told[1:] == [(ENGINE_LOST, False)])
    with pytest.raises(EngineDown, match=ENGINE_LOST):
        trace.result(60)
    assert not ends.link.up and ends.loads[-1] == (0, 0) and ends.link.wait_known() is None
    with pytest.raises(EngineDown, match=ENGINE_DOWN):
        ends.link.profile(3)
    ends.link.cancel(answer.handle)
    ends.process.wait()
    ends.socket.close()
    ends.socket, ends.process = ends.start()
    ends.begin()
    answer = ends.submit()
    assert ends.hear(protocol.Submit).handle == answer.handle
    trace = ends.link.profile(0)
    asked = ends.hear(protocol.Profile)
    ends.socket.send_profiled(protocol.Profiled(asked.handle, ["trace"]))
    assert trace.result(60) == protocol.Profiled(asked.handle, ["trace"])
    ends.socket.send_profiled(protocol.Profiled(asked.handle, []))  # a second answer
    ends.tokens((answer, 5, RUNNING))
    wait_for(lambda: answer.told)


def test_from_a_refusal_on_nothing_is_submitted_and_the_engine_takes_its_leave(ends: Ends) -> None:
    ends.begin()
    answer = ends.submit(0, 0, 0, 5)
    assert ends.hear(protocol.Submit).handle == answer.handle
    ends.link.refuse("the server ends")
    assert answer.told == [("the server ends", False)] and ends.loads[-1] == (0, 0)
    assert ends.hear(protocol.Goodbye) == protocol.Goodbye(os.getpid(), said=True)
    with pytest.raises(EngineDown, match="the server ends"):
        ends.submit()


def test_a_link_that_is_closed_fails_what_is_open_and_says_goodbye(ends: Ends) -> None:
    ends.begin()
    answer = ends.submit()
    ends.link.close()
    assert answer.told == [("The model is being unloaded.", False)]
    assert ends.hear(protocol.Goodbye) == protocol.Goodbye(os.getpid(), said=True)
    ends.link.cancel(answer.handle)  # these do nothing
    ends.link.refuse("late")


@pytest.mark.parametrize("what", ["token", "kind"])
def test_a_message_that_cannot_be_handled_cancels_what_is_open(
    ends: Ends, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    ends.begin()
    answer, other = ends.submit(), ends.submit()
    if what == "token":
        ends.tokens((answer, 13, RUNNING))
    else:
        ends.socket._send(os.getpid(), [b"?", b""])
    assert [ends.hear(protocol.Cancel).handle for _ in range(2)] == [answer.handle, other.handle]
    wait_for(lambda: answer.told[-1:] == other.told[-1:] == [(LINK_LOST, False)])
    assert ("bad luck" if what == "token" else "message of unknown kind b'?'") in capfd.readouterr().err
    ends.begin()  # a new link
    again = ends.submit()
    assert ends.hear(protocol.Submit).handle == again.handle


def test_numbers_of_sequences_begin_anew(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before they no longer fit their half of a handle, and of this engine still."""
    monkeypatch.setattr(endpoint, "LARGEST_ID", 10)
    ends.begin()
    assert [ends.submit().handle & 0xFFFFFFFF for _ in range(5)] == [4, 7, 10, 4, 7]


def test_what_fails_before_the_first_engine_ends_the_link_and_later_it_is_said_once(
    ends: Ends, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise EngineStartError("no such model")

    ends.begin()
    ends.ensured += [fail] * 3
    ends.process.kill()
    wait_for(lambda: not ends.ensured)
    assert capfd.readouterr().err.count("no such model\n") == 1
    ends.process.wait()
    other = tmp_path / "other"
    other.mkdir()
    link = Endpoint(other, fail, ends.statuses.append, lambda: None, 0, 1)
    assert str(link.wait_known()) == "no such model"
    with pytest.raises(EngineDown):
        link.submit(Answer(), PROMPT, PARAMS, 0, 0, 0)
    link.close()
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("ever_ready", [False, True])
def test_only_an_engine_that_runs_for_the_first_time_is_waited_for(tmp_path: Path, ever_ready: bool) -> None:
    records.write(tmp_path / records.ENGINE, EngineRecord(ever_ready=ever_ready))
    known, descriptors = threading.Event(), len(os.listdir("/proc/self/fd"))
    link = Endpoint(tmp_path, lambda: None, lambda status: None, lambda: None, 0, 1)
    thread = threading.Thread(target=lambda: (link.wait_known(), known.set()))
    thread.start()
    assert known.wait(60 if ever_ready else 0.5) is ever_ready
    link.close()
    thread.join()
    assert link.error is None and len(os.listdir("/proc/self/fd")) == descriptors


def test_context_logits_are_frames_of_their_own() -> None:
    logits = [np.full(6, n, "<f4") for n in range(2)]
    reports = [protocol.RowReport(n, context_logits=memoryview(a).cast("B")) for n, a in enumerate(logits)]
    frames = protocol.pack_reports([reports[0], protocol.RowReport(9, queue_ns=3), reports[1]])
    for frame, sent in zip(frames[1:], logits, strict=True):
        assert np.shares_memory(np.frombuffer(frame, np.uint8), sent), "not copied"
    assert len(frames) == 3 and len(frames[0]) < 100
    found = protocol.unpack_reports(frames)
    assert [each.local_id for each in found] == [0, 9, 1] and found[1].context_logits is None
    for each, sent in ((found[0], logits[0]), (found[2], logits[1])):
        assert each.context_logits == memoryview(sent).cast("B")
    assert protocol.unpack_reports([]) == []
