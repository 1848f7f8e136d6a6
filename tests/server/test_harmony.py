# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS through both APIs: a model that has learnt its answers, with reasoning and calls as Harmony writes
them."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai_server import said
from running import BothApis, both_running, build_repository

from harmony_model import ARGUMENTS, CHATS, RAIN, SUM, THOUGHT, Chat, function, harmony_model

ENDS = ("<|return|>", "<|call|>")
# Reasoning, content, calls and why the answer ended.
READ: dict[str, tuple[str, str, list[tuple[str, str]], str]] = {
    "high": ("The user wants a sum.", "It is four.", [], "stop"),
    "low": ("", "Four.", [], "stop"),
    "call": (THOUGHT, "", [("weather", ARGUMENTS)], "tool_calls"),
    "result": ("", "Yes, it rains.", [], "stop"),
    "preamble": ("", "I ask the clock.", [("now", "{}")], "tool_calls"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BothApis]:
    """Texts of the ensemble hold special tokens, which a client of Harmony reads itself. It has no outputs of
    log probs, logits and perf metrics."""
    folder = tmp_path_factory.mktemp("harmony")
    knobs = ("skip_special_tokens=false", "ensemble_report_outputs=false", "llm_instance_count=1")
    repository = build_repository(folder, *knobs, models={"gpt-oss": harmony_model(folder)}, kv_tokens=4096)
    with both_running(repository, folder) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: BothApis) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{server.openai_port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, _strict_response_validation=True) as made:
        yield made


def body(chat: Chat, **more: Any) -> dict[str, Any]:
    if chat.tools:
        more["tools"] = list(chat.tools)
    if chat.effort:
        more["reasoning_effort"] = chat.effort
    return {"model": "gpt-oss", "messages": chat.messages, "max_tokens": 80, "temperature": 0.0} | more


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("stream", [False, True])
def test_chats(client: openai.OpenAI, name: str, stream: bool) -> None:
    """Answers end with <|return|> or <|call|>, as nothing is learnt behind them."""
    answer = client.chat.completions.create(**body(CHATS[name], stream=stream))
    assert said(part.to_dict() for part in (answer if stream else [answer])) == READ[name]


@pytest.mark.parametrize("more", [{"tool_choice": "none"}, {"tools": []}], ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_was_not_allowed_is_content(
    client: openai.OpenAI, more: dict[str, Any], stream: bool
) -> None:
    answer = client.chat.completions.create(**body(CHATS["call"], stream=stream) | more)
    _, text, calls, reason = said(part.to_dict() for part in (answer if stream else [answer]))
    assert (text, calls, reason) == (ARGUMENTS, [], "stop")


@pytest.mark.parametrize("name", CHATS)
def test_the_ensemble_gives_the_same_as_text(server: BothApis, name: str) -> None:
    chat = CHATS[name]
    asked = {"text_input": chat.prompt, "max_tokens": 80, "exclude_input_in_output": True}
    status, answer = server.post(asked, "gpt-oss")
    expected = chat.answer
    for end in ENDS:
        expected = expected.removesuffix(end)
    assert (status, answer["text_output"]) == (200, expected)
    parts = server.post({**asked, "stream": True}, "gpt-oss", stream=True)
    assert "".join(part["text_output"] for part in parts) == expected and len(parts) > 1


def test_special_tokens_in_texts_are_found_by_stop_words(server: BothApis) -> None:
    chat = CHATS["high"]
    for word in ("<|end|>", "sum.<|end|><|start|>assi"):
        asked = {"text_input": chat.prompt, "max_tokens": 80, "exclude_input_in_output": True}
        asked |= {"stop_words": [word], "exclude_stop_words_in_output": True}
        expected = chat.answer.partition(word)[0]
        assert server.post(asked, "gpt-oss")[1]["text_output"] == expected
        parts = server.post({**asked, "stream": True}, "gpt-oss", stream=True)
        assert "".join(part["text_output"] for part in parts) == expected


def test_what_the_ensemble_has_no_output_for_is_refused_and_llm_has_it(
    server: BothApis,
) -> None:
    asked: dict[str, Any] = {"text_input": "Once", "max_tokens": 2}
    for name in ("log_probs", "context_logits", "generation_logits", "perf_metrics"):
        status, answer = server.post({**asked, f"return_{name}": True}, "gpt-oss")
        assert status == 400 and f"return_{name} is true, but this ensemble has no output" in answer["error"]
        assert "build the model repository with ensemble_report_outputs true" in answer["error"]
        assert "text_output" in server.post({**asked, f"return_{name}": False}, "gpt-oss")[1]
    counted = {"return_num_output_tokens": True, "num_return_sequences": 2, "stream": True}
    names = {"text_output", "finish_reason", "num_output_tokens", "sequence_index"}
    assert {*server.post({**asked, **counted}, "gpt-oss", stream=True)[-1]} >= names
    ids = {"input_ids": [5, 6], "input_lengths": 2, "request_output_len": 2, "return_log_probs": True}
    assert len(server.post(ids, "gpt-oss_llm")[1]["output_log_probs"]) == 2


def test_responses_have_items_for_reasoning_and_calls(client: openai.OpenAI) -> None:
    tools = [{"type": "function", **tool["function"]} for tool in CHATS["call"].tools]
    asked: dict[str, Any] = {"model": "gpt-oss", "tools": tools, "temperature": 0.0}
    first = client.responses.create(input=RAIN, **asked)  # type: ignore[call-overload]
    reasoning, call = first.output
    assert reasoning.type == "reasoning" and reasoning.content[0].text == THOUGHT
    assert (call.type, call.name, call.arguments) == ("function_call", "weather", ARGUMENTS)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    turns = [*RAIN, reasoning.to_dict(), call.to_dict(), result]
    assert client.responses.create(input=turns, **asked).output_text == READ["result"][1]  # type: ignore[call-overload]
    for effort in ("high", "low"):
        more: dict[str, Any] = {"model": "gpt-oss", "temperature": 0.0, "reasoning": {"effort": effort}}
        assert client.responses.create(input=SUM, **more).output_text == READ[effort][1]


def test_messages_have_blocks_for_reasoning_and_calls(server: BothApis) -> None:
    tools = [
        {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}
        for tool in CHATS["call"].tools
    ]
    asked: dict[str, Any] = {"model": "gpt-oss", "tools": tools, "max_tokens": 80, "temperature": 0.0}
    status, text = server.openai("/v1/messages", asked | {"messages": RAIN})
    answer = json.loads(text)
    assert (status, answer["stop_reason"]) == (200, "tool_use"), answer
    thinking, call = answer["content"]
    assert thinking["thinking"] == THOUGHT and call["input"] == json.loads(ARGUMENTS)
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "rain"}
    turns = [
        *RAIN,
        {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": [result]},
    ]
    _, text = server.openai("/v1/messages", asked | {"messages": turns})
    assert json.loads(text)["content"][-1]["text"] == READ["result"][1]


def test_guides(client: openai.OpenAI) -> None:
    """Strict functions leave the reasoning free; an answer that is JSON is a final message from its begin."""
    chat = CHATS["call"]
    strict = function("weather", strict=True, city={"type": "string"})
    (choice,) = client.chat.completions.create(**body(chat, tools=[strict, *chat.tools[1:]])).choices
    assert choice.message.tool_calls[0].function.arguments == ARGUMENTS
    assert choice.message.to_dict()["reasoning_content"] == THOUGHT
    forced = {"type": "function", "function": {"name": "weather"}}
    (choice,) = client.chat.completions.create(**body(chat, tool_choice=forced, max_tokens=300)).choices
    assert choice.message.tool_calls[0].function.name == "weather"
    schema = {"type": "object", "properties": {"sum": {"enum": [4]}}, "required": ["sum"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}
    (choice,) = client.chat.completions.create(**body(CHATS["high"], response_format=form)).choices
    assert json.loads(choice.message.content) == {"sum": 4}
    assert "reasoning_content" not in choice.message.to_dict()
