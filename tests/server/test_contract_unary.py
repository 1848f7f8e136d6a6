# SPDX-License-Identifier: Apache-2.0
"""A model repository without decoupled mode: one answer a request, and bounded queues.

TensorRT-LLM's end_to_end_test.py, benchmark_core_model.py and test_max_queue_size.py want it like this.
"""

import contextlib
import json
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from asking import inputs, int32, stop_request, strings
from contract import LLM, PROMPT, TEXT, decode, encode, flag, greedy, ids_request, logits
from running import EngineWatch, Server, wait_for
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

N = 12
FLOOD = 40
TRITON_FULL = "Exceeds maximum queue size"  # the queue before the model
ENGINE_FULL = "Maximum queue size of 4 has been reached, please try again later"


class Unary:
    """One request, one answer, over gRPC's ModelInfer or HTTP's /infer."""

    def __init__(self, server: Server, protocol: str) -> None:
        self._kind: Any = {"grpc": grpcclient, "http": httpclient}[protocol]
        address = server.grpc if protocol == "grpc" else server.url.removeprefix("http://")
        self._client = self._kind.InferenceServerClient(address)

    def __call__(self, model: str, values: dict[str, np.ndarray]) -> Any:
        tensors = []
        for name, value in values.items():
            kind = np_to_triton_dtype(value.dtype)
            tensors.append(self._kind.InferInput(name, list(value.shape), kind))
            tensors[-1].set_data_from_numpy(value)
        return self._client.infer(model, tensors)

    def outputs(self, result: Any) -> list[str]:
        """Their names in the order in which they came."""
        response = result.get_response()
        if isinstance(response, dict):
            return [output["name"] for output in response["outputs"]]
        return [output.name for output in response.outputs]

    def close(self) -> None:
        self._client.close()


@pytest.fixture(params=["grpc", "http"])
def infer(unary: Server, request: pytest.FixtureRequest) -> Iterator[Unary]:
    client = Unary(unary, request.param)
    yield client
    client.close()


def test_the_three_models_walked_by_hand_give_what_the_ensemble_gives(infer: Unary) -> None:
    """As end_to_end_test.py does."""
    no_words = strings("")
    asked = {"QUERY": strings(PROMPT), "REQUEST_OUTPUT_LEN": int32(N)}
    before = infer("preprocessing", {**asked, "BAD_WORDS_DICT": no_words, "STOP_WORDS_DICT": no_words})
    assert {*infer.outputs(before)} == {  # those of models that are not served are never there
        *("INPUT_ID", "REQUEST_INPUT_LEN", "REQUEST_OUTPUT_LEN", "BAD_WORDS_IDS", "STOP_WORDS_IDS"),
        *("EMBEDDING_BIAS", "OUT_END_ID", "OUT_PAD_ID", "DECODER_INPUT_ID", "REQUEST_DECODER_INPUT_LEN"),
    }
    prompt = before.as_numpy("INPUT_ID")
    assert prompt.tolist() == [encode(PROMPT)]
    for name in ("BAD_WORDS_IDS", "STOP_WORDS_IDS"):
        assert before.as_numpy(name).tolist() == [[[0], [-1]]]
    # The HTTP client loses an empty tensor's type.
    bias = before.as_numpy("EMBEDDING_BIAS").astype(np.float32)
    assert bias.shape == (1, 0)
    middle = infer(
        LLM,
        {
            "input_ids": prompt,
            "decoder_input_ids": before.as_numpy("DECODER_INPUT_ID"),
            "input_lengths": before.as_numpy("REQUEST_INPUT_LEN"),
            "request_output_len": before.as_numpy("REQUEST_OUTPUT_LEN"),
            "bad_words_list": before.as_numpy("BAD_WORDS_IDS"),
            "stop_words_list": before.as_numpy("STOP_WORDS_IDS"),
            "embedding_bias": bias,
            "end_id": before.as_numpy("OUT_END_ID"),
            "pad_id": before.as_numpy("OUT_PAD_ID"),
            "return_log_probs": flag(True),
        },
    )
    lengths = middle.as_numpy("sequence_length")
    assert middle.as_numpy("output_ids").shape == (1, 1, lengths.item())
    after = infer(
        "postprocessing", {"TOKENS_BATCH": middle.as_numpy("output_ids"), "SEQUENCE_LENGTH": lengths}
    )
    assert after.as_numpy("OUTPUT").shape == (1,)
    text = after.as_numpy("OUTPUT")[0].decode()
    assert text == PROMPT + decode(greedy(PROMPT, N))

    request = {"text_input": strings(PROMPT), "max_tokens": int32(N), "return_log_probs": flag(True)}
    whole = infer("ensemble", {**request, "bad_words": no_words, "stop_words": no_words})
    assert whole.as_numpy(TEXT)[0].decode() == text
    for name in ("output_log_probs", "cum_log_probs"):
        assert whole.as_numpy(name).tolist() == middle.as_numpy(name).tolist()


def test_postprocessing_passes_nothing_on(infer: Unary) -> None:
    """As older releases' end_to_end_test.py asks it to: the ensemble has log probs and logits from llm."""
    ids = {"TOKENS_BATCH": np.array([[[5, 6]]], np.int32), "SEQUENCE_LENGTH": int32(2)}
    with pytest.raises(InferenceServerException, match="unexpected inference input 'CUM_LOG_PROBS'"):
        infer("postprocessing", {**ids, "CUM_LOG_PROBS": np.zeros((1, 1), np.float32)})


@pytest.mark.parametrize("excluded", [False, True])
def test_benchmark_core_model(infer: Unary, excluded: bool) -> None:
    """Its requests of random ids: most lie outside the vocabulary, and fold_input_ids takes them into it."""
    generator = np.random.default_rng(0)
    for length in (7, 20):
        random = {"pad_id": int32(0), "end_id": int32(1), "exclude_input_in_output": flag(excluded)}
        wild = generator.integers(3000, 2**31 - 1, length)
        folded = wild % len(logits([1])[0])
        answers = [infer(LLM, {**ids_request(ids.tolist(), N), **random}) for ids in (wild, folded)]
        for result in answers:
            # The tool counts the tokens in whatever comes first.
            assert infer.outputs(result)[0] == "output_ids"
            made = result.as_numpy("output_ids").shape[2] - (0 if excluded else length)
            assert 0 <= made <= N
        assert len({tuple(result.as_numpy("output_ids")[0, 0]) for result in answers}) == 1


def test_generate_stream_sends_one_chunk(unary: Server) -> None:
    (event,) = unary.post({"text_input": PROMPT, "max_tokens": N}, stream=True)
    assert event[TEXT] == PROMPT + decode(greedy(PROMPT, N))


def test_a_stop_request_ends_a_unary_request_early(unary: Server) -> None:
    answer: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(unary.grpc) as client:
        client.async_infer(
            LLM,
            inputs(ids_request(encode(PROMPT), 1900)),
            lambda result, error: answer.put((result, error)),
            request_id="early",
        )
        while answer.empty():  # the running request may not have arrived yet
            client.infer(LLM, inputs(stop_request()), request_id="early")
        result, error = answer.get()
    assert error is None
    assert result.as_numpy("output_ids").size < 1900
    assert result.as_numpy("finish_reason").item() == b"cancelled"


def flood_grpc(server: Server) -> list[tuple[Any, str]]:
    answer: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(server.grpc) as client:
        for _ in range(FLOOD):
            request = inputs(ids_request(encode(PROMPT), 100))
            client.async_infer(LLM, request, lambda result, error: answer.put(error))
        errors = [answer.get(timeout=120) for _ in range(FLOOD)]
    return [(error.status(), error.message()) for error in errors if error is not None]


def flood_http(server: Server) -> list[tuple[Any, str]]:
    def ask(_: int) -> tuple[Any, str] | None:
        with contextlib.closing(Unary(server, "http")) as client:
            try:
                client(LLM, ids_request(encode(PROMPT), 100))
            except InferenceServerException as error:
                return error.status(), error.message()
        return None

    with ThreadPoolExecutor(FLOOD) as pool:
        return [failure for failure in pool.map(ask, range(FLOOD)) if failure]


@pytest.mark.parametrize(
    ("flood", "statuses"),
    [
        (flood_grpc, {TRITON_FULL: "StatusCode.UNAVAILABLE", ENGINE_FULL: "StatusCode.UNAVAILABLE"}),
        (flood_http, {TRITON_FULL: "503", ENGINE_FULL: "503"}),
    ],
)
def test_full_queues_refuse_with_the_texts_clients_look_for(
    unary: Server, flood: Any, statuses: dict[str, str]
) -> None:
    """As test_max_queue_size.py does."""
    failures = flood(unary)
    assert 0 < len(failures) < FLOOD
    for got, message in failures:
        assert [got] == [status for text, status in statuses.items() if text in message], (got, message)
    _, answer = unary.post({"text_input": PROMPT, "max_tokens": 4})
    assert answer[TEXT] == PROMPT + decode(greedy(PROMPT, 4))


def test_the_engines_queue_has_a_bound_of_its_own(unary: Server, watch_unary: EngineWatch) -> None:
    """Two sequences run and four wait, so the seventh is one too many. They come one by one, so Triton's own
    queue is empty whenever the next one comes."""
    answer: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(unary.grpc) as client:
        for number in range(6):
            client.async_infer(
                LLM,
                inputs(ids_request(encode(PROMPT), 1900)),
                lambda result, error: answer.put(error),
                request_id=f"queue {number}",
            )
            wait_for(lambda: watch_unary.status().requests_active > number, "the request to arrive")  # noqa: B023
        with pytest.raises(InferenceServerException) as refused:
            client.infer(LLM, inputs(ids_request(encode(PROMPT), 4)))
        assert (refused.value.status(), refused.value.message()) == ("StatusCode.UNAVAILABLE", ENGINE_FULL)
        _, http_answer = unary.post({"text_input": PROMPT, "max_tokens": 4})
        assert http_answer["error"] == f"in ensemble 'ensemble', {ENGINE_FULL}"
        for number in range(6):
            client.infer(LLM, inputs(stop_request()), request_id=f"queue {number}")
        assert [answer.get(timeout=120) for _ in range(6)] == [None] * 6


@pytest.fixture
def two_run(unary: Server, watch_unary: EngineWatch) -> Iterator[queue.Queue[Any]]:
    """Both slots are taken until the end of the test, or until `stop`; their errors, when they end."""
    ended: queue.Queue[Any] = queue.Queue()
    wait_for(lambda: watch_unary.status().requests_active == 0, "those before to be gone")
    with grpcclient.InferenceServerClient(unary.grpc) as client:
        for number in range(2):
            client.async_infer(
                LLM,
                inputs(ids_request(encode(PROMPT), 1900)),
                lambda result, error: ended.put(error),
                request_id=f"running {number}",
                timeout=60_000_000,  # microseconds
            )
        wait_for(lambda: watch_unary.status().requests_running == 2, "both to run")
        yield ended
        stop(client)


def stop(client: grpcclient.InferenceServerClient) -> None:
    """Ends the two that run."""
    for number in range(2):
        client.infer(LLM, inputs(stop_request()), request_id=f"running {number}")


def test_a_request_that_has_waited_too_long(
    unary: Server, watch_unary: EngineWatch, two_run: queue.Queue[Any]
) -> None:
    """Whichever way it comes; those that run go on."""
    said = "Request timeout expired: it waited in the queue for"
    ids, text = ids_request(encode(PROMPT), 4), {"text_input": strings(PROMPT), "max_tokens": int32(4)}
    with grpcclient.InferenceServerClient(unary.grpc) as client:
        for model, values in ((LLM, ids), ("ensemble", text)):
            with pytest.raises(InferenceServerException) as refused:
                client.infer(model, inputs(values), timeout=1000)
            assert refused.value.status() == "StatusCode.UNAVAILABLE"
            assert said in refused.value.message()
        with pytest.raises(InferenceServerException, match="timeout is -3; it should be"):
            client.infer("ensemble", inputs(text), timeout=-3)
    prompt = {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": [PROMPT]}
    tokens = {"name": "max_tokens", "shape": [1, 1], "datatype": "INT32", "data": [4]}
    body = {"inputs": [prompt, tokens], "parameters": {"timeout": 1000}}
    status, _, answer = unary.raw(json.dumps(body).encode(), verb="infer")
    assert status == 503 and said in answer
    asked = {"text_input": PROMPT, "max_tokens": 4}
    for more in ({"timeout": 1000}, {"parameters": {"timeout": 1000}}):
        status, answer = unary.post({**asked, **more})
        assert status == 400 and said in answer["error"]  # whatever the model's own status is
        (event,) = unary.post({**asked, **more}, stream=True)
        assert said in event["error"]
    assert two_run.empty() and watch_unary.status().requests_running == 2


def test_priorities_decide_who_runs_next(
    unary: Server, watch_unary: EngineWatch, two_run: queue.Queue[Any]
) -> None:
    """Through both models and both protocols, in the order of their first steps."""
    first: queue.Queue[tuple[int, str]] = queue.Queue()
    name = "first_scheduled_time_ns"
    ids = ids_request(encode(PROMPT), 4, return_perf_metrics=flag(True))
    text = {"text_input": strings(PROMPT), "max_tokens": int32(4), "return_perf_metrics": flag(True)}

    def over_grpc(model: str, label: str, **options: Any) -> None:
        def note(result: Any, error: Any) -> None:
            first.put((result.as_numpy(name).item() if error is None else 0, label))

        values = ids if model == LLM else text
        client.async_infer(model, inputs(values), note, **options)

    def over_http() -> None:
        asked = {"text_input": PROMPT, "max_tokens": 4, "return_perf_metrics": True, "priority": 2}
        first.put((unary.post(asked)[1][name], "2"))

    thread = threading.Thread(target=over_http)
    with grpcclient.InferenceServerClient(unary.grpc) as client:
        waiting = [
            lambda: over_grpc(LLM, "9", parameters={"queue_priority": 9}),
            lambda: over_grpc("ensemble", "default"),
            thread.start,
            lambda: over_grpc("ensemble", "1", parameters={"queue_priority": 1}),
        ]
        for number, submit in enumerate(waiting, 1):
            submit()
            wait_for(lambda: watch_unary.status().requests_waiting == number, "it to wait")  # noqa: B023
        stop(client)
        found = sorted(first.get(timeout=120) for _ in waiting)
    thread.join()
    assert [label for _, label in found] == ["1", "2", "default", "9"] and found[0][0] > 0
    assert [two_run.get(timeout=120) for _ in range(2)] == [None, None]


def test_binary_answers_over_http_may_have_more_logits_than_json(unary: Server) -> None:
    prompt = PROMPT * 40
    values = {"text_input": strings(prompt), "max_tokens": int32(1), "return_context_logits": flag(True)}
    for protocol in ("grpc", "http"):
        found = Unary(unary, protocol)("ensemble", values).as_numpy("context_logits")
        assert found.shape == (1, len(encode(prompt)), 2048) and found.nbytes > 1 << 20
    kinds = {"text_input": "BYTES", "max_tokens": "INT32", "return_context_logits": "BOOL"}
    body = {"text_input": prompt, "max_tokens": 1, "return_context_logits": True}
    tensors = [{"name": n, "shape": [1, 1], "datatype": kinds[n], "data": [v]} for n, v in body.items()]
    status, _, text = unary.raw(json.dumps({"inputs": tensors}).encode(), "ensemble", "infer")
    assert status == 500 and "max_json_logits_mib" in text
    assert "max_json_logits_mib" in unary.post(body)[1]["error"]
