# SPDX-License-Identifier: Apache-2.0
"""What clients of the ensemble and of llm get."""

from __future__ import annotations

import queue
import threading
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from running import Server, wait_for
from tritonclient.utils import np_to_triton_dtype

PROMPT = "Once upon a time"
TIMEOUT_S = 120


def deltas(events: list[dict[str, Any]]) -> list[str]:
    return [event["text_output"] for event in events]


def inputs(values: dict[str, np.ndarray]) -> list[grpcclient.InferInput]:
    result = []
    for name, value in values.items():
        result.append(grpcclient.InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype)))
        result[-1].set_data_from_numpy(value)
    return result


def stream(server: Server, model: str, requests: list[tuple[str, dict[str, np.ndarray]]]) -> list[Any]:
    """(result, error) pairs of ModelStreamInfer, until each request's final response."""
    answers: queue.Queue[Any] = queue.Queue()
    found, final = [], 0
    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for request_id, values in requests:
            client.async_stream_infer(
                model, inputs(values), request_id=request_id, enable_empty_final_response=True
            )
        while final < len(requests):
            result, error = answers.get(timeout=TIMEOUT_S)
            found.append((result, error))
            final += error is not None or result.get_response().parameters["triton_final_response"].bool_param
        client.stop_stream()
    return found


def strings(*rows: str) -> np.ndarray:
    return np.array([[row.encode()] for row in rows], np.object_)


def int32(*rows: int) -> np.ndarray:
    return np.array([[row] for row in rows], np.int32)


def test_generate_answers_with_prompt_and_completion(server: Server) -> None:
    status, answer = server.post({"id": "a1", "text_input": PROMPT, "max_tokens": 12})
    assert status == 200
    assert answer["text_output"].startswith(PROMPT) and len(answer["text_output"]) > len(PROMPT)
    assert (answer["id"], answer["finish_reason"], answer["model_name"]) == ("a1", "length", "ensemble")
    assert answer["text_output"] == PROMPT + server.text(PROMPT, 12)


def test_stream_sends_deltas_of_the_same_text(server: Server) -> None:
    events = server.post({"id": "s", "text_input": PROMPT, "max_tokens": 24, "stream": True}, stream=True)
    assert 1 < len(events) <= 24
    assert "".join(deltas(events)) == server.text(PROMPT, 24)
    assert [event.get("finish_reason") for event in events] == [None] * (len(events) - 1) + ["length"]
    assert {event["id"] for event in events} == {"s"}
    assert not any("batch_index" in event or "sequence_index" in event for event in events)


def test_the_bundled_model_ends_by_itself(server: Server) -> None:
    events = server.post({"text_input": PROMPT, "max_tokens": 400, "stream": True}, stream=True)
    assert events[-1]["finish_reason"] == "stop"
    endless = {"text_input": PROMPT, "max_tokens": 400, "stream": True, "end_id": 1048576}
    assert server.post(endless, stream=True)[-1]["finish_reason"] == "length"


def test_token_counts(server: Server) -> None:
    body = {"text_input": PROMPT, "max_tokens": 20, "return_num_input_tokens": True}
    events = server.post({**body, "stream": True, "return_num_output_tokens": True}, stream=True)
    assert sum(event["num_output_tokens"] for event in events) == 20
    _, answer = server.post(body)
    assert answer["num_input_tokens"] == events[0]["num_input_tokens"] > 0
    assert "num_output_tokens" not in answer


def test_seeds_repeat_and_differ(server: Server) -> None:
    def sampled(**seed: int) -> str:
        return server.text(PROMPT, 24, temperature=1.0, top_k=50, **seed)

    assert sampled(seed=7) == sampled(seed=7) == sampled(random_seed=7)
    assert len({sampled(seed=n) for n in range(6)}) > 1


def test_stop_words_are_found_in_the_text(server: Server) -> None:
    full = server.text(PROMPT, 40)
    word = full[17:23]
    assert full.index(word) == 17
    kept = full[: 17 + len(word)]
    for extra, expected in (({}, kept), ({"exclude_stop_words_in_output": True}, full[:17])):
        body = {"text_input": PROMPT, "max_tokens": 40, "stop_words": [word], **extra}
        events = server.post({**body, "stream": True}, stream=True)
        assert "".join(deltas(events)) == expected
        assert events[-1]["finish_reason"] == "stop"
        _, answer = server.post(body)
        assert answer["text_output"] == PROMPT + expected
        assert server.text(PROMPT, 40, stop_words=[word], **extra) == expected


def test_several_sequences_of_one_prompt(server: Server) -> None:
    body = {
        **{"text_input": PROMPT, "max_tokens": 16, "num_return_sequences": 3, "stream": True},
        **{"temperature": 1.0, "top_k": 50, "seed": 11},
    }
    events = server.post(body, stream=True)
    found = ["".join(deltas([e for e in events if e["sequence_index"] == n])) for n in range(3)]
    alone = server.text(PROMPT, 16, temperature=1.0, top_k=50, seed=11)
    assert found[0] == alone and len(set(found)) > 1
    assert sum("finish_reason" in event for event in events) == 3


def test_grpc_stream(server: Server) -> None:
    values = {"text_input": strings(PROMPT), "max_tokens": int32(16), "stream": np.array([[True]])}
    answers = stream(server, "ensemble", [("g1", values)])
    assert all(error is None for _, error in answers)
    texts = [result.as_numpy("text_output") for result, _ in answers]
    assert b"".join(text[0] for text in texts if text is not None).decode() == server.text(PROMPT, 16)
    assert {result.get_response().id for result, _ in answers} == {"g1"}


def test_a_batch_is_answered_row_by_row(server: Server) -> None:
    prompts = [PROMPT, "The", "One day, a little girl"]
    values = {
        "text_input": strings(*prompts),
        "max_tokens": int32(8, 12, 16),
        "stream": np.array([[True]] * 3),
    }
    found = [b""] * 3
    for result, error in stream(server, "ensemble", [("", values)]):
        assert error is None
        if (text := result.as_numpy("text_output")) is not None:
            found[int(result.as_numpy("batch_index").item())] += text[0]
    assert [text.decode() for text in found] == [
        server.text(prompt, n) for prompt, n in zip(prompts, (8, 12, 16), strict=True)
    ]


def llm_request(max_tokens: int, **more: np.ndarray) -> dict[str, np.ndarray]:
    return {
        "input_ids": np.array([[5, 6, 7, 8]], np.int32),
        "input_lengths": int32(4),
        "request_output_len": int32(max_tokens),
        "end_id": int32(-1),
        **more,
    }


def test_llm_alone(server: Server) -> None:
    streaming = {"streaming": np.array([[True]])}
    ids: list[int] = []
    for result, error in stream(server, "llm", [("", llm_request(10, **streaming))]):
        assert error is None
        chunk = result.as_numpy("output_ids")
        assert chunk.shape[:2] == (1, 1) and result.as_numpy("sequence_length").item() == chunk.size
        ids += chunk.flatten().tolist()
    assert len(ids) == 10
    ((whole, _),) = stream(server, "llm", [("", llm_request(10))])
    assert whole.as_numpy("output_ids").flatten().tolist() == [5, 6, 7, 8, *ids]


def test_stop_request_ends_the_running_one_early(server: Server) -> None:
    started, ended = threading.Event(), threading.Event()
    last: list[str] = []

    def receive(result: Any, error: Any) -> None:
        if error is not None or result.get_response().id != "stop-me":
            return
        started.set()
        if (reason := result.as_numpy("finish_reason")) is not None:
            last.append(reason.item().decode())
            ended.set()

    stop = {
        "input_ids": int32(0), "input_lengths": int32(0), "request_output_len": int32(0),
        "stop": np.array([[True]]),
    }  # fmt: skip
    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.start_stream(receive)
        request = inputs(llm_request(1900, streaming=np.array([[True]])))
        client.async_stream_infer("llm", request, request_id="stop-me")
        assert started.wait(TIMEOUT_S)
        client.async_stream_infer("llm", inputs(stop), request_id="stop-me")
        assert ended.wait(TIMEOUT_S)
        client.stop_stream()
    assert last == ["cancelled"]
    ((_, error),) = stream(server, "llm", [("", stop)])
    assert "Trying to stop a request but request ID is not provided" in str(error)


def test_direct_client_that_leaves_is_noticed(server: Server, watch: Any) -> None:
    before = watch.status().cancellations
    started = threading.Event()
    client = grpcclient.InferenceServerClient(server.grpc)
    client.start_stream(lambda result, error: started.set())
    client.async_stream_infer("llm", inputs(llm_request(1900, streaming=np.array([[True]]))))
    assert started.wait(TIMEOUT_S)
    client.stop_stream(cancel_requests=True)
    client.close()
    wait_for(lambda: watch.status().cancellations > before, "the cancellation")
    assert watch.status().requests_active == 0


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_short_answers(server: Server, max_tokens: int) -> None:
    events = server.post({"text_input": PROMPT, "max_tokens": max_tokens, "stream": True}, stream=True)
    assert "".join(deltas(events)) == server.text(PROMPT, max_tokens)
