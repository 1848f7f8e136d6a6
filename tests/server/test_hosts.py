# SPDX-License-Identifier: Apache-2.0
"""Where `serve` listens: every service answers at the address that --host names."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import tritonclient.grpc as grpcclient
from running import answers_well, wait_for

from ports import free_ports


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize("host, address", [("localhost", "127.0.0.1"), ("::1", "[::1]")])
def test_every_service_answers_at_the_host(host: str, address: str, tmp_path: Path) -> None:
    if host == "::1" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    (tmp_path / "repository").mkdir()  # of no models
    http, grpc, metrics = free_ports(3)
    arguments = ["--model-repository", str(tmp_path / "repository"), "--host", host]
    arguments += ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
    log = tmp_path / "log"
    with log.open("w") as output:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "flashinfer_backend.serve", *arguments], stdout=output, stderr=output
        )
    try:
        wait_for(lambda: "Ready." in log.read_text(), "the announcement")
        assert f"curl http://{address}:{http}/v2\n" in log.read_text()
        with grpcclient.InferenceServerClient(f"{address}:{grpc}") as client:
            assert client.is_server_ready()
        wait_for(lambda: answers_well(f"http://{address}:{metrics}/metrics"), "the metrics")
    finally:
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(120) == 0
