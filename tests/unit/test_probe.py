# SPDX-License-Identifier: Apache-2.0
"""The liveness probe and the maintenance server, against servers that answer in every way."""

import contextlib
import ipaddress
import json
import re
import resource
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from answering import answering, response
from flashinfer_backend.launch.probe import problem
from flashinfer_backend.transport.maintenance_server import RESTARTING, maintenance_server
from waiting import wait_for

LOCAL = ipaddress.ip_address("127.0.0.1")


PLACES = ("/v2/health/live", "/v2/health/ready", "/v2/models/ensemble/generate")
TABLE: dict[str, tuple[int, str] | None] = {}  # status and text of each place; None: no answer


@pytest.fixture
def url() -> Iterator[str]:
    def answer(path: str, _: bytes) -> bytes:
        if (found := TABLE[path]) is None:
            time.sleep(3)
            return b""
        return response(*found)

    with answering(answer) as url:
        yield url


@pytest.mark.parametrize(
    ("live", "ready", "generate", "expected"),
    [
        ((200, ""), (200, ""), (200, '{"text_output": "a"}'), ""),
        ((200, ""), (503, ""), None, ""),
        ((200, ""), (200, ""), (500, '{"error": "Maximum queue size of 4 has been reached"}'), ""),
        ((200, ""), (200, ""), (500, '{"error": "Stub process is not healthy"}'),
         "not generate .500. .*healthy"),
        ((200, ""), (200, ""), None, "does not generate .no answer"),
        (None, (200, ""), (200, "{}"), "live .no answer"),
        ((500, ""), (200, ""), (200, "{}"), "live .500"),
    ],
)  # fmt: skip
def test_a_broken_server_fails_the_probe(url, live, ready, generate, expected) -> None:
    TABLE.update(zip(PLACES, (live, ready, generate), strict=True))
    found = problem(url, "ensemble", 0.5)
    assert bool(found) == bool(expected) and re.search(expected, found), found


def test_of_ensembles_with_the_same_steps_one_is_asked_and_no_other_model(url) -> None:
    steps = {"ensemble_scheduling": {"step": [{"model_name": "llm"}]}}
    configs = {"llm": {"backend": "python"}, "ensemble": steps, "tensorrt_llm_bls": steps}
    TABLE.update(dict.fromkeys((*PLACES, "/v2/models/tensorrt_llm_bls/generate"), (200, "{}")))
    TABLE["/v2/repository/index"] = 200, json.dumps([{"name": name} for name in configs])
    TABLE.update({f"/v2/models/{name}/config": (200, json.dumps(config)) for name, config in configs.items()})
    assert problem(url, None, 5) == ""
    TABLE["/v2/models/tensorrt_llm_bls/generate"] = 500, ""
    assert "tensorrt_llm_bls does not generate (500)" in problem(url, None, 5)
    TABLE["/v2/models/llm/config"] = 500, "{}"
    assert "names no ensemble" in problem(url, None, 5)


def test_a_proxy_of_the_environment_is_not_asked(url, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{unused.getsockname()[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        TABLE.update(dict.fromkeys(PLACES, (200, "")))
        assert problem(url, "ensemble", 5) == ""


def test_nobody_listening_fails_the_probe() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert "no answer" in problem(f"http://127.0.0.1:{unused.getsockname()[1]}", "ensemble", 0.5)


def listen(port: int = 0) -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind(("127.0.0.1", port))
    made.listen(64)
    return made


def outcomes(port: int) -> set[str]:
    """What twenty new connections get: an answer of the maintenance server, or none."""
    found = set()
    for _ in range(20):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=0.2)
        except urllib.error.HTTPError as error:
            assert error.code == 503 and json.loads(error.read()) == {"error": RESTARTING}
            told = [error.headers[name] for name in ("Retry-After", "Content-Type", "Connection")]
            assert told == ["1", "application/json", "close"]
            found.add("maintenance")
        except OSError:
            found.add("other")
            break
    return found


def test_the_maintenance_server_has_the_family_of_its_address() -> None:
    with socket.socket(socket.AF_INET6) as unused:
        unused.bind(("::1", 0))
        port = unused.getsockname()[1]
    with (
        maintenance_server(ipaddress.ip_address("::1"), port),
        urllib.request.urlopen(f"http://[::1]:{port}/v2/health/live", timeout=120) as answer,
    ):
        assert answer.status == 200


def test_the_maintenance_server_answers_until_the_next_server_listens() -> None:
    old = listen()
    port = old.getsockname()[1]
    with maintenance_server(LOCAL, port):
        assert outcomes(port) == {"maintenance"}  # although the old server still listens
        old.close()
        assert outcomes(port) == {"maintenance"}
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/live", timeout=120) as answer:
            assert answer.status == 200
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(
                f"http://127.0.0.1:{port}/v2/models/ensemble/generate", b"{}" * 9, timeout=5
            )
        new = listen(port)
        assert outcomes(port) == {"other"}
    assert outcomes(port) == {"other"}
    new.close()


def test_the_maintenance_server_reads_no_more_than_it_should_and_no_longer() -> None:
    with listen() as unused:
        port = unused.getsockname()[1]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with maintenance_server(LOCAL, port):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
            sock.sendall(b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n")
            with contextlib.suppress(OSError):  # it has been answered
                for _ in range(100):
                    sock.sendall(b"x" * (1 << 20))
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10
        with contextlib.ExitStack() as opened:
            slow_clients = []
            for begun in (b"GET / HTTP/1.1\r\n", b"POST / HTTP/1.1\r\ncontent-length: 999999\r\n\r\n"):
                sock = opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
                sock.sendall(begun)
                sock.settimeout(0.2)
                slow_clients.append(sock)
            for sock in slow_clients:
                wait_for(lambda sock=sock: _answer_to_a_slow_client(sock), timeout_s=30)
        slow = socket.create_connection(("127.0.0.1", port), timeout=60)
        slow.sendall(b"GET / HTTP/1.1\r\n")
        assert outcomes(port) == {"maintenance"}  # later ones: that one has been taken
    with slow:  # whose request is not waited for
        slow.settimeout(0.2)
        wait_for(lambda: _answer_to_a_slow_client(slow), timeout_s=30)


def test_connections_that_wait_for_the_maintenance_server_at_its_end_are_answered() -> None:
    with listen() as unused:
        port = unused.getsockname()[1]
    request, clients = b"GET /v2/health/ready HTTP/1.1\r\n\r\n", list[socket.socket]()
    with contextlib.ExitStack() as opened:
        with maintenance_server(LOCAL, port):
            for _ in range(300):  # faster than it makes threads for them
                clients.append(opened.enter_context(socket.create_connection(("127.0.0.1", port), 60)))
                clients[-1].sendall(request)
        assert [sock.recv(12) for sock in clients] == [b"HTTP/1.0 503"] * 300


def _answer_to_a_slow_client(sock: socket.socket) -> bytes:
    sock.sendall(b"a")
    with contextlib.suppress(TimeoutError):
        return sock.recv(4096)
    return b""
