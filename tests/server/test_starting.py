# SPDX-License-Identifier: Apache-2.0
"""Where `serve` listens, and servers that cannot start or are stopped meanwhile."""

import contextlib
import signal
import socket
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


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def test_a_server_that_dies_is_started_again_at_its_host_and_given_up_in_the_end(
    repository: Path, tmp_path: Path
) -> None:
    """First while it starts: tritonserver aborts where a model's process has no turn for a second while it is
    loaded."""
    host, address = ("::1", "[::1]") if has_ipv6() else ("localhost", "127.0.0.1")
    options = ["--restarts", "1", "--host", host]
    with contextlib.closing(Server(repository, tmp_path, options=options)) as server:
        http, grpc = (url.rpartition(":")[2] for url in (server.url, server.grpc))
        server.url, server.grpc = f"http://{address}:{http}", f"{address}:{grpc}"
        (first,) = wait_for(lambda: server.matching("bin/tritonserver"), "tritonserver")
        first.send_signal(signal.SIGABRT)
        server.wait_ready()
        assert "serve: tritonserver ended (signal 6); starting the server again" in server.log
        assert server.answers("Once")
        assert f"curl -N {server.url}/v2/models/ensemble/" in server.log
        with grpcclient.InferenceServerClient(server.grpc) as client:
            assert client.is_server_ready()
        wait_for(lambda: answers_well(f"http://{address}:{server.metrics_port}/metrics"), "the metrics")
        server.matching("bin/tritonserver")[0].kill()
        assert server.launcher.wait(120) == 1
        assert "started again 1 times in a row, giving up" in server.log
        wait_for(lambda: not server.leftovers(), "nothing to be left")


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
