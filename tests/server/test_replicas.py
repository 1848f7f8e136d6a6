# SPDX-License-Identifier: Apache-2.0
"""Two engines behind one llm model and behind the OpenAI API."""

import contextlib
import http.client
import json
import os
import queue
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import tritonclient.grpc as grpcclient
from asking import inputs, stop_request
from contract import encode, flag, ids_request
from metering import Shown, metrics_port_open, shown, shown_once
from prometheus_client.parser import text_string_to_metric_families
from running import TIMEOUT_S, BothApis, Server, both_running, build_repository, wait_for

from flashinfer_backend.transport.records import read_engine

WORDS = ["king", "queen", "bird", "river", "stone", "house", "bread", "winter", "daughter", "forest"]
BLOCK = 16


def context(seed: int, tokens: int = 800) -> str:
    """A text of so many tokens, or a few more, that shares no block with another one."""
    chosen = random.Random(seed)
    text = f"{seed}:"
    while len(encode(text)) < tokens:
        text += " " + " ".join(chosen.choices(WORDS, k=20))
    return text


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BothApis]:
    folder = tmp_path_factory.mktemp("replicas")
    with both_running(build_repository(folder, "replicas=2"), folder) as server:
        wait_for(lambda: metrics_port_open(server), "the metrics port")
        yield server


def by_engine(now: Shown, name: str, **labels: str) -> list[float]:
    return [now.get(name, engine=str(number), **labels) for number in range(2)]


def active(now: Shown) -> list[float]:
    return by_engine(now, "nv_trt_llm_request_metrics", request_type="active")


def idle(server: Server) -> Shown:
    """The metrics of reports that came when nothing was open any more."""
    asked = time.time()
    return shown_once(
        server,
        lambda s: (
            min(by_engine(s, "nv_trt_llm_general_metrics", general_type="timestamp")) > asked + 0.2
            and active(s) == [0, 0]
        ),
        "idle engines",
    )


def reused(server: Server, prompt: str) -> int:
    """Blocks of a prompt that its engine had cached."""
    status, answer = server.post({"text_input": prompt, "max_tokens": 2, "return_perf_metrics": True})
    assert status == 200, answer
    return int(answer["kv_cache_reused_blocks"])


def pids(server: Server) -> list[int]:
    """Of the engines, as they were started last."""
    (own,) = server.runs.glob("flashinfer-backend-*/*-llm")
    records = [read_engine(own), read_engine(own.with_name(f"{own.name}@1"))]
    return [record.pid for record in records if record is not None]


class Stream:
    """A stream of the ensemble, as long as it gets, read by a thread of its own."""

    def __init__(self, server: Server, prompt: str) -> None:
        self.events: list[dict[str, Any]] = []
        self.begun = threading.Event()
        body = {"text_input": prompt, "max_tokens": 1900, "stream": True, "end_id": 1048576}
        host = server.url.removeprefix("http://")
        self._connection = http.client.HTTPConnection(host, timeout=TIMEOUT_S)
        self._connection.request("POST", "/v2/models/ensemble/generate_stream", json.dumps(body))
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            for line in self._connection.getresponse():
                if line.startswith(b"data: "):
                    self.events.append(json.loads(line[6:]))
                    self.begun.set()

    @property
    def error(self) -> str:
        return str(self.events[-1].get("error", ""))

    def leave(self) -> None:
        if self._connection.sock is not None:
            self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(TIMEOUT_S)


def test_a_prefix_stays_with_its_engine_and_prompts_without_one_spread(two: BothApis) -> None:
    before = idle(two)
    texts = [context(seed) for seed in range(4)]
    for text in texts:
        assert reused(two, text) == 0
        for question in range(4):  # through either stub, and to the engine which has it
            assert reused(two, f"{text} Question {question}") >= len(encode(text)) // BLOCK - 1
    after = idle(two)

    def moved(name: str) -> list[float]:
        family = f"flashinfer_backend_{name}_total"
        return [
            now - then for then, now in zip(by_engine(before, family), by_engine(after, family), strict=True)
        ]

    # Prompts that no engine knows take turns: each engine had at least one of the four.
    tokens, hits = moved("prompt_tokens"), moved("prefix_cache_hit_tokens")
    assert all(0.7 * each < hit < each for each, hit in zip(tokens, hits, strict=True)), (tokens, hits)


def test_both_apis_know_what_an_engine_has(two: BothApis) -> None:
    text = context(10)
    assert reused(two, text) == 0
    for _ in range(3):
        status, body = two.openai("/v1/completions", {"model": "bundled", "prompt": text, "max_tokens": 2})
        usage = json.loads(body)["usage"]
        assert status == 200
        assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 2 * BLOCK
    shared = context(11)
    assert two.openai("/v1/completions", {"model": "bundled", "prompt": shared, "max_tokens": 2})[0] == 200
    assert reused(two, shared) >= len(encode(shared)) // BLOCK - 1


def test_metrics_have_the_engine_as_a_label(two: BothApis) -> None:
    two.text("Once upon a time", 2)
    now = idle(two)
    assert by_engine(now, "flashinfer_backend_engine_up") == [1, 1]
    assert by_engine(now, "nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="max") == [2048, 2048]
    for name, labels in now.series:
        if name.startswith("nv_trt_llm_"):
            assert dict(labels)["engine"] in ("0", "1"), name
    assert now.get("flashinfer_backend_e2e_latency_seconds_count") > 0  # of the model as a whole
    status, body = two.openai("/metrics")
    for number in range(2):
        assert status == 200 and f'engine_up{{engine="{number}"}} 1.0' in body
        assert f'engine_blocks_total{{engine="{number}"}} 2048.0' in body


def test_a_request_router_reads_sums_over_the_engines(two: BothApis) -> None:
    """As llm-d's router does (engine type triton-tensorrt-llm): one series of each."""

    def read(name: str, label: str, value: str) -> float:
        families = text_string_to_metric_families(two.openai("/metrics")[1])
        samples = [sample for family in families if family.name == name for sample in family.samples]
        found = [sample.value for sample in samples if sample.labels.get(label) == value]
        assert len(found) == 1, (name, value, found)
        return found[0]

    def blocks(value: str) -> float:
        return read("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", value)

    assert blocks("tokens_per") == BLOCK and blocks("max") == 2 * 32768 // BLOCK
    streams = [Stream(two, f"{word} {word}") for word in WORDS[:6]]
    try:
        wait_for(
            lambda: read("nv_trt_llm_request_metrics", "request_type", "scheduled") == len(streams),
            "six sequences in two engines",
        )
        assert read("nv_trt_llm_request_metrics", "request_type", "waiting") == 0
        assert 0 < blocks("fraction") < 1
    finally:
        for stream in streams:
            stream.leave()


def test_a_stop_request_reaches_the_engine_of_its_request(two: BothApis) -> None:
    idle(two)
    got: queue.Queue[tuple[str, str]] = queue.Queue()

    def receive(result: Any, error: Any) -> None:
        assert error is None, error
        response = result.get_response()
        names = [output.name for output in response.outputs]
        reason = result.as_numpy("finish_reason").item().decode() if "finish_reason" in names else "token"
        got.put((response.id, reason if names else "empty"))

    with grpcclient.InferenceServerClient(two.grpc) as client:
        client.start_stream(receive)
        for number in range(2):
            long = inputs(ids_request(encode(f"Tale {number}"), 1900, streaming=flag(True)))
            client.async_stream_infer("llm", long, request_id=str(number))
            wait_for(lambda n=number: sum(active(shown(two))) == n + 1, "the stream in a report")
        assert active(shown(two)) == [1, 1]
        for number in range(2):
            client.async_stream_infer("llm", inputs(stop_request()), request_id=str(number))
            while (said := got.get(timeout=TIMEOUT_S)) != (str(number), "cancelled"):
                assert said[1] in ("token", "empty"), said
    wait_for(lambda: active(shown(two)) == [0, 0], "idle engines")


def test_sequences_of_one_prompt_share_its_blocks(two: BothApis) -> None:
    body = {"model": "bundled", "prompt": context(20), "max_tokens": 2, "n": 6}
    hits = "flashinfer_backend_prefix_cache_hit_tokens_total"
    before = by_engine(idle(two), hits)
    status, answer = two.openai("/v1/completions", body)
    assert status == 200 and len(json.loads(answer)["choices"]) == 6
    now = by_engine(idle(two), hits)
    gained = [late - early for early, late in zip(before, now, strict=True)]
    assert sorted(gained)[0] == 0 and sorted(gained)[1] >= 5 * 768


def test_a_killed_engine_harms_its_own_requests_only_and_comes_back(two: BothApis) -> None:
    idle(two)
    tritonserver = [process.pid for process in two.matching("bin/tritonserver ")]
    streams = []
    for number in range(2):
        streams.append(Stream(two, f"Story {number}"))
        assert streams[-1].begun.wait(TIMEOUT_S)
        wait_for(lambda n=number: sum(active(shown(two))) == n + 1, "the stream in a report")
    assert active(shown(two)) == [1, 1]
    before = pids(two)
    os.kill(before[1], signal.SIGKILL)
    wait_for(lambda: any(stream.error for stream in streams), "the error of a stream")
    (lost,), (kept,) = [s for s in streams if s.error], [s for s in streams if not s.error]
    assert "The engine process ended unexpectedly" in lost.error
    wait_for(lambda: two.answers("Once"), "the other engine")
    for number in range(6):
        assert two.ready() and two.answers(f"Once {number}")
        assert (
            two.openai("/v1/completions", {"model": "bundled", "prompt": "Once", "max_tokens": 2})[0] == 200
        )
    seen = len(kept.events)
    wait_for(lambda: len(kept.events) > seen + 5 or "finish_reason" in kept.events[-1], "more of a stream")
    assert not kept.error
    kept.leave()

    back = shown_once(two, lambda s: by_engine(s, "flashinfer_backend_engine_up") == [1, 1], "both engines")
    assert by_engine(back, "nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="max") == [2048, 2048]
    wait_for(lambda: "engine 1 is ready again" in two.log, "serve to notice")
    assert f"engine 1 (process {before[1]}) ended with signal 9; the next one is started" in two.log
    after = pids(two)
    assert after[0] == before[0] and after[1] != before[1]
    assert [process.pid for process in two.matching("bin/tritonserver ")] == tritonserver
    text = context(30)
    assert reused(two, text) == 0 and reused(two, text) > 0


def test_both_engines_end_with_the_server(two: BothApis) -> None:
    running = [psutil.Process(pid) for pid in pids(two)]
    assert two.interrupt() == 0
    wait_for(lambda: not two.leftovers(), "nothing to be left")
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in running)
