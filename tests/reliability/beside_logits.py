# SPDX-License-Identifier: Apache-2.0
"""Asks for large logits at one door, and writes down how long others waited at both meanwhile.

`python tests/reliability/beside_logits.py http openai grpc --requests 1`
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[n]) for n in (1, 2)] + [str(Path(__file__).parents[1] / "server")]

import numpy as np  # noqa: E402
import tritonclient.grpc as grpc  # noqa: E402
from attack import PATHS, STREAMED, body_for  # noqa: E402
from prompt_logits import waits  # noqa: E402
from running import BothDoors, both_running, build_repository  # noqa: E402
from triton_logits import ask, write_checkpoint  # noqa: E402
from watching import ports  # noqa: E402

from client.arguments import integer  # noqa: E402

TIMEOUT_S = 600
PAUSE_S = 0.02


class Others:
    """Clients at one door: one asks for two tokens again and again, each time over a new connection. At
    Triton's another one streams; the OpenAI API sends no chunk of random weights' tokens without text."""

    def __init__(self, door: str, port: int) -> None:
        self.short: list[float] = []
        self.chunks: list[float] = []
        self._door, self._port, self._stop = door, port, threading.Event()
        clients = [self._ask, self._stream] if door == "triton" else [self._ask]
        self._threads = [threading.Thread(target=run, daemon=True) for run in clients]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _post(self, path: str, max_tokens: int, stream: bool) -> tuple[http.client.HTTPConnection, Any]:
        body = {"text_input": "Once upon a time", "max_tokens": max_tokens, "stream": stream}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
        connection.request(
            "POST",
            path,
            body_for(self._door, json.dumps(body).encode()),
            {"Content-Type": "application/json"},
        )
        return connection, connection.getresponse()

    def _ask(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            connection, answer = self._post(PATHS[self._door], 2, False)
            assert answer.status == 200, answer.read()
            answer.read()
            connection.close()
            self.short.append(time.monotonic() - began)
            time.sleep(PAUSE_S)

    def _stream(self) -> None:
        while not self._stop.is_set():
            connection, answer = self._post(STREAMED[self._door], 500, True)
            last = time.monotonic()
            while line := answer.readline():
                if line.startswith(b"data"):
                    self.chunks.append(time.monotonic() - last)
                    last = time.monotonic()
                if self._stop.is_set():
                    break
            connection.close()


def over_http(port: int, path: str, body: dict[str, Any]) -> str:
    """What came of a request; the answer is read and forgotten."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    answer, size = connection.getresponse(), 0
    while part := answer.read(1 << 20):
        size += len(part)
    return f"{answer.status}, {size / 1e6:.1f} MB"


def over_grpc(server: BothDoors, body: dict[str, Any]) -> str:
    """The same of the ensemble's over gRPC."""
    kinds, inputs = {str: "BYTES", int: "INT32", bool: "BOOL"}, []
    for name, value in body.items():
        kind = kinds[type(value)]
        array = np.array([[value]], {"BYTES": object, "INT32": np.int32, "BOOL": bool}[kind])
        inputs.append(grpc.InferInput(name, [1, 1], kind).set_data_from_numpy(array))
    ended, sizes = threading.Event(), list[int]()

    def take(result: grpc.InferResult | None, error: Exception | None) -> None:
        assert result is not None, error
        sizes.append(sum(map(len, result.get_response().raw_output_contents)))
        if result.get_response().parameters["triton_final_response"].bool_param:
            ended.set()

    with grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(take)
        client.async_stream_infer("ensemble", inputs, enable_empty_final_response=True)
        assert ended.wait(TIMEOUT_S), "no answer"
    return f"{sum(sizes) / 1e6:.1f} MB"


def askers(server: BothDoors, tokens: int) -> dict[str, Callable[[], str]]:
    """By their names on the command line."""
    prompt = "Once upon a time " * (tokens // 4)
    found = ports(server)
    return {
        "http": lambda: over_http(
            found["triton"],
            PATHS["triton"],
            {"text_input": prompt, "max_tokens": 1, "return_context_logits": True},
        ),
        "openai": lambda: over_http(
            found["openai"],
            PATHS["openai"],
            {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 20},
        ),
        "grpc": lambda: over_grpc(
            server, {"text_input": prompt, "max_tokens": 1, "return_context_logits": True}
        ),
        "llm-http": lambda: over_http(
            found["triton"],
            "/v2/models/llm/generate",
            {
                "input_ids": [5 + n % 2000 for n in range(tokens)],
                "input_lengths": tokens,
                "request_output_len": 1,
                "return_context_logits": True,
            },
        ),
        "llm": lambda: ask(
            server, tokens, {"return_context_logits": np.array([[True]])}, ["output_ids", "context_logits"]
        ),
    }


def run(server: BothDoors, kind: str, options: argparse.Namespace) -> None:
    asker = askers(server, options.tokens)[kind]
    others = {door: Others(door, port) for door, port in ports(server).items()}
    time.sleep(2.0)
    for other in others.values():
        other.short.clear()
        other.chunks.clear()
    began = time.monotonic()
    with ThreadPoolExecutor(options.requests) as pool:
        found = [each.result() for each in [pool.submit(asker) for _ in range(options.requests)]]
    print(f"{options.requests} x {kind}: {time.monotonic() - began:.1f} s; {found[0]}")
    for other in others.values():
        other.stop()
    for door, other in others.items():
        print(f"  {door}: two tokens {len(other.short)}: {waits(other.short)}")
        if other.chunks:
            print(f"  {door}: between chunks of a stream: {waits(other.chunks)}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("kinds", nargs="+", choices=["http", "llm-http", "openai", "grpc", "llm"])
    parser.add_argument("--requests", type=integer(1), default=1)
    parser.add_argument("--tokens", type=integer(1), default=480)
    parser.add_argument("--vocabulary", type=integer(1), default=128256)
    parser.add_argument("--set", nargs="+", default=[], metavar="KNOB=VALUE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        checkpoint = write_checkpoint(Path(name, "model"), options.vocabulary)
        knobs = [f"model_dir={checkpoint}", "load_format=dummy", *options.set]
        with both_running(build_repository(Path(name), *knobs), Path(name)) as server:
            for kind in options.kinds:
                run(server, kind, options)
            print(*(line for line in server.log.splitlines() if line.startswith("serve:")), sep="\n")


if __name__ == "__main__":
    main()
