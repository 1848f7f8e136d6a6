# SPDX-License-Identifier: Apache-2.0
"""An ensemble that was built without the outputs of log probs, logits and perf metrics, and whose texts hold
special tokens. The bundled model writes some between two of its stories."""

import functools
from typing import Any

import pytest
from contract import (
    PROMPT,
    TEXT,
    answers,
    body,
    decode,
    encode,
    events,
    flag,
    generate,
    greedy,
    ids_request,
    text_of,
    tokenizer,
    words,
)
from running import Server
from test_contract_outputs import ALWAYS, ASKED

ANSWERED = {"return_num_input_tokens", "return_num_output_tokens"}


def texts(chunks: list[dict[str, Any]]) -> dict[int, str]:
    """Text of each sequence of a request."""
    found: dict[int, str] = {}
    for chunk in chunks:
        index = chunk.get("sequence_index", 0)
        found[index] = found.get(index, "") + chunk[TEXT]
    return found


def test_text_and_counts_are_as_with_all_outputs(bare: Server, contract: Server) -> None:
    counted = {name: True for name in ANSWERED} | {"num_return_sequences": 2, "seed": 3, "top_k": 5}
    for asked, names in (({}, set()), (counted, {"num_input_tokens", "num_output_tokens", "sequence_index"})):
        ours, expected = (events(server, 8, **asked) for server in (bare, contract))
        assert texts(ours) == texts(expected)
        assert {*ours[-1]} == {*expected[-1]} >= ALWAYS | names


@pytest.mark.parametrize("name", sorted(ASKED.keys() - ANSWERED))
def test_what_is_missing_is_refused(bare: Server, name: str) -> None:
    status, answer = bare.post(body(4, **{name: True}))
    shown = "return_perf_metrics" if ASKED[name] == ASKED["return_perf_metrics"] else name
    assert status == 400 and f"{shown} is true, but this ensemble has no output" in answer["error"]
    assert "build the model repository with ensemble_report_outputs true" in answer["error"]
    assert generate(bare, 4, **{name: False})[TEXT]


def test_llm_itself_has_all_outputs(bare: Server) -> None:
    (result,) = answers(bare, "tensorrt_llm", ids_request(encode(PROMPT), 4, return_log_probs=flag(True)))
    assert result.as_numpy("output_log_probs").shape[-1] == 4


N = 135


@functools.cache
def told() -> list[int]:
    return greedy(PROMPT, N)


def shown(ids: list[int]) -> str:
    return str(tokenizer().decode(ids, skip_special_tokens=False))


def answer(server: Server, stream: bool, **more: Any) -> str:
    return text_of(events(server, N, **more)) if stream else str(generate(server, N, **more)[TEXT])


@pytest.mark.parametrize("stream", [False, True])
def test_texts_with_special_tokens_are_cut_at_the_stop_word(bare: Server, stream: bool) -> None:
    text = shown(told())
    word = text[text.index("<|begin_of_text|>") + 20 :][:8]
    begin = text.index(word)
    assert begin > text.index("<|begin_of_text|>"), "the words before are not it"
    for excluded, end in ((False, begin + len(word)), (True, begin)):
        values = {"stop_words": [word], "exclude_stop_words_in_output": excluded}
        assert answer(bare, stream, **values) == text[:end]
    special = {"stop_words": ["<|begin_of_text|>"], "exclude_stop_words_in_output": True}
    assert answer(bare, stream, **special) == text[: text.index("<|begin_of_text|>")]


def test_the_prompt_in_front_of_the_answer_shows_its_special_tokens(bare: Server) -> None:
    text = decode(told())
    word = text[30:36]
    status, found = bare.post(body(N, stop_words=[word], exclude_input_in_output=False))
    assert status == 200
    assert found[TEXT] == "<|begin_of_text|>" + PROMPT + text[: text.index(word) + len(word)]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_words_with_special_tokens(contract: Server, stream: bool) -> None:
    """Special tokens are left out of this server's texts, so such a word is found by its ids."""
    begin = told().index(words("<|end_of_text|>")[0])
    ids = told()[begin : begin + 6]
    word = shown(ids)
    assert words(word) == ids
    for excluded, end in ((False, begin + len(ids)), (True, begin)):
        values = {"stop_words": ["never said", word], "exclude_stop_words_in_output": excluded}
        assert answer(contract, stream, **values) == decode(told()[:end])
    # Ids, their number and their log probabilities are of all that was generated.
    more = {"return_log_probs": True, "return_num_output_tokens": True, "exclude_stop_words_in_output": True}
    if not stream:
        found = generate(contract, N, stop_words=[word], **more)
        assert found["finish_reason"] == "stop"
        assert found["num_output_tokens"] == len(found["output_log_probs"]) == begin + len(ids)
