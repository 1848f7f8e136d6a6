# SPDX-License-Identifier: Apache-2.0
"""An ensemble that was built without the outputs of log probs, logits and perf metrics, and whose texts hold
special tokens. The bundled model writes some between two of its stories."""

from typing import Any

import pytest
from contract import (
    PROMPT,
    TEXT,
    answers,
    body,
    encode,
    events,
    flag,
    generate,
    greedy,
    ids_request,
    text_of,
    tokenizer,
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


def test_texts_with_special_tokens_are_cut_at_the_stop_word(bare: Server) -> None:
    ids = greedy(PROMPT, 135)
    text = str(tokenizer().decode(ids, skip_special_tokens=False))
    special = "<|begin_of_text|>"
    word = text[text.index(special) + 20 :][:8]
    begin = text.index(word)
    assert begin > text.index(special), "the words before are not it"
    for stop, end in ((word, begin), (special, text.index(special))):
        values = {"stop_words": [stop], "exclude_stop_words_in_output": True}
        assert generate(bare, 135, **values)[TEXT] == text_of(events(bare, 135, **values)) == text[:end]
