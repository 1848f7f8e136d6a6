# SPDX-License-Identifier: Apache-2.0
"""Stop words and special tokens: the bundled model writes some between two of its stories."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from contract import PROMPT, TEXT, body, decode, events, generate, greedy, text_of, tokenizer, words
from running import Server

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
