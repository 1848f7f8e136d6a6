# SPDX-License-Identifier: Apache-2.0
"""Chats with a template like those of Qwen3.5 and later: the prompt opens the reasoning, calls are XML."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai_server import OpenAiServer, events, openai_running, said

from scripted_model import QWEN, QWEN_TEMPLATE, scripted_model

ASK: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The weather?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
CALL = ("weather", {"city": "Ulm", "days": 3})
FIRST = "I need the weather.", "I look.", [CALL], "tool_calls"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAiServer]:
    folder = tmp_path_factory.mktemp("qwen")
    model = scripted_model(folder / "qwen", QWEN, QWEN_TEMPLATE)
    with openai_running(model, folder) as started:
        yield started


def answer(server: OpenAiServer, messages: list[Any], stream: bool = False, **more: Any) -> Any:
    """Reasoning, content, calls, and why the answer ended."""
    body = {"messages": messages, "temperature": 0, "stream": stream, **more}
    status, _, found = server.call("/v1/chat/completions", body)
    assert status == 200, found
    reasoning, content, calls, finish = said(events(found) if stream else [found])
    return reasoning, content, [(name, json.loads(arguments)) for name, arguments in calls], finish


def shown(server: OpenAiServer, messages: list[Any], **more: Any) -> str:
    """The prompt's text."""
    tokens = server.call("/tokenize", {"messages": messages, **more})[2]["tokens"]
    return str(server.call("/detokenize", {"tokens": tokens})[2]["prompt"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_and_its_result(server: OpenAiServer, stream: bool) -> None:
    assert answer(server, ASK, stream, tools=TOOLS) == FIRST
    function = {"name": CALL[0], "arguments": json.dumps(CALL[1])}
    call = {"id": "1", "type": "function", "function": function}
    message = {"role": "assistant", "reasoning_content": FIRST[0], "content": FIRST[1], "tool_calls": [call]}
    turns = [*ASK, message, {"role": "tool", "tool_call_id": "1", "content": "rain"}]
    assert answer(server, turns, stream, tools=TOOLS) == ("That was simple.", "It rains in Ulm.", [], "stop")
    text = (
        "[assistant]\n<think>\nI need the weather.\n</think>\n\nI look.\n\n<tool_call>\n<function=weather>\n"
        "<parameter=city>\nUlm\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
        "[end]\n[user]\n<tool_response>\nrain\n</tool_response>[end]\n[assistant]\n<think>\n"
    )
    assert text in shown(server, turns, tools=TOOLS)
    later = [*turns, {"role": "assistant", "content": "Rain."}, {"role": "user", "content": "And then?"}]
    dropped = shown(server, later, tools=TOOLS, chat_template_kwargs={"preserve_thinking": False})
    assert "I need" not in dropped and "I need" in shown(server, later, tools=TOOLS)


def test_without_reasoning(server: OpenAiServer) -> None:
    expected = "", "It is four.", [], "stop"
    for stream in (False, True):
        assert answer(server, ASK, stream, reasoning_effort="none") == expected
        quick = {"chat_template_kwargs": {"enable_thinking": False}}
        assert answer(server, ASK, stream, **quick) == expected
    asked = {"input": "Two and two?", "reasoning": {"effort": "none"}, "temperature": 0}
    (item,) = server.call("/v1/responses", asked)[2]["output"]
    assert item["content"][0]["text"] == expected[1]
    body = {"messages": ASK[1:], "max_tokens": 50, "model": "qwen"}
    (block,) = server.call("/v1/messages", body | {"thinking": {"type": "disabled"}})[2]["content"]
    assert (block["type"], block["text"]) == ("text", expected[1])


def test_an_effort_that_agents_send(server: OpenAiServer) -> None:
    """The template refuses `high`."""
    assert answer(server, ASK, tools=TOOLS, reasoning_effort="high") == FIRST
    body = {"messages": ASK[1:], "max_tokens": 50, "model": "qwen", "output_config": {"effort": "high"}}
    thinking, *_ = server.call("/v1/messages", body)[2]["content"]
    assert thinking["thinking"] == FIRST[0]
    asked = {"messages": ASK, "reasoning_effort": "extreme"}
    status, message, *_ = server.error("/v1/chat/completions", asked)
    assert status == 400 and "no effort extreme" in message
