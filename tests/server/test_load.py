# SPDX-License-Identifier: Apache-2.0
"""Many clients at once, and clients that leave."""

import json
import queue
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from asking import PROMPT, inputs, int32, strings
from running import ROOT, EngineWatch, Server, wait_for

from client import perf_analyzer

STREAMS = 256
PROMPTS = [
    f"One day, a {kind} named {name}" for kind in ("cat", "dog", "boy", "girl") for name in ("Tom", "Lily")
]
TOKENS = 24


def test_256_streams_are_complete_and_in_order(server: Server) -> None:
    expected = [server.text(prompt, TOKENS, end_id=1048576) for prompt in PROMPTS]
    assert len(set(expected)) > 1

    def ask(number: int) -> Any:
        body = {"id": f"r{number}", "text_input": PROMPTS[number % len(PROMPTS)], "max_tokens": TOKENS}
        more = {"stream": True, "end_id": 1048576, "return_num_output_tokens": True}
        return server.post(body | more, stream=True)

    with ThreadPoolExecutor(STREAMS) as clients:
        found = list(clients.map(ask, range(STREAMS)))
    for number, events in enumerate(found):
        assert {event["id"] for event in events} == {f"r{number}"}
        assert sum(event["num_output_tokens"] for event in events) == TOKENS, events
        assert "".join(event["text_output"] for event in events) == expected[number % len(PROMPTS)]
        assert [event.get("finish_reason") for event in events] == [None] * (len(events) - 1) + ["length"]


def test_a_stream_does_not_run_ahead_of_postprocessing(server: Server, watch: EngineWatch) -> None:
    """Tokens that are made while postprocessing stands still are one chunk behind those on their way."""
    tokens, still_s, most_s = 300, 0.3, 0.5  # a stub that stands still for 0.75 s ends
    expected = server.text(PROMPTS[0], tokens, end_id=1048576)
    body = {
        **{"text_input": PROMPTS[0], "max_tokens": tokens, "stream": True, "end_id": 1048576},
        "return_num_output_tokens": True,
    }
    events: list[dict[str, Any]] = []

    def next_event(client: Any) -> bool:
        while line := client.readline():
            if line.startswith(b"data: "):
                events.append(json.loads(line[6:]))
                return True
        return False

    stubs = server.matching("/postprocessing/1/model.py")
    assert stubs

    def resume() -> None:
        for stub in stubs:
            stub.resume()

    at_latest = threading.Timer(most_s, resume)  # a busy machine's status comes late
    with server.sent("ensemble/generate_stream", body) as connection, connection.makefile("rb") as client:
        for _ in range(20):
            assert next_event(client)
        at_latest.start()
        try:
            for stub in stubs:
                stub.suspend()
            before = watch.status().generated_tokens
            time.sleep(still_s)
            made = watch.status().generated_tokens - before
            if not at_latest.is_alive():
                made = 0  # some were made later
        finally:
            at_latest.cancel()
            resume()
        while "finish_reason" not in events[-1]:
            assert next_event(client)
    counts = [event["num_output_tokens"] for event in events]
    assert sum(counts) == tokens
    assert "".join(event["text_output"] for event in events) == expected
    assert max(counts) > max(made / 2, 1), (made, counts)
    assert all(stub.is_running() for stub in stubs), server.log[-3000:]


ENSEMBLE = {"text_input": PROMPT, "max_tokens": 1900, "stream": True, "end_id": 1048576}
LLM = {
    **{"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 1900, "streaming": True},
    "end_id": 1048576,
}


@pytest.mark.parametrize(("model", "request_body"), [("ensemble", ENSEMBLE), ("llm", LLM)])
def test_a_client_that_leaves_its_stream_frees_its_blocks(
    server: Server, watch: EngineWatch, model: str, request_body: dict[str, Any]
) -> None:
    idle = wait_for(lambda: (s := watch.status()).requests_active == 0 and s, "an idle engine")
    with server.sent(f"{model}/generate_stream", request_body) as client:
        assert b"data: " in client.recv(65536) + client.recv(65536)
        running = wait_for(lambda: (s := watch.status()).requests_active == 1 and s, "the request")
        assert running.blocks_used > idle.blocks_used
    left = wait_for(lambda: (s := watch.status()).requests_active == 0 and s, "the request to be gone")
    assert left.cancellations == idle.cancellations + 1
    assert left.blocks_used == idle.blocks_used
    assert left.generated_tokens - idle.generated_tokens < 1900


def test_a_client_that_leaves_without_streaming_harms_nobody(server: Server, watch: EngineWatch) -> None:
    """tritonserver gives no sign of it, so it runs to its end, as with TensorRT-LLM."""
    idle = wait_for(lambda: (s := watch.status()).requests_active == 0 and s, "an idle engine")
    with server.sent("ensemble/generate", {**ENSEMBLE, "max_tokens": 300, "stream": False}):
        wait_for(lambda: watch.status().requests_active == 1, "the request")
    assert server.text(PROMPT, 4)
    ended = wait_for(lambda: (s := watch.status()).requests_active == 0 and s, "its end")
    assert (ended.cancellations, ended.blocks_used) == (idle.cancellations, idle.blocks_used)
    assert server.ready()


def test_a_unary_call_that_is_cancelled_ends(unary: Server, watch_unary: EngineWatch) -> None:
    before = watch_unary.status().cancellations
    errors: queue.Queue[Any] = queue.Queue()
    values = {
        "input_ids": int32(5), "input_lengths": int32(1), "request_output_len": int32(1900),
        "end_id": int32(1048576),
    }  # fmt: skip
    with grpcclient.InferenceServerClient(unary.grpc) as client:
        call = client.async_infer("tensorrt_llm", inputs(values), lambda result, error: errors.put(error))
        wait_for(lambda: watch_unary.status().requests_active == 1, "the request")
        call.cancel()
        assert "Locally cancelled" in str(errors.get(timeout=120))
        wait_for(lambda: watch_unary.status().cancellations == before + 1, "the cancellation")


@pytest.mark.parametrize(("streaming", "tokens"), [(True, 1900), (False, 400)])
def test_a_client_that_does_not_request_text_output(server: Server, streaming: bool, tokens: int) -> None:
    """Streaming, it looks like one that left, since postprocessing gets nothing of it; it is told, long
    before so many tokens are made."""
    answers: queue.Queue[Any] = queue.Queue()
    values = {
        "text_input": strings(PROMPT), "max_tokens": int32(tokens), "end_id": int32(1048576),
        "stream": np.array([[streaming]]), "return_num_output_tokens": np.array([[True]]),
    }  # fmt: skip
    outputs = [grpcclient.InferRequestedOutput(name) for name in ("num_output_tokens", "finish_reason")]
    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("ensemble", inputs(values), outputs=outputs)
        found = [answers.get(timeout=120)]
        while streaming and found[-1][1] is None:
            found.append(answers.get(timeout=120))
    result, error = found[-1]
    if streaming:
        assert "request text_output next to the other outputs" in str(error)
    else:
        assert error is None and result.as_numpy("num_output_tokens").item() == tokens


def test_perf_analyzer_drives_the_ensemble(server: Server, tmp_path: Path) -> None:
    try:
        perf_analyzer.find_program()
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    prompt = {"content": [PROMPT], "shape": [1]}
    data = [{"text_input": prompt, "max_tokens": {"content": [3], "shape": [1]}}]
    data[0]["stream"] = {"content": [True], "shape": [1]}
    (tmp_path / "in.json").write_text(json.dumps({"data": data}))
    command = [
        *(sys.executable, "-m", "client.perf_analyzer", "-m", "ensemble", "-i", "grpc", "--streaming"),
        *("-u", server.grpc, "-b", "1"),
        *("--input-data", str(tmp_path / "in.json"), "--concurrency-range", "4", "--request-count", "8"),
        *("--profile-export-file", str(tmp_path / "out.json")),
    ]
    # Few and short requests: beyond 64 KiB this perf_analyzer sometimes writes broken JSON. On a busy machine
    # it sometimes ends well and leaves the file empty.
    for _ in range(3):
        (tmp_path / "out.json").unlink(missing_ok=True)  # it writes new files only
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=35)
        assert result.returncode == 0, result.stdout + result.stderr
        if exported := (tmp_path / "out.json").read_text():
            break
    requests = json.loads(exported)["experiments"][0]["requests"]
    assert len(requests) >= 8
    # Tokens may share a response when the machine is busy, but not those of every request.
    assert any(len(request["response_timestamps"]) > 1 for request in requests)


def test_memory_does_not_grow_with_requests(server: Server) -> None:
    def stubs() -> int:
        return sum(process.memory_info().rss for process in server.matching("/llm/1/model.py"))

    with ThreadPoolExecutor(8) as clients:  # at a time, so that they share the engine's steps
        list(clients.map(lambda _: server.text(PROMPT, 8), range(40)))
        before = stubs()
        list(clients.map(lambda _: server.text(PROMPT, 8), range(200)))
    assert stubs() - before < 20 << 20
    assert psutil.pid_exists(server.engine_pid())
