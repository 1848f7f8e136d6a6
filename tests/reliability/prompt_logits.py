# SPDX-License-Identifier: Apache-2.0
"""Asks the OpenAI API for the log probabilities of many prompts, and writes down what that took of its
process and of the engine, and how long others waited meanwhile.

`python tests/reliability/prompt_logits.py --prompts 64 --streams`, with a checkpoint of another vocabulary:
`--model DIR --set load_format=dummy`.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[n]) for n in (1, 2)] + [str(Path(__file__).parents[1] / "server")]

from openai_server import OpenAiServer, openai_running  # noqa: E402

from client.arguments import integer  # noqa: E402

TIMEOUT_S = 600
PING_S = 0.002


def memory(pid: int, name: str) -> int:
    """MiB of a process: VmRSS now, VmHWM the most since `forget`."""
    found = re.search(rf"{name}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) >> 10


def forget(pid: int) -> None:
    """Has VmHWM begin anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


class Others:
    """A client that streams and one that asks for /health all the time; how long each waited."""

    def __init__(self, server: OpenAiServer) -> None:
        self._server, self._stop = server, threading.Event()
        self.chunks: list[float] = []
        self.health: list[float] = []

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        threads = [threading.Thread(target=run) for run in (self._stream, self._ask)]
        for thread in threads:
            thread.start()
        time.sleep(2.0)
        self.chunks.clear()
        self.health.clear()
        yield
        self._stop.set()
        for thread in threads:
            thread.join()

    def _stream(self) -> None:
        body = {"prompt": "The king", "max_tokens": 1500, "stream": True, "ignore_eos": True}
        while not self._stop.is_set():
            with self._server.opened("/v1/completions", body) as answer:
                last = time.monotonic()
                while not self._stop.is_set() and (line := answer.readline()):
                    if line.startswith(b"data"):
                        self.chunks.append(time.monotonic() - last)
                        last = time.monotonic()

    def _ask(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=TIMEOUT_S)
        while not self._stop.is_set():
            began = time.monotonic()
            connection.request("GET", "/health")
            connection.getresponse().read()
            self.health.append(time.monotonic() - began)
            time.sleep(PING_S)


def waits(times: list[float]) -> str:
    ordered = sorted(times) or [0.0]
    parts = {
        "median": ordered[len(ordered) // 2],
        "p99": ordered[len(ordered) * 99 // 100],
        "most": ordered[-1],
    }
    return ", ".join(f"{name} {value * 1e3:.1f}" for name, value in parts.items()) + " ms"


def ask(server: OpenAiServer, prompts: int, tokens: int) -> None:
    """One request, and what it took."""
    processes = {"API": server.workers()[0].pid, "engine": server.engine().pid}
    ids = [[5 + (7 * n + 13 * i) % 2000 for i in range(tokens)] for n in range(prompts)]
    body: dict[str, Any] = {"prompt": ids, "max_tokens": 1, "echo": True, "logprobs": 20, "temperature": 0.0}
    before = {name: memory(pid, "VmRSS") for name, pid in processes.items()}
    for pid in processes.values():
        forget(pid)
    began = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT_S)
    connection.request("POST", "/v1/completions", json.dumps(body))
    answer = connection.getresponse()
    data = answer.read()
    print(
        f"{prompts} x {tokens}: {answer.status}, {len(data) / 1e6:.1f} MB, {time.monotonic() - began:.1f} s"
    )
    for name, pid in processes.items():
        most, now = memory(pid, "VmHWM") - before[name], memory(pid, "VmRSS") - before[name]
        print(f"{name}: {most} MiB more at most, {now} afterwards")


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--prompts", type=integer(1), default=8)
    parser.add_argument("--tokens", type=integer(1), default=480)
    parser.add_argument("--streams", action="store_true", help="with other clients beside it")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KNOB=VALUE")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        openai_running(options.model, Path(folder), *options.set) as server,
    ):
        ask(server, 1, 4)
        others = Others(server)
        with others.beside() if options.streams else contextlib.nullcontext():
            ask(server, options.prompts, options.tokens)
            chunks, health = list(others.chunks), list(others.health)
        if options.streams:
            print(f"between two chunks of a stream: {waits(chunks)}")
            print(f"/health: {waits(health)}")


if __name__ == "__main__":
    main()
