# SPDX-License-Identifier: Apache-2.0
"""Answers of a server that drafts are those that it gives without drafts."""

from __future__ import annotations

from typing import Any

import pytest
from openai_server import OpenAiServer, events
from test_openai_tools import ASK, WEATHER

TEXT = "red blue green " * 20
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PLAIN = {"prompt": TEXT, "max_tokens": 60, "ignore_eos": True}
# path, request
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "several answers": (COMPLETIONS, PLAIN | {"n": 3, "temperature": 0.7, "seed": 4, "logprobs": 1}),
    "a minimum of tokens": (COMPLETIONS, PLAIN | {"ignore_eos": False, "min_tokens": 40}),
    "a forced call": (CHAT, {"messages": ASK, "tools": [WEATHER], "tool_choice": "required"}),
    "calls or text": (CHAT, {"messages": ASK, "tools": [WEATHER], "temperature": 0.8, "seed": 2}),
    "an object": (CHAT, {"messages": ASK, "response_format": {"type": "json_object"}, "max_tokens": 60}),
}


FEW = ("calls or text", "an object")  # right drafts, or none, as the texts are


def choices(door: OpenAiServer, path: str, body: dict[str, Any], drafts: bool) -> tuple[list[Any], int]:
    """Without names of calls, which are random, and how many drafts were accepted."""
    more = {"temperature": 0.0, "max_tokens": 80, **body, "speculative_decoding": drafts}
    status, _, answer = door.call(path, more)
    assert status == 200, answer
    for choice in answer["choices"]:
        for call in choice.get("message", {}).get("tool_calls") or []:
            del call["id"]
    details = answer["usage"].get("completion_tokens_details") or {}
    return rounded(answer["choices"]), details.get("accepted_prediction_tokens", 0)


def rounded(value: Any) -> Any:
    """Log probabilities can differ in the last bits."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return round(value, 3) if isinstance(value, float) else value


@pytest.mark.parametrize("name", CASES)
def test_drafts_change_no_answer(door: OpenAiServer, name: str) -> None:
    expected, none = choices(door, *CASES[name], drafts=False)
    found, accepted = choices(door, *CASES[name], drafts=True)
    assert found == expected
    assert none == 0 and (accepted > 0 or name in FEW)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_word_amid_accepted_drafts(door: OpenAiServer, stream: bool) -> None:
    """One that lies across tokens, so that only the text shows it."""
    ((plain,), accepted) = choices(door, COMPLETIONS, PLAIN, drafts=True)
    text = plain["text"]
    stop = text[len(text) // 2 - 3 : len(text) // 2 + 2]
    body = PLAIN | {"stop": [stop], "temperature": 0.0, "stream": stream}
    _, _, answer = door.call(COMPLETIONS, body)
    parts = events(answer) if stream else [answer]
    ended = [choice for part in parts for choice in part["choices"]]
    assert "".join(choice["text"] for choice in ended) == text[: text.index(stop)]
    assert ended[-1]["finish_reason"] == "stop" and accepted
