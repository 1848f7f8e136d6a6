# SPDX-License-Identifier: Apache-2.0
"""An engine that dies under load, and servers that end, each in every way they can."""

from __future__ import annotations

import http.client
import json
import os
import queue
import re
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from running import Server, build_repository, running, wait_for
from test_generate import PROMPT, inputs, int32, strings
from tritonclient.utils import InferenceServerException

from flashinfer_backend.core.paths import resolve_model_dir
from flashinfer_backend.serve import launcher as serve
from flashinfer_backend.serve.addresses import resolve

ENDLESS = {"text_input": PROMPT, "max_tokens": 1900, "stream": True, "end_id": 1048576}


class Streams:
    """Clients that read to the end in the background."""

    def __init__(self, server: Server, count: int) -> None:
        self.answers: list[Any] = []
        self._threads = [
            threading.Thread(target=self._read, args=(server,), daemon=True) for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, server: Server) -> None:
        try:
            self.answers.append(server.post(ENDLESS, stream=True))
        except (OSError, ValueError, http.client.HTTPException) as error:
            self.answers.append(error)

    def join(self) -> list[Any]:
        for thread in self._threads:
            thread.join()
        return self.answers


def start_streams(server: Server, count: int) -> Streams:
    streams = Streams(server, count)
    time.sleep(0.3)  # some are running by then, some wait: all of them have to be answered
    return streams


def kill_engine(server: Server) -> int:
    pid = server.engine_pid()
    os.kill(pid, signal.SIGKILL)
    return pid


def wait_gone(server: Server) -> None:
    server.launcher.wait(30)
    try:
        wait_for(lambda: not server.leftovers(), "nothing to be left")
    except AssertionError as error:
        raise AssertionError(f"{error}: {server.leftovers()}\n{server.log[-3000:]}") from None


def test_killed_engine_is_replaced_and_ctrl_c_leaves_nothing(repository: Path, tmp_path: Path) -> None:
    with running(repository, tmp_path) as server:
        expected = server.text(PROMPT, 16)
        for _ in range(2):
            streams = start_streams(server, 12)
            killed = kill_engine(server)
            wait_for(lambda: not server.ready("models/ensemble"), "the ensemble to report not ready")
            assert not server.ready() and not server.ready("models/llm")
            status, answer = server.post({"text_input": PROMPT, "max_tokens": 4})
            assert status != 200 and "error" in answer
            for events in streams.join():
                failed = r"Executor failed process requestId \d+ .* error: The engine .* ended unexpectedly"
                assert re.search(f"{failed}|no available versions", str(events)), events
            # The server says ready a moment before the ensemble is.
            wait_for(lambda: server.ready("models/ensemble") and server.ready(), "readiness", 60)
            assert server.engine_pid() != killed
            assert server.text(PROMPT, 16) == expected
        wait_for(lambda: len(server.matching("/llm/1/model.py")) == 2, "the old instances to be gone")

        streams = start_streams(server, 4)
        assert server.interrupt() == 0
        wait_gone(server)
        streams.join()


def test_killed_server_leaves_nothing(repository: Path, tmp_path: Path) -> None:
    with running(repository, tmp_path) as server:
        streams = start_streams(server, 4)
        server.matching("bin/tritonserver")[0].kill()
        wait_gone(server)
        streams.join()


def test_server_that_is_stopped_while_it_reloads_leaves_nothing(repository: Path, tmp_path: Path) -> None:
    """It gives up waiting for instances that it has just started."""
    with running(repository, tmp_path) as server:
        kill_engine(server)
        wait_for(lambda: not server.ready("models/ensemble"), "the reload")
        time.sleep(0.5)
        assert server.interrupt() == 0
        wait_gone(server)


def test_server_ends_with_its_launcher(repository: Path, tmp_path: Path) -> None:
    with running(repository, tmp_path) as server:
        server.launcher.kill()
        wait_gone(server)


def test_an_engine_that_cannot_start_fails_the_load_with_its_log(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(resolve_model_dir("bundled"), checkpoint)
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    server = Server(build_repository(tmp_path, f"model_dir={checkpoint}"), tmp_path)
    try:
        assert server.launcher.wait(90) != 0
        last = server.log.splitlines()[-1]
        assert re.match(r"serve: llm did not load: \[engine\] ERROR .*deserializ", last), server.log[-6000:]
        assert server.log.count("deserializ") == 1 and "+---" not in server.log
        wait_gone(server)
    finally:
        server.close()


def plain_command(repository: Path, tmp_path: Path) -> list[str]:
    """tritonserver as it is started by hand: no explicit model control."""
    found = serve.find_server(tmp_path / "backends")
    args = serve.command(found, repository, resolve("127.0.0.1"), 1, 2, 3)
    names = {"--http-port": "{http}", "--grpc-port": "{grpc}", "--metrics-port": "{metrics}"}
    dropped = ("--model-control-mode", "--load-model", "--http-restricted-api", "--grpc-restricted-protocol")
    pairs = [(name, names.get(name, value)) for name, value in zip(args[1::2], args[2::2], strict=True)]
    environment = serve.environment(found)
    setting = [f"{name}={environment[name]}" for name in ("PATH", "LD_LIBRARY_PATH")]
    return ["env", *setting, args[0]] + [word for pair in pairs if pair[0] not in dropped for word in pair]


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
            for result, error in (answers.get(timeout=30) for _ in range(32)):
                assert error is None and result.as_numpy("text_output")[0].decode() == PROMPT + expected
            for changes in ({"stream": np.array([[True]])}, {"num_return_sequences": int32(2)}):
                with pytest.raises(InferenceServerException, match="deployed using decoupled mode"):
                    client.infer("ensemble", inputs({**values, **changes}))
            batch = {"text_input": strings("a", "b"), "max_tokens": int32(4, 4)}
            with pytest.raises(InferenceServerException, match="batch size greater than 1"):
                client.infer("ensemble", inputs(batch))

        killed = kill_engine(server)
        wait_for(lambda: "is restarted in place" in server.log, "the restart")
        wait_for(lambda: server.post({"text_input": PROMPT, "max_tokens": 1})[0] == 200, "answers again", 60)
        assert server.engine_pid() != killed
        assert server.text(PROMPT, 16) == expected
        (tritonserver,) = server.matching("bin/tritonserver")
        server.launcher.terminate()
        server.launcher.wait(30)
        assert not tritonserver.is_running() or tritonserver.status() == psutil.STATUS_ZOMBIE
        wait_gone(server)


def test_stub_that_crashes_gives_its_pages_back(tmp_path: Path) -> None:
    repository = build_repository(tmp_path, "llm_instance_count=2")
    with running(repository, tmp_path) as server:
        start_streams(server, 8)
        stub = server.matching("/llm/1/model.py")[0]
        stub.kill()  # its clients wait until they give up: tritonserver does not tell them
        crashed = "boost::interprocess::lock_exception"
        noticed = f"stub {stub.pid} ended without a goodbye"
        wait_for(lambda: noticed in server.log or crashed in server.log, "the engine to notice")
        if crashed in server.log:
            pytest.xfail("tritonserver crashed: the stub was killed while it held a lock of both")
        record = json.loads((server.run_dir / "engine.json").read_text())
        assert psutil.pid_exists(record["pid"]) and record["failures"] == 0


def test_killed_stub_leaves_nothing_and_the_other_answers(tmp_path: Path) -> None:
    repository = build_repository(tmp_path, "llm_instance_count=2")
    with running(repository, tmp_path) as server:
        server.matching("/llm/1/model.py")[0].kill()
        wait_for(lambda: "ended without a goodbye" in server.log, "the engine to notice")
        # The server goes on giving it requests, which fail.
        answers = [server.post({"text_input": PROMPT, "max_tokens": 2}) for _ in range(8)]
        assert any(status == 200 for status, _ in answers)
        assert all(status == 200 or "is not healthy" in answer["error"] for status, answer in answers)
        server.interrupt()
        wait_gone(server)
