# SPDX-License-Identifier: Apache-2.0
"""docker/nginx.conf, run as docs/security.md describes it."""

import contextlib
import gzip
import json
import os
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from asking import PROMPT
from openai_server import OpenAiServer
from running import ROOT, Server, fetch, wait_for

from ports import free_ports

pytestmark = pytest.mark.skipif(
    not (shutil.which("nginx") and shutil.which("openssl")), reason="needs nginx and openssl"
)
KEY = {"Authorization": "Bearer a-key"}
Ask = Callable[..., tuple[int, str]]


class Nginx(NamedTuple):
    """Its port, and whom its clients trust."""

    port: int
    trusted: ssl.SSLContext

    def ask(self, path: str, body: bytes | Iterable[bytes] | None = None, **headers: str) -> tuple[int, str]:
        """Status and text of an answer."""
        return fetch(f"https://127.0.0.1:{self.port}/{path}", body, headers, context=self.trusted)[::2]

    def asks_for_keys(self) -> bool:
        with contextlib.suppress(OSError):
            return self.ask("v1/models")[0] == 401
        return False


@contextlib.contextmanager
def in_front(folder: Path, triton_port: int, openai_port: int) -> Iterator[Nginx]:
    """It waits 2 s for slow senders, a fifth of the time."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        + ["-days", "2", "-keyout", str(key), "-out", str(certificate), *subject],
        check=True,
        capture_output=True,
    )
    (folder / "keys").write_text('"Bearer a-key" somebody;\n')
    (port,) = free_ports(1)
    text = (ROOT / "docker" / "nginx.conf").read_text()
    values = {
        "KEYS_FILE": folder / "keys",
        "TRITON_HTTP_PORT": triton_port,
        "OPENAI_PORT": openai_port,
        "LISTEN_PORT": f"127.0.0.1:{port}",
        "CERTIFICATE_KEY": key,
        "CERTIFICATE": certificate,
        "/run/nginx.pid": folder / "nginx.pid",
    }
    for name, value in values.items():
        text = text.replace(name, str(value))
    for name in ("client_body_timeout", "client_header_timeout"):
        assert f"{name} 10s;" in text
        text = text.replace(f"{name} 10s;", f"{name} 2s;")
    for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"):
        text = text.replace(
            "    access_log off;", f"    access_log off;\n    {kind}_temp_path {folder}/{kind};", 1
        )
    (folder / "nginx.conf").write_text(text)
    user = " user root;" if os.geteuid() == 0 else ""  # another could not enter the folder
    command = ["nginx", "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
    command += ["-g", f"daemon off;{user}"]
    process = subprocess.Popen(command)
    trusted = ssl.create_default_context(cafile=str(certificate))

    try:
        wait_for(Nginx(port, trusted).asks_for_keys, "nginx")
        yield Nginx(port, trusted)
    finally:
        process.terminate()
        process.wait(120)


@pytest.fixture(scope="module")
def nginx(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    port = int(server.url.rpartition(":")[2])
    with in_front(tmp_path_factory.mktemp("proxy"), port, *free_ports(1)) as started:
        yield started


@pytest.fixture
def proxy(nginx: Nginx) -> Ask:
    return nginx.ask


def generate(proxy: Ask, **headers: str) -> tuple[int, str]:
    body = json.dumps({"text_input": PROMPT, "max_tokens": 4}).encode()
    return proxy("v2/models/ensemble/generate", body, **headers)


def test_a_key_opens_the_ensemble(proxy: Ask, server: Server) -> None:
    status, text = generate(proxy, **KEY)
    assert status == 200 and json.loads(text)["text_output"].startswith(PROMPT)
    body = json.dumps({"text_input": PROMPT, "max_tokens": 8, "stream": True}).encode()
    status, text = proxy("v2/models/ensemble/generate_stream", body, **KEY)
    assert status == 200 and text.count("data: ") > 1
    assert proxy("v2/health/ready")[0] == 200 and proxy("v2/repository/index", b"{}", **KEY)[0] == 200
    # curl -d names a form, which the server would parse with its stack.
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    assert generate(proxy, **KEY, **form)[0] == 200


def test_without_a_key_or_beyond_the_ensemble_there_is_nothing(proxy: Ask) -> None:
    assert generate(proxy)[0] == 401
    assert generate(proxy, Authorization="Bearer another")[0] == 401
    for model in ("llm", "preprocessing", "postprocessing"):
        assert proxy(f"v2/models/{model}/generate", b"{}", **KEY)[0] == 404
    for path in ("v2", "v2/logging", "v2/trace/setting", "v2/systemsharedmemory/status", "metrics"):
        assert proxy(path, **KEY)[0] == 404
    assert proxy("v2/repository/models/llm/unload", b"{}", **KEY)[0] == 404


def test_a_key_opens_the_openai_api(api: OpenAiServer, tmp_path: Path) -> None:
    chat = {"model": "m", "messages": [{"role": "user", "content": "Once"}], "max_tokens": 4}
    with in_front(tmp_path, *free_ports(1), api.port) as nginx:
        listed = nginx.ask("v1/models", **KEY)
        assert listed[0] == 200
        chat["model"] = json.loads(listed[1])["data"][0]["id"]
        asked = json.dumps(chat).encode() + b" " * (1 << 20)  # more than the ensemble may be sent
        status, text = nginx.ask("v1/chat/completions", asked, **KEY)
        assert status == 200 and json.loads(text)["usage"]["completion_tokens"] == 4
        status, text = nginx.ask("v1/chat/completions", json.dumps(chat | {"stream": True}).encode(), **KEY)
        assert status == 200 and text.count("data: ") > 4 and text.endswith("data: [DONE]\n\n")
        status, text = nginx.ask("v1/messages", json.dumps(chat).encode(), **{"x-api-key": "a-key"})
        assert status == 200 and json.loads(text)["usage"]["output_tokens"] == 4
        for headers in (
            {},
            {"x-api-key": "another"},
            {"x-api-key": "a-key", "Authorization": "Bearer another"},
        ):
            assert nginx.ask("v1/chat/completions", asked, **headers)[0] == 401
        assert nginx.ask("v1/load_lora_adapter", b"{}", **KEY)[0] == 404


def test_large_and_deep_requests_are_refused_and_harm_nobody(proxy: Ask, server: Server) -> None:
    large = json.dumps({"text_input": "a" * (1 << 20), "max_tokens": 1}).encode()
    status, text = proxy("v2/models/ensemble/generate", large, **KEY)
    assert status == 413 and "larger than 1 MiB" in text
    depth = 500_000 - 100
    deep = b'{"max_tokens": 1, "text_input": ' + b"[" * depth + b"]" * depth + b"}"
    status, text = proxy("v2/models/ensemble/generate", deep, **KEY)
    assert status == 400 and "error" in text, (status, text)
    assert server.text(PROMPT, 4)


def test_compressed_bodies_and_floods_of_chunks_never_reach_the_server(
    proxy: Ask, nginx: Nginx, server: Server
) -> None:
    """tritonserver took gigabytes for them."""
    (tritonserver,) = server.matching("bin/tritonserver")
    before = tritonserver.memory_info().rss
    body = {"text_input": PROMPT + " " * (100 << 20), "max_tokens": 1}
    packed = gzip.compress(json.dumps(body).encode())
    for encoding in ("gzip", "deflate", "GZIP, identity"):
        status, text = generate_packed(proxy, packed, encoding)
        assert status == 415 and "without Content-Encoding" in text
    assert generate_packed(proxy, b'{"text_input": "a", "max_tokens": 1}', "identity")[0] == 200
    assert flood_with_chunks(*nginx, count=2 << 20).startswith("HTTP/1.1 413 ")
    chunks = (b"%c" % c for c in b'{"text_input": "a", "max_tokens": 1}')
    assert proxy("v2/models/ensemble/generate", chunks, **KEY)[0] == 200
    assert tritonserver.memory_info().rss - before < 64 << 20


def flood_with_chunks(port: int, trusted: ssl.SSLContext, count: int) -> str:
    """The first line of the answer to `count` chunks of one byte.

    They are sent in large pieces. One at a time, on a busy machine, they take longer than the 30 s that nginx
    goes on reading after its answer, and the answer is lost.
    """
    line = b"POST /v2/models/ensemble/generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    with (
        socket.create_connection(("127.0.0.1", port), timeout=120) as plain,
        trusted.wrap_socket(plain, server_hostname="127.0.0.1") as sock,
    ):
        sock.sendall(line + b"Authorization: Bearer a-key\r\n\r\n")
        for _ in range(count >> 12):
            sock.sendall(b"1\r\n \r\n" * (1 << 12))
        sock.sendall(b"0\r\n\r\n")
        return sock.makefile("rb").readline().decode()


def generate_packed(proxy: Ask, body: bytes, encoding: str) -> tuple[int, str]:
    return proxy("v2/models/ensemble/generate", body, **KEY, **{"Content-Encoding": encoding})


def test_slow_senders_wait_in_nginx_and_are_cut(proxy: Ask, nginx: Nginx, server: Server) -> None:
    port, trusted = nginx
    (tritonserver,) = server.matching("bin/tritonserver")
    before = tritonserver.num_fds()
    line = b"POST /v2/models/ensemble/generate HTTP/1.1\r\nHost: x\r\n"
    head = line + b"Authorization: Bearer a-key\r\nContent-Length: 100\r\n\r\n"
    with contextlib.ExitStack() as stack:
        slow = []
        for number in range(60):
            plain = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=120))
            slow.append(stack.enter_context(trusted.wrap_socket(plain, server_hostname="127.0.0.1")))
            slow[-1].sendall((b"", line, head, head + b"{")[number % 4])
        assert generate(proxy, **KEY)[0] == 200
        assert tritonserver.num_fds() < before + 10, "tritonserver has none of them"
        for sock in slow:
            with contextlib.suppress(ConnectionResetError, ssl.SSLEOFError):
                assert sock.recv(4096)[9:12] in (b"", b"408")
