# SPDX-License-Identifier: Apache-2.0
"""Servers that cannot start, and one that is stopped while a client has left a stream behind."""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path

import pytest
from running import Server, answers_well, wait_for

from flashinfer_backend.launch import preflight
from ports import free_ports


@pytest.mark.parametrize(
    "script, said",
    [
        ("echo the codec is missing >&2; exit 1", "the codec is missing"),
        ("echo $0: error while loading shared libraries: libx.so.1: no such file >&2; exit 127", "libx.so.1"),
    ],
)
def test_stubs_that_cannot_start_end_the_server(
    repository: Path, tmp_path: Path, script: str, said: str
) -> None:
    """tritonserver itself waits for them for ever."""
    backends = tmp_path / "backends"
    found = preflight.find_server(backends)
    if found.backends is None:
        pytest.skip("NVIDIA's image has one stub, which is not ours to replace")
    found.stub.unlink()
    found.stub.write_text(f"#!/bin/bash\n{script}\n")
    found.stub.chmod(0o755)
    options = ["--backends", str(backends)]
    with contextlib.closing(Server(repository, tmp_path, options=options)) as server:
        assert server.launcher.wait(120) != 0
        last = server.log.splitlines()[-1]
        assert last.startswith("serve: the server cannot start: ") and said in last
        wait_for(lambda: not server.leftovers(), "nothing to be left")


def test_a_server_that_dies_while_it_starts_is_started_again(repository: Path, tmp_path: Path) -> None:
    """tritonserver aborts where a model's process has no turn for a second while it is loaded."""
    with contextlib.closing(Server(repository, tmp_path)) as server:
        (first,) = wait_for(lambda: server.matching("bin/tritonserver"), "tritonserver")
        first.send_signal(signal.SIGABRT)
        server.wait_ready()
        assert "serve: tritonserver ended (signal 6); starting the server again" in server.log
        assert server.answers("Once")


def test_a_server_that_is_stopped_while_it_starts_leaves_nothing(repository: Path, tmp_path: Path) -> None:
    with contextlib.closing(Server(repository, tmp_path)) as server:
        wait_for(
            lambda: "TRITONBACKEND_ModelInstanceInitialize" in server.log or server.ready(), "stubs", 120
        )
        assert server.interrupt() == 0
        wait_for(lambda: not server.leftovers(), "nothing to be left")


def test_a_full_disk_of_logs_ends_neither_api(repository: Path, tmp_path: Path) -> None:
    (openai,) = free_ports(1)
    words = ["bash", "-c", 'exec "$@" >/dev/full 2>&1', "bash", sys.executable]
    words += [
        "-m",
        "flashinfer_backend.serve",
        "--model-repository",
        str(repository),
        "--openai-port",
        str(openai),
    ]
    words += ["--http-port", "{http}", "--grpc-port", "{grpc}", "--metrics-port", "{metrics}", "--"]
    health = f"http://127.0.0.1:{openai}/health"
    with contextlib.closing(Server(repository, tmp_path, words)) as server:
        server.wait_ready()
        wait_for(lambda: answers_well(health), "the OpenAI API")
        (first,) = server.matching("bin/tritonserver")
        first.kill()
        first.wait(120)
        wait_for(lambda: not server.ready(), "serve to notice")
        server.wait_ready()
        assert server.answers("Once") and answers_well(health)
        assert server.interrupt() == 0
