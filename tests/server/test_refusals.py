# SPDX-License-Identifier: Apache-2.0
"""What the models of Triton's API refuse: the input, words of the error. What comes after them goes on.

Statuses of its endpoints are in test_contract_errors.py, names and values of tensors in
tests/unit/test_requests.py and test_preprocessing.py, and what the OpenAI API refuses in
tests/unit/test_openai_refusals.py.
"""

import json
import queue
import re
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from asking import inputs, int32, strings
from contract import LLM, PROMPT, answers, encode, greedy, ids_request, logits, refusal
from running import Server

ENSEMBLE: list[tuple[str, np.ndarray, str]] = [
    ("beam_width", int32(2), "beam_width is 2"),
    ("decoder_text_input", strings("a"), "(decoder_text_input)"),
    ("prompt_embedding_table", np.ones((1, 2, 4), np.float16), "prompt_embedding_table"),
    ("prompt_table_extra_id", np.array([[7]], np.uint64), "prompt_table_extra_ids"),
    ("prompt_vocab_size", int32(2), "prompt_vocab_size"),
    ("lora_task_id", np.array([[1]], np.uint64), "lora_task_id"),
    ("lora_weights", np.ones((1, 2, 4), np.float16), "lora_weights"),
    ("lora_config", np.ones((1, 2, 3), np.int32), "lora_config"),
]
ASKED = {"text_input": strings(PROMPT), "max_tokens": int32(4)}


@pytest.mark.parametrize(("name", "value", "words"), ENSEMBLE, ids=lambda value: str(value)[:40])
def test_what_is_not_served_is_refused_by_name(
    contract: Server, name: str, value: np.ndarray, words: str
) -> None:
    message = refusal(contract, "ensemble", {**ASKED, name: value})
    assert words in message and "not supported" in message


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"id": "x" * 4097}, "the request's id has 4097 characters; it should have at most 4096"),
        ({"unknown": "x" * 16385}, "of JSON; it should have at most 16384"),
    ],
    ids=["id", "parameters"],
)
def test_what_each_chunk_would_carry_is_bounded(contract: Server, more: dict[str, str], words: str) -> None:
    body = {"text_input": PROMPT, "max_tokens": 2, "num_return_sequences": 2, **more}
    status, _, text = contract.raw(json.dumps(body).encode())
    assert status >= 400 and words in text


def test_ids_outside_the_vocabulary_are_refused_and_nothing_else_happens(contract: Server) -> None:
    for wrong in (2**31 - 1, -1, len(logits([1])[0])):
        message = refusal(contract, LLM, ids_request([5, wrong], 4))
        assert f"input_ids holds {wrong}; token ids should lie in 0.." in message
        assert "fold_input_ids" in message
    (result,) = answers(contract, LLM, ids_request(encode(PROMPT), 9, end_id=int32(2**31 - 1)))
    assert result.as_numpy("output_ids")[0, 0].tolist() == encode(PROMPT) + greedy(PROMPT, 9)


def test_inputs_that_are_missing_are_named(contract: Server) -> None:
    for name in ("input_ids", "input_lengths", "request_output_len"):
        values = {key: value for key, value in ids_request([5], 4).items() if key != name}
        message = refusal(contract, LLM, values)
        # The server counts inputs only: with an optional one in its place, a mandatory one may be absent.
        assert re.search(f"{name}.* is missing|missing required input.*'{name}'", message)


def test_disaggregated_requests_are_refused(contract: Server) -> None:
    answer: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(contract.grpc) as client:
        client.start_stream(lambda result, error: answer.put((result, error)))
        for kind in ("context_only", "context_and_generation"):
            client.async_stream_infer(LLM, inputs(ids_request([5], 2)), parameters={"request_type": kind})
        (_, error), (result, none) = (answer.get(timeout=120) for _ in range(2))
    assert 'request_type is "context_only"' in str(error)
    assert none is None and result.as_numpy("output_ids").shape == (1, 1, 3)
