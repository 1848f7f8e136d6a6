# SPDX-License-Identifier: Apache-2.0
"""What clients send that has no effect here, and what they may send and ask otherwise: encodings of bodies,
pages of other origins, the description of the API. No engine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashinfer_backend.openai import requests
from flashinfer_backend.openai.chat import add_effort
from flashinfer_backend.openai.errors import ApiError
from flashinfer_backend.openai.no_effect import NO_EFFECT
from flashinfer_backend.openai.responses import messages_of
from flashinfer_backend.openai.template import ChatTemplate, plain_messages

DOCS = Path(__file__).parents[2] / "docs" / "openai.md"
CHAT: Any = {"messages": []}
RESPONSE: Any = {"input": "x"}
MESSAGE: Any = {"messages": [], "max_tokens": 1}


@pytest.mark.parametrize(
    ("kind", "base", "accepted", "refused"),
    [
        (requests.ChatRequest, CHAT, {"prompt_cache_retention": "24h", "user": "x"}, {}),
        (requests.ChatRequest, CHAT, {"service_tier": "flex"}, {"service_tier": "priority"}),
        (requests.CompletionRequest, {"prompt": "x"}, {"length_penalty": 1.0}, {"length_penalty": 0.5}),
        (requests.CompletionRequest, {"prompt": "x"}, {"use_beam_search": False}, {"use_beam_search": True}),
        (requests.ChatRequest, CHAT, {"early_stopping": False}, {"early_stopping": True}),
        (requests.ChatRequest, CHAT, {"verbosity": "low"}, {"verbosity": "loud"}),
        (requests.ResponsesRequest, RESPONSE, {"max_tool_calls": 3}, {"max_tool_calls": 0}),
        (requests.ResponsesRequest, RESPONSE, {"truncation": "auto"}, {"truncation": "middle"}),
        (requests.MessagesRequest, MESSAGE, {"service_tier": "standard_only"}, {"speed": "fast"}),
    ],
)
def test_fields_that_ask_for_nothing(kind: Any, base: Any, accepted: Any, refused: Any) -> None:
    requests.decode(kind, json.dumps({**base, **accepted}).encode())
    for name in refused:
        with pytest.raises(ApiError, match=f"^{name}") as wrong:
            requests.decode(kind, json.dumps({**base, **refused}).encode())
        assert wrong.value.param == name


def test_the_page_shows_the_table() -> None:
    shown = DOCS.read_text().partition("## Fields without effect")[2].partition("\n## ")[0]
    listed = set(re.findall(r"`([a-z_.]+)`", "".join(re.findall(r"^\| (`.*?) \|", shown, re.MULTILINE))))
    assert listed == NO_EFFECT.keys() | {"text.verbosity", "reasoning.summary"}


@pytest.mark.parametrize(
    ("source", "effort", "ignored", "variables"),
    [
        ("{{ reasoning_effort }}", "low", False, {"reasoning_effort": "low"}),
        ("{{ reasoning_effort }}", "none", False, {"reasoning_effort": "none"}),
        ("x", "none", False, {}),
        ("{% if enable_thinking %}{% endif %}", "none", False, {"enable_thinking": False}),
        ("x", "low", True, {}),
        ("x", "low", False, None),
        ("x", 5, True, None),
    ],
)
def test_an_effort_that_the_template_has_not(
    source: str, effort: Any, ignored: bool, variables: dict[str, Any] | None
) -> None:
    door: Any = SimpleNamespace(
        template=ChatTemplate(source, {}), model=SimpleNamespace(ignore_effort=ignored)
    )
    found: dict[str, Any] = {}
    if variables is None:
        with pytest.raises(ApiError, match=r"^reasoning\.effort is ") as wrong:
            add_effort(door, found, effort, "reasoning.effort")
        assert wrong.value.param == "reasoning.effort"
    else:
        add_effort(door, found, effort, "reasoning.effort")
        assert found == variables


def test_errors_of_items_name_the_items() -> None:
    def wrong(items: list[dict[str, Any]]) -> tuple[str, str | None]:
        with pytest.raises(ApiError) as error:
            plain_messages(*messages_of(requests.ResponsesRequest(input=items)), field="input")
        return error.value.message, error.value.param

    parts = [{"type": "input_text", "text": "a"}, {"type": "input_image"}]
    message, param = wrong([{"role": "user", "content": parts}])
    assert param == "input[0].content[1]" and message.startswith(param)
    message, param = wrong([{"role": "user", "content": "a"}, {"role": "robot", "content": "a"}])
    assert param == "input[1]" and message.startswith("input[1].role")
    call = {"type": "function_call", "name": "f", "arguments": json.dumps([0] * 70000)}
    message, param = wrong([call])
    assert param == "input" and "of all calls in input have" in message
