# SPDX-License-Identifier: Apache-2.0
"""Where `serve` listens, and servers that cannot start or are stopped meanwhile."""

import contextlib
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import tritonclient.grpc as grpcclient
from running import Server, answers_well, wait_for

from flashinfer_backend.launch import preflight
from ports import free_ports


def test_stubs_that_cannot_start_end_the_server(repository: Path, tmp_path: Path) -> None:
    """tritonserver itself waits for them for ever."""
    backends = tmp_path / "backends"
    found = preflight.find_server(backends)
    if found.backends is None:
        pytest.skip("NVIDIA's image has one stub, which is not ours to replace")
    found.stub.unlink()
    found.stub.write_text("#!/bin/bash\necho the codec is missing >&2; exit 1\n")
    found.stub.chmod(0o755)
    options = ["--backends", str(backends)]
    with contextlib.closing(Server(repository, tmp_path, options=options)) as server:
        assert server.launcher.wait(120) != 0
        last = server.log.splitlines()[-1]
        assert last.startswith("serve: the server cannot start: ") and "the codec is missing" in last
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
    words = ["bash", "-c", 'exec "$@" >/dev/full 2>&1', "bash", sys.executable, "-m"]
    words += ["flashinfer_backend.serve", "--model-repository", str(repository)]
    words += ["--openai-port", str(openai), "--http-port", "{http}", "--grpc-port", "{grpc}"]
    words += ["--metrics-port", "{metrics}", "--"]
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


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def test_every_service_answers_at_the_host(repository: Path, tmp_path: Path) -> None:
    host, address = ("::1", "[::1]") if has_ipv6() else ("localhost", "127.0.0.1")
    http, grpc, metrics = free_ports(3)
    arguments = ["--model-repository", str(repository), "--host", host]
    arguments += ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
    log = tmp_path / "log"
    with log.open("w") as output:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "flashinfer_backend.serve", *arguments], stdout=output, stderr=output
        )
    try:
        wait_for(lambda: "Ready." in log.read_text(), "the announcement", 120)
        assert f"curl -N http://{address}:{http}/v2/models/ensemble/" in log.read_text()
        with grpcclient.InferenceServerClient(f"{address}:{grpc}") as client:
            assert client.is_server_ready()
        wait_for(lambda: answers_well(f"http://{address}:{metrics}/metrics"), "the metrics")
    finally:
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(120) == 0
