# SPDX-License-Identifier: Apache-2.0
"""Two servers behind docker/haproxy.cfg: one is drained, one is killed, under load."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import subprocess
import threading
import time
import urllib.error
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from asking import PROMPT
from running import ROOT, Server, build_repository, fetch, wait_for

from ports import free_ports

pytestmark = pytest.mark.skipif(not shutil.which("haproxy"), reason="needs haproxy")
CLIENTS = 4


class Balanced:
    """Two servers, and the URL of what stands before them."""

    def __init__(self, folder: Path) -> None:
        repository = build_repository(folder)
        self.servers = []
        for name in ("a", "b"):
            (folder / name).mkdir()
            self.servers.append(Server(repository, folder / name, options=["--drain-seconds", "20"]))
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        addresses = [server.url.removeprefix("http://") for server in self.servers]
        names = {"LISTEN": f"127.0.0.1:{port}", "SERVER_A": addresses[0], "SERVER_B": addresses[1]}
        env = {**os.environ, **names}
        self.proxy = subprocess.Popen(["haproxy", "-db", "-f", str(ROOT / "docker" / "haproxy.cfg")], env=env)

    def post(self, body: dict[str, Any], verb: str = "generate") -> tuple[int, str]:
        return fetch(f"{self.url}/v2/models/ensemble/{verb}", json.dumps(body).encode())[::2]

    def up(self) -> bool:
        try:
            return self.post({"text_input": PROMPT, "max_tokens": 1})[0] == 200
        except OSError:
            return False

    def close(self) -> None:
        self.proxy.terminate()
        self.proxy.wait(120)
        for server in self.servers:
            server.close()


@pytest.fixture(scope="module")
def balanced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Balanced]:
    with contextlib.closing(Balanced(tmp_path_factory.mktemp("balanced"))) as made:
        for server in made.servers:
            server.wait_ready()
        wait_for(made.up, "the proxy")
        yield made


class Load:
    """Clients that ask one thing after the other until the end of the block; what they got, by outcome."""

    def __init__(self, balanced: Balanced, expected: str) -> None:
        self.outcomes: Counter[str] = Counter()
        self._balanced, self._expected, self._stop = balanced, expected, threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(CLIENTS)]

    def _ask(self) -> None:
        body = {"text_input": PROMPT, "max_tokens": 40, "end_id": 1048576}
        while not self._stop.is_set():
            try:
                status, text = self._balanced.post(body)
            except (OSError, ValueError) as error:
                self.outcomes[f"lost: {error}"] += 1
                continue
            whole = status == 200 and json.loads(text)["text_output"] == self._expected
            self.outcomes["whole" if whole else f"{status} {text[:200]}"] += 1
            self._stop.wait(0.25)  # or four clients would take whole cores

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def test_compressed_bodies_and_bodies_without_a_length_never_reach_a_server(balanced: Balanced) -> None:
    """tritonserver took gigabytes for them."""
    servers = [process for server in balanced.servers for process in server.matching("bin/tritonserver")]
    before = [server.memory_info().rss for server in servers]
    text = json.dumps({"text_input": "a" + " " * (100 << 20), "max_tokens": 1}).encode()
    compressed = gzip.compress(text, 1)
    for verb in ("infer", "generate"):
        for body, headers, expected in (
            (compressed, {"Content-Encoding": "gzip"}, 415),
            ((b" " for _ in range(10_000)), {}, 411),
            (b'{"text_input": "a", "max_tokens": 1}', {"Content-Encoding": "identity"}, None),
        ):
            url = f"{balanced.url}/v2/models/ensemble/{verb}"
            try:
                status, _, _ = fetch(url, body, {"Content-Type": "application/json", **headers})
            except urllib.error.URLError:  # it was refused before all of it was sent
                status = expected or 0
            assert status == expected if expected else status not in (0, 411, 415), (verb, status)
    for server, was in zip(servers, before, strict=True):
        assert server.memory_info().rss - was < 64 << 20


def used(server: Server) -> bool:
    return server.engine_status().requests_active > 0


def test_a_server_is_killed_and_another_drained_without_a_lost_answer(balanced: Balanced) -> None:
    first, second = balanced.servers
    body = {"text_input": PROMPT, "max_tokens": 40, "end_id": 1048576}
    status, text = balanced.post(body)
    assert status == 200
    with Load(balanced, json.loads(text)["text_output"]) as load:
        wait_for(lambda: used(first) and used(second), "load on both")
        second.matching("bin/tritonserver")[0].kill()
        wait_for(lambda: "serve: ready again" in second.log, "the killed one", 120)
        wait_for(lambda: used(second), "load on it again")

        ask = {**body, "max_tokens": 400, "stream": True}
        with ThreadPoolExecutor(3) as pool:
            streams = [pool.submit(balanced.post, ask, "generate_stream") for _ in range(3)]
            time.sleep(0.3)  # they have begun, on both
            first.launcher.terminate()  # its streams have their time, new requests go to the other
            first.launcher.wait(120)
        before = load.outcomes["whole"]
        wait_for(lambda: load.outcomes["whole"] > before + 20, "answers of the other")
    for status, text in (stream.result() for stream in streams):
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
        assert status == 200 and events[-1].get("finish_reason") == "length", text[-300:]
    assert set(load.outcomes) == {"whole"}, load.outcomes
