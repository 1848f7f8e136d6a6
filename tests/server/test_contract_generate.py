# SPDX-License-Identifier: Apache-2.0
"""How JSON becomes tensors at HTTP generate and generate_stream, and tensors become JSON again."""

import json
from typing import Any

import pytest
from contract import PROMPT, TEXT, decode, greedy
from running import Server

N = 8
BOTH = pytest.mark.parametrize("verb", ["generate", "generate_stream"])


def ask(server: Server, verb: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Status and JSON of the only answer."""
    status, _, text = server.raw(json.dumps(body).encode(), verb=verb)
    return status, json.loads(text.removeprefix("data: "))


@BOTH
def test_keys_in_the_object_parameters_are_inputs_as_well(contract: Server, verb: str) -> None:
    nested = {"max_tokens": N, "exclude_input_in_output": True, "temperature": 0, "nobody": "knows"}
    status, answer = ask(contract, verb, {"text_input": PROMPT, "parameters": nested})
    assert (status, answer[TEXT]) == (200, decode(greedy(PROMPT, N)))
    stop = {"stop_words": [decode(greedy(PROMPT, 3)[2:])]}
    _, answer = ask(contract, verb, {"text_input": PROMPT, "max_tokens": N, "parameters": stop})
    assert answer["finish_reason"] == "stop"
    both = {"text_input": PROMPT, "max_tokens": N, "parameters": {"max_tokens": N}}
    status, answer = ask(contract, verb, both)
    assert status == 400 and "input 'max_tokens' already exists in request" in answer["error"]


@BOTH
def test_unknown_keys_are_ignored_if_they_are_scalars(contract: Server, verb: str) -> None:
    body = {"text_input": PROMPT, "max_tokens": N}
    unknown = {"accumulate_tokens": True, "model": "any", "n": 1}
    status, answer = ask(contract, verb, {**body, **unknown})
    assert (status, answer[TEXT]) == (200, PROMPT + decode(greedy(PROMPT, N)))
    assert not unknown.keys() & answer.keys()
    for value in ([1, 2], {"a": 1}):
        status, answer = ask(contract, verb, {**body, "nobody": value})
        assert status == 400 and "parameter 'nobody' has invalid type" in answer["error"]


def test_a_list_for_an_input_of_one_value_is_a_batch(contract: Server) -> None:
    prompts = [PROMPT, "The"]
    body = {"text_input": prompts, "max_tokens": [N, N], "stream": [True, True]}
    texts = ["", ""]
    for event in contract.post(body, stream=True):
        texts[event["batch_index"]] += event[TEXT]
    assert texts == [decode(greedy(prompt, N)) for prompt in prompts]
    status, answer = ask(contract, "generate", body)
    assert status == 200 and "generate expects model to produce exactly 1 response" in answer["error"]


def test_form_of_the_answers(contract: Server) -> None:
    body = {"id": "7", "text_input": PROMPT, "max_tokens": N}
    status, headers, text = contract.raw(json.dumps(body).encode())
    assert status == 200 and headers["Content-Type"] == "application/json"
    answer = json.loads(text)
    assert [*answer] == sorted(answer) and answer["id"] == "7"
    assert (answer["model_name"], answer["model_version"]) == ("ensemble", "1")
    assert [answer[name] for name in ("sequence_id", "sequence_start", "sequence_end")] == [0, False, False]

    status, headers, text = contract.raw(
        json.dumps({**body, "stream": True}).encode(), verb="generate_stream"
    )
    assert status == 200 and headers["Content-Type"].startswith("text/event-stream")
    *events, rest = text.split("\n\n")
    assert not rest and all(event.startswith("data: {") for event in events)  # no [DONE] at the end
    parsed = [json.loads(event.removeprefix("data: ")) for event in events]
    assert all(event["id"] == "7" and TEXT in event for event in parsed)
    assert "".join(event[TEXT] for event in parsed) == decode(greedy(PROMPT, N))
    # An output of several numbers is a flat list, one of a single number a scalar.
    _, answer = ask(contract, "generate", {**body, "return_log_probs": True})
    assert len(answer["output_log_probs"]) == N and isinstance(answer["cum_log_probs"], float)


def test_generate_wants_exactly_one_answer(contract: Server) -> None:
    two = {"text_input": PROMPT, "max_tokens": N, "stream": True, "num_return_sequences": 2}
    status, answer = ask(contract, "generate", two)  # of one, a slow client may get all in one response
    assert status == 200 and "generate expects model to produce exactly 1 response" in answer["error"]
    assert "use generate stream" in answer["error"]
