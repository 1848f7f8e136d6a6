# SPDX-License-Identifier: Apache-2.0
"""perf_configs/locustfile.py, run by Locust against a real server."""

import json
import re
import subprocess
import sys
from typing import Any

import pytest
from running import ROOT, EngineWatch, Server, wait_for

# tritonclient pins a version of geventhttpclient that Locust's later releases are too new for.
UV = [sys.executable, "-m", "uv", "tool", "run", "--python", sys.executable, "--no-build", "locust==2.47.0"]
WORDS = [*UV, "-f", "perf_configs/locustfile.py", "--headless", "--json", "--users", "4"]
UNREACHABLE = re.compile(
    r"error sending request|Failed to fetch|Request failed|dns error|timed out", re.IGNORECASE
)
SHORT = ["--spawn-rate", "4", "--prompt-words", "4:16", "--output-len", "8:24", "--run-time", "60s"]


def stress(server: Server, *more: str) -> tuple[int, dict[tuple[str, str], dict[str, Any]], str]:
    """Locust's exit status, its statistics by method and name, and what it wrote."""
    command = [*WORDS, *SHORT, "--host", server.url, *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    if not done.stdout.strip() and UNREACHABLE.search(done.stderr):
        pytest.skip(f"Locust cannot be had: {done.stderr.splitlines()[0]}")
    assert done.stdout.strip(), done.stderr
    return done.returncode, {(e["method"], e["name"]): e for e in json.loads(done.stdout)}, done.stderr


def test_users_stream_and_some_leave(server: Server, watch: EngineWatch) -> None:
    before = watch.status().cancellations
    status, found, said = stress(server, "--requests", "8", "--leave", "0.4", "--output-len", "250:300")
    assert status == 0, said
    path = "/v2/models/ensemble/generate_stream"
    assert found.keys() == {(m, n) for m in ("POST", "TTFT") for n in (path, f"{path} (left)")}
    assert sum(e["num_requests"] for e in found.values()) == 16
    assert not any(e["num_failures"] for e in found.values())
    for name in (path, f"{path} (left)"):
        # A stream takes longer than its first chunk: what is timed is the whole of it.
        assert found["POST", name]["total_response_time"] > found["TTFT", name]["total_response_time"]
    left = found["POST", f"{path} (left)"]["num_requests"]
    wait_for(lambda: watch.status().cancellations == before + left, "the cancellations")


def test_failures_are_counted(server: Server) -> None:
    status, found, _ = stress(server, "--requests", "2", "--backend", "openai", "--model", "m")
    (only,) = found.values()
    assert status == 1 and only["num_failures"] == 2
