# SPDX-License-Identifier: Apache-2.0
"""An engine that dies under load, and servers that end, each in every way they can."""

import contextlib
import http.client
import json
import os
import queue
import random
import re
import shutil
import signal
import threading
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from asking import PROMPT, inputs, int32, strings
from contract import decode, greedy
from running import EngineWatch, Server, build_repository, plain_command, running, wait_for

from flashinfer_backend.core.paths import resolve_model_dir
from flashinfer_backend.transport.maintenance_server import RESTARTING

ENDLESS = {"text_input": PROMPT, "stream": True, "end_id": 1048576}


class Streams:
    """Clients that read to the end in the background."""

    def __init__(self, server: Server, count: int, max_tokens: int = 1900) -> None:
        self._body = {**ENDLESS, "max_tokens": max_tokens}
        self.answers: list[Any] = []
        self._threads = [
            threading.Thread(target=self._read, args=(server,), daemon=True) for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()
        time.sleep(0.3)  # some are running by then, some wait: all of them have to be answered

    def _read(self, server: Server) -> None:
        try:
            self.answers.append(server.post(self._body, stream=True))
        except (OSError, ValueError, http.client.HTTPException) as error:
            self.answers.append(error)

    def join(self) -> list[Any]:
        for thread in self._threads:
            thread.join()
        return self.answers


def kill_engine(server: Server) -> int:
    pid = server.engine_pid()
    os.kill(pid, signal.SIGKILL)
    return pid


def wait_gone(server: Server) -> None:
    server.launcher.wait(120)
    try:
        wait_for(lambda: not server.leftovers(), "nothing to be left")
    except AssertionError as error:
        raise AssertionError(f"{error}: {server.leftovers()}\n{server.log[-3000:]}") from None


def times_ready_again(server: Server) -> int:
    """How often serve has said so."""
    return server.log.count("serve: ready again")


def wait_again(server: Server, times: int) -> None:
    """Until serve has said for the so many-th time that the server is ready again."""
    wait_for(lambda: times_ready_again(server) >= times, "readiness", 120)
    assert server.ready() and server.ready("models/ensemble")


WORDED = "The engine process (ended unexpectedly|is not available)|A process of the server ended unexpectedly"
CUT = (http.client.IncompleteRead, http.client.RemoteDisconnected, ConnectionError, urllib.error.URLError)


@pytest.fixture(scope="module")
def harmed(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Parts of it are killed or stopped, one after the other; the last test that takes it ends it."""
    drain = ["--drain-seconds", "1"]
    with running(repository, tmp_path_factory.mktemp("harmed"), options=drain) as started:
        yield started


def test_killed_engine_is_replaced(harmed: Server) -> None:
    expected, times = harmed.text(PROMPT, 16), times_ready_again(harmed)
    streams = Streams(harmed, 12)
    killed = kill_engine(harmed)
    wait_for(lambda: not harmed.ready("models/ensemble"), "the ensemble to report not ready")
    assert not harmed.ready() and not harmed.ready("models/llm")
    status, answer = harmed.post({"text_input": PROMPT, "max_tokens": 4})
    assert status == 503 and answer == {"error": RESTARTING}
    for events in streams.join():
        assert re.search(WORDED, str(events)), events
    wait_again(harmed, times + 1)
    assert harmed.engine_pid() != killed
    assert harmed.text(PROMPT, 16) == expected
    assert len(harmed.matching("/llm/1/model.py")) == 2


def test_whatever_dies_is_replaced_and_the_engine_stays(harmed: Server) -> None:
    """One after the other, so the same engine has to outlive them all. Of postprocessing it is asked in
    test_openai_beside.py."""
    parts = ("/preprocessing/1/", "/llm/1/", "bin/tritonserver")
    expected, engine, before = harmed.text(PROMPT, 16), harmed.engine_pid(), times_ready_again(harmed)
    for times, part in enumerate(parts, before + 1):
        streams = Streams(harmed, 12)
        harmed.matching(part)[0].kill()
        wait_for(lambda: not harmed.ready(), f"the server to report not ready without {part}", 120)
        for answer in streams.join():  # worded where a process is left that can say it
            assert isinstance(answer, CUT) or re.search(WORDED, str(answer)), (part, answer)
        wait_again(harmed, times)
        assert harmed.text(PROMPT, 16) == expected, part
        assert harmed.engine_pid() == engine and harmed.engine_status().requests_active == 0, part
        stubs = harmed.matching("python_backend_stub")
        regions = list(Path("/dev/shm").glob(f"{harmed.shm_prefix}*"))
        assert len(stubs) == len(regions) == 5, part


def test_postprocessing_that_is_stopped_for_good_does_not_stop_the_service(harmed: Server) -> None:
    before = times_ready_again(harmed)
    streams = Streams(harmed, 12, max_tokens=400)
    for victim in harmed.matching("/postprocessing/1/"):
        victim.suspend()
    wait_for(lambda: "has been stopped for" in harmed.log, "serve to notice")
    streams.join()
    wait_again(harmed, before + 1)  # the next test counts, so serve has to have said it
    wait_for(lambda: harmed.ready() and harmed.answers(PROMPT), "an answer", 120)


def test_a_tritonserver_that_stands_still_alone_keeps_its_processes(harmed: Server) -> None:
    """Nothing is given up then, though a process of llm waits for it meanwhile, and runs nothing else."""
    wait_for(lambda: harmed.ready() and not harmed.engine_status().requests_active, "quiet")
    time.sleep(0.5)
    before = times_ready_again(harmed)
    (server,) = harmed.matching("bin/tritonserver")
    server.suspend()
    streams = Streams(harmed, 4, max_tokens=8)
    time.sleep(1.5)
    server.resume()
    for events in streams.join():
        assert isinstance(events, list) and not any("error" in event for event in events), events
    assert harmed.answers(PROMPT) and times_ready_again(harmed) == before


def test_ctrl_c_leaves_nothing_though_streams_are_open(harmed: Server) -> None:
    """And nothing of what has died before, and it sounds like no fault. The last of these tests: it leaves no
    server."""
    streams = Streams(harmed, 4)
    before = len(harmed.log)
    assert harmed.interrupt() == 0
    wait_gone(harmed)
    streams.join()
    said = harmed.log[before:]
    assert "[engine] INFO ended after" in said and "WARNING" not in said, said


@pytest.mark.timeout(600)
def test_storm_of_deaths_ends_in_answers_and_with_its_launcher(repository: Path, tmp_path: Path) -> None:
    """Also of what is just being started: two stubs that look for an engine, an engine that is loaded. All
    processes end with serve, which is killed."""
    rng = random.Random(7)
    with running(repository, tmp_path, options=["--restarts", "0"]) as server:
        expected = server.text(PROMPT, 16)
        parts = ["flashinfer_backend.engine"] * 3 + ["/llm/1/", "/postprocessing/1/", "bin/tritonserver"]
        rng.shuffle(parts)
        for part in parts:
            streams = Streams(server, 3)
            time.sleep(rng.uniform(0.0, 1.5))
            for victim in server.matching(part)[:1]:
                victim.kill()
            streams.join()
        wait_for(lambda: server.ready() and server.answers(PROMPT), "an answer", 120)
        time.sleep(2.0)
        wait_for(lambda: server.ready() and server.answers(PROMPT), "an answer that lasts", 120)
        assert server.text(PROMPT, 16) == expected
        assert len(server.matching("flashinfer_backend.engine")) == 1
        server.launcher.kill()
        wait_gone(server)


def test_a_server_whose_memory_has_grown_is_started_again(repository: Path, tmp_path: Path) -> None:
    """By what a gRPC client has asked for and does not read. What is open has its time; the engine stays.
    And a server that is stopped while it starts again leaves nothing."""
    options = ["--restart-after-growth", "40", "--drain-seconds", "300"]
    with (
        running(repository, tmp_path, options=options) as server,
        grpcclient.InferenceServerClient(server.grpc) as client,
        contextlib.ExitStack() as stack,
    ):
        engine, servers = server.engine_pid(), server.matching("bin/tritonserver")
        reads = threading.Event()
        client.start_stream(lambda result, error: reads.wait())
        stack.callback(client.stop_stream, cancel_requests=True)
        stack.callback(reads.set)
        large = {"text_input": strings("Once upon a time " * 110), "max_tokens": int32(1)}
        large["return_context_logits"] = np.array([[True]])
        streams = Streams(server, 2, max_tokens=1000)
        watch = EngineWatch(server)
        stack.callback(watch.close)
        # One by one: at twice the limit what is open would not have its time.
        grown, sent = False, -1
        while not grown:
            if (computed := watch.status().prompt_tokens) > sent:
                sent = computed
                client.async_stream_infer("ensemble", inputs(large))
            time.sleep(0.2)
            grown = "memory has grown by" in server.log
        for events in streams.join():
            assert isinstance(events, list), events
            assert events[-1].get("finish_reason") == "length", events[-1]
        reads.set()  # nothing is open any more
        wait_again(server, 1)
        assert server.answers(PROMPT)
        assert server.engine_pid() == engine and server.matching("bin/tritonserver") != servers
        kill_engine(server)
        wait_for(lambda: not server.ready("models/ensemble"), "the restart")
        time.sleep(1.0)
        assert server.interrupt() == 0
        wait_gone(server)


def test_open_streams_may_finish_after_sigterm_and_what_is_cut_is_told(
    repository: Path, tmp_path: Path
) -> None:
    with running(repository, tmp_path, options=["--drain-seconds", "3"]) as server:
        short = threading.Thread(
            target=lambda: finished.append(server.post({**ENDLESS, "max_tokens": 60}, stream=True))
        )
        finished: list[Any] = []
        streams = Streams(server, 2)
        short.start()
        time.sleep(0.2)
        server.launcher.terminate()
        time.sleep(0.5)
        with contextlib.suppress(OSError):  # where it has stopped listening already
            status, answer = server.post({"text_input": PROMPT, "max_tokens": 4})
            assert status != 200 and "error" in answer
        short.join()
        assert finished[0][-1]["finish_reason"] == "length", finished
        for events in streams.join():
            assert "shutting down" in str(events[-1]), events[-1]
        assert server.launcher.wait(120) == 0
        wait_gone(server)
        assert "serve: waiting for open sequences (2), up to " in server.log


def test_a_lost_rank_is_replaced_and_nothing_is_waited_for_once_nothing_is_open(tmp_path: Path) -> None:
    """The model is spread over two ranks: when one ends, its engine is replaced. At the server's end
    tritonserver would wait for the client that has left, for ten minutes, and does so for one that is there.
    """
    repository = build_repository(tmp_path, "tensor_parallel_size=2")
    with running(repository, tmp_path, options=["--drain-seconds", "600"]) as server:
        expected = decode(greedy(PROMPT, 16))
        assert server.text(PROMPT, 16) == expected
        (rank,) = server.matching("flashinfer_backend.worker")
        assert psutil.Process(server.engine_pid()).children() == [rank]
        assert re.search(r"^\[engine rank 1\] INFO read ", server.log, re.M), "each rank's start can be seen"
        streams = Streams(server, 6)
        rank.kill()
        for events in streams.join():
            assert re.search(WORDED, str(events)), events
        wait_again(server, 1)
        assert server.text(PROMPT, 16) == expected
        (new,) = server.matching("flashinfer_backend.worker")
        assert new.pid != rank.pid and "rank 1 has ended" in server.log
        with contextlib.closing(server.connection()) as left:
            left.request("POST", "/v2/models/ensemble/generate_stream", json.dumps(ENDLESS))
            assert left.getresponse().read(10)
        wait_for(lambda: not server.engine_status().requests_active, "the engine to drop it")
        streams = Streams(server, 1, max_tokens=200)
        assert server.interrupt() == 0
        (events,) = streams.join()
        assert events[-1]["finish_reason"] == "length", events
        wait_gone(server)
        assert "killed" not in server.log.partition("Signal (15) received")[2]


def test_an_engine_that_cannot_start_fails_the_load_with_its_log(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(resolve_model_dir("bundled"), checkpoint)
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    repository = build_repository(tmp_path, f"model_dir={checkpoint}")
    with contextlib.closing(Server(repository, tmp_path)) as server:
        assert server.launcher.wait(90) != 0
        last = server.log.splitlines()[-1]
        assert re.match(r"serve: llm did not load: \[engine\] ERROR .*deserializ", last), server.log[-6000:]
        wait_gone(server)


def test_without_decoupled_mode_and_without_model_control(tmp_path: Path) -> None:
    repository = build_repository(tmp_path, "decoupled_mode=false", "llm_instance_count=1")
    with running(repository, tmp_path, plain_command(repository, tmp_path)) as server:
        expected = server.text(PROMPT, 16)
        with grpcclient.InferenceServerClient(server.grpc) as client:
            values = {"text_input": strings(PROMPT), "max_tokens": int32(16)}
            result = client.infer("ensemble", inputs(values))
            assert result.as_numpy("text_output")[0].decode() == PROMPT + expected
            # One instance, many requests: they run in the engine at the same time.
            answers: queue.Queue[Any] = queue.Queue()
            for _ in range(32):
                client.async_infer(
                    "ensemble", inputs(values), lambda result, error: answers.put((result, error))
                )
            for result, error in (answers.get(timeout=120) for _ in range(32)):
                assert error is None and result.as_numpy("text_output")[0].decode() == PROMPT + expected

        killed = kill_engine(server)
        wait_for(lambda: "the next one is started" in server.log, "the restart")
        wait_for(lambda: server.post({"text_input": PROMPT, "max_tokens": 1})[0] == 200, "answers again", 120)
        assert server.engine_pid() != killed
        assert server.text(PROMPT, 16) == expected
        (tritonserver,) = server.matching("bin/tritonserver")
        server.launcher.terminate()
        server.launcher.wait(120)
        assert not tritonserver.is_running() or tritonserver.status() == psutil.STATUS_ZOMBIE
        wait_gone(server)
