# SPDX-License-Identifier: Apache-2.0
"""The model `tensorrt_llm`: token ids in, token ids out, as TensorRT-LLM's clients of it expect."""

import queue
import threading
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from asking import inputs, int32, stop_request, strings
from contract import (
    LLM,
    PROMPT,
    answers,
    decode,
    encode,
    flag,
    greedy,
    ids_request,
    log_probs,
    logits,
    number,
    output_names,
    refusal,
    stream,
)
from running import Server, wait_for

N = 16


def ids(result: Any) -> list[int]:
    return [int(token) for token in result.as_numpy("output_ids").flatten()]


def completion(server: Server, max_tokens: int = N, **more: np.ndarray) -> list[int]:
    """Ids after the prompt of an answer which is not streamed."""
    asked = {"exclude_input_in_output": flag(True), **more}
    (result,) = answers(server, LLM, ids_request(encode(PROMPT), max_tokens, **asked))
    return ids(result)


def test_shapes_of_an_answer(contract: Server) -> None:
    prompt, plain = encode(PROMPT), greedy(PROMPT, N)
    (result,) = answers(contract, LLM, ids_request(prompt, N))
    assert result.as_numpy("output_ids").shape == (1, 1, len(prompt) + N)
    assert ids(result) == prompt + plain
    assert result.as_numpy("sequence_length").tolist() == [[len(prompt) + N]]
    assert completion(contract) == plain
    chunks = answers(contract, LLM, ids_request(prompt, N, streaming=flag(True)))
    assert [token for chunk in chunks for token in ids(chunk)] == plain
    for chunk in chunks:
        assert chunk.as_numpy("output_ids").shape == (1, 1, chunk.as_numpy("sequence_length").item())


def test_extra_outputs_have_a_batch_and_a_beam_dimension(contract: Server) -> None:
    prompt, plain = encode(PROMPT), greedy(PROMPT, N)
    names = ("log_probs", "context_logits", "generation_logits", "perf_metrics")
    asked = {f"return_{name}": flag(True) for name in (*names, "num_input_tokens", "num_output_tokens")}
    (result,) = answers(contract, LLM, ids_request(prompt, N, **asked))
    reference = logits(prompt + plain).numpy()
    np.testing.assert_allclose(
        result.as_numpy("output_log_probs"), log_probs(prompt, plain)[None, None], atol=1e-4
    )
    assert result.as_numpy("cum_log_probs").shape == (1, 1)
    np.testing.assert_allclose(result.as_numpy("context_logits"), reference[None, : len(prompt)], atol=1e-3)
    np.testing.assert_allclose(
        result.as_numpy("generation_logits"), reference[None, None, len(prompt) - 1 : -1], atol=1e-3
    )
    for name, value in (("num_input_tokens", len(prompt)), ("num_output_tokens", N)):
        assert result.as_numpy(name).tolist() == [[value]]
    assert result.as_numpy("kv_cache_alloc_total_blocks").shape == (1, 1)


def test_inputs_that_ask_for_nothing_pass(contract: Server) -> None:
    nothing = {
        "runtime_top_p_min": number(0.1), "runtime_top_p_decay": number(1.0),
        "runtime_top_p_reset_ids": int32(1), "len_penalty": number(2.0), "early_stopping": flag(True),
        "beam_search_diversity_rate": number(0.5), "beam_width": int32(1), "pad_id": int32(2),
    }  # fmt: skip
    assert completion(contract, **nothing) == greedy(PROMPT, N)


def test_stop_words_by_ids_and_by_text(contract: Server) -> None:
    plain = greedy(PROMPT, N)
    stop = np.array([[plain[5:7] + [9], [2, 3, -1]]], np.int32)
    assert completion(contract, stop_words_list=stop) == plain[:7]  # the stop word stays
    text = {"stop_words_text": strings(decode(plain[3:5])), "exclude_stop_words_in_output": flag(False)}
    assert completion(contract, **text) == plain[:5]


@pytest.mark.parametrize(
    "asked",
    [
        {"output_ids", "sequence_length"},
        {"output_ids", "sequence_length", "output_log_probs", "cum_log_probs"},
        {"finish_reason"},
        set(),
    ],
    ids=lambda names: "+".join(sorted(names)) or "none named",
)
def test_an_answer_holds_the_outputs_that_were_requested(contract: Server, asked: set[str]) -> None:
    answer: queue.Queue[Any] = queue.Queue()
    outputs = [grpcclient.InferRequestedOutput(name) for name in asked] or None
    values = ids_request(encode(PROMPT), 4, return_log_probs=flag(True))
    with grpcclient.InferenceServerClient(contract.grpc) as client:
        client.start_stream(lambda result, error: answer.put((result, error)))
        client.async_stream_infer(LLM, inputs(values), outputs=outputs, parameters={"Streaming": False})
        result, error = answer.get(timeout=120)
    always = {"output_ids", "sequence_length", "chunk", "finish_reason"}
    assert error is None
    assert output_names(result) == (asked or always | {"output_log_probs", "cum_log_probs"})


@pytest.mark.parametrize("stop_by", ["stop request", "cancellation"])
def test_a_running_request_can_be_stopped(contract: Server, stop_by: str, watch_contract: Any) -> None:
    """As inflight_batcher_llm_client.py --stop-after-ms does, in both of its ways."""
    before = watch_contract.status().cancellations
    started, ended = threading.Event(), threading.Event()
    produced: list[int] = []
    others: list[Any] = []

    def receive(result: Any, error: Any) -> None:
        if error is not None or not result.get_response().outputs:
            others.append(error or "empty")
            return
        produced.extend(ids(result))
        started.set()
        if "finish_reason" in output_names(result):
            ended.set()

    request = inputs(ids_request(encode(PROMPT), 1900, streaming=flag(True)))
    with grpcclient.InferenceServerClient(contract.grpc) as client:
        client.start_stream(receive)
        client.async_stream_infer(LLM, request, request_id="1", enable_empty_final_response=True)
        assert started.wait(120)
        if stop_by == "stop request":
            final = {"enable_empty_final_response": True}
            client.async_stream_infer(LLM, inputs(stop_request()), request_id="1", **final)
            assert ended.wait(120)
            client.stop_stream()
            assert others == ["empty"]  # the stop request's own answer
        else:
            client.stop_stream(cancel_requests=True)
    wait_for(lambda: watch_contract.status().cancellations > before, "the engine to hear of it")
    assert 0 < len(produced) < 1900
    assert watch_contract.status().requests_active == 0


def test_a_stop_request_ends_what_the_ensemble_runs_with_its_id(contract: Server) -> None:
    """The ensemble itself has no such input, and over HTTP drops it: clients that reach it alone end nothing
    of others."""
    chunks: queue.Queue[Any] = queue.Queue()
    values = {"text_input": PROMPT, "max_tokens": 1900, "end_id": 1 << 20, "stream": True, "id": "shared"}
    values["return_num_output_tokens"] = True
    asked = threading.Thread(target=lambda: chunks.put(contract.post(values, stream=True)))
    before = contract.engine_status().requests_active
    asked.start()
    wait_for(lambda: contract.engine_status().requests_active > before)
    ignored = contract.post({"id": "shared", "text_input": PROMPT, "max_tokens": 2, "stop": True})
    assert (ignored[0], ignored[1]["finish_reason"]) == (200, "length")
    assert contract.engine_status().requests_active > before
    numbers = {"input_ids": 0, "input_lengths": 0, "request_output_len": 0}
    assert contract.post({"id": "shared", **numbers, "stop": True}, LLM)[0] == 200
    found = chunks.get(timeout=120)
    asked.join()
    assert 0 < sum(chunk["num_output_tokens"] for chunk in found) < 1900


def test_a_stop_request_with_an_endless_id_is_refused_and_harms_nobody(contract: Server) -> None:
    ((_, error),) = stream(contract, LLM, [("a" + "é" * 40000, stop_request())])
    assert "the request's id has 40001 characters; it should have at most 4096" in str(error)
    for _ in range(4):  # every stub goes on
        assert completion(contract) == greedy(PROMPT, N)


def test_a_stop_request_for_an_unknown_id_is_no_error(contract: Server) -> None:
    assert answers(contract, LLM, stop_request(), request_id="nobody") == []
    message = refusal(contract, LLM, stop_request())
    assert "Trying to stop a request but request ID is not provided" in message


def test_a_stop_request_is_answered_once_without_outputs(contract: Server, unary: Server) -> None:
    """To clients that did not ask for a final response as well."""
    empty = {"id": "nobody", "model_name": LLM, "model_version": "1"}
    numbers = {"input_ids": 0, "input_lengths": 0, "request_output_len": 0}
    for each in (contract, unary):
        assert each.post({"id": "nobody", **numbers, "stop": True}, LLM) == (200, empty)
        assert each.post({"id": "nobody", **numbers, "stop": True}, LLM, stream=True) == [empty]
    found: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(contract.grpc) as client:
        client.start_stream(lambda result, error: found.put((result, error)))
        client.async_stream_infer(LLM, inputs(stop_request()), request_id="nobody")
        result, error = found.get(timeout=120)
        client.stop_stream()
    assert error is None and found.empty()
    assert (result.get_response().id, output_names(result)) == ("nobody", set())
