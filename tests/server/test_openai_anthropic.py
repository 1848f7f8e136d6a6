# SPDX-License-Identifier: Apache-2.0
"""Anthropic's Messages API, through Anthropic's own package, with a model that answers by a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import pydantic
import pytest
from openai_server import KEY, OpenAiServer
from running import fetch

if TYPE_CHECKING:
    import anthropic

ASK: Any = [{"role": "user", "content": "How is the weather in Ulm?"}]
WEATHER: Any = {
    "name": "weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"enum": ["Ulm"]}}, "required": ["city"]},
}
CALL = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Ulm"}}
CALLED: Any = [*ASK, {"role": "assistant", "content": [{"type": "text", "text": "I look."}, CALL]}]
TURN: Any = {"model": "scripted", "max_tokens": 50, "messages": ASK}
COLD: Any = {"extra_body": {"temperature": 0}}  # which the package does not name any more
THINK: Any = {"thinking": {"type": "enabled", "budget_tokens": 20}}


@pytest.fixture
def client(scripted: OpenAiServer) -> Iterator[anthropic.Anthropic]:
    """It checks every answer against its types."""
    import anthropic

    options: Any = {"base_url": scripted.url, "api_key": KEY, "max_retries": 0}
    with anthropic.Anthropic(**options, _strict_response_validation=True) as made:
        yield made


def series(events: list[Any]) -> list[str]:
    """The events' types, one for a run of the same."""
    names = [
        getattr(event.delta, "type", event.type) if event.type == "content_block_delta" else event.type
        for event in events
    ]
    return [name for n, name in enumerate(names) if n == 0 or names[n - 1] != name]


def dicts(message: Any) -> list[dict[str, Any]]:
    """Content, without what the package adds to it."""
    blocks = [block.to_dict() for block in message.content]
    return [{key: value for key, value in block.items() if key != "parsed_output"} for block in blocks]


def shown(client: anthropic.Anthropic, **more: Any) -> int:
    return client.messages.count_tokens(model="scripted", messages=ASK, **more).input_tokens


def test_text_and_its_stream(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(**TURN)
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "Hello, world."}]
    assert (answer.stop_reason, answer.stop_sequence, answer.role, answer.model) == (
        "end_turn",
        None,
        "assistant",
        "scripted",
    )
    counted = client.messages.count_tokens(model="scripted", messages=ASK).input_tokens
    cached = answer.usage.cache_read_input_tokens or 0
    assert answer.usage.input_tokens + cached == counted
    assert answer.usage.output_tokens >= 3
    with client.messages.stream(**TURN) as stream:
        assert "".join(stream.text_stream) == "Hello, world."
        final = stream.get_final_message()
    assert final.content[0].to_dict() == answer.content[0].to_dict()
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", answer.usage.output_tokens)
    block = ["content_block_start", "text_delta", "content_block_stop"]
    assert series(list(client.messages.create(**TURN, stream=True))) == [
        "message_start",
        *block,
        "message_delta",
        "message_stop",
    ]


def test_why_an_answer_ends(client: anthropic.Anthropic) -> None:
    def ended(**more: Any) -> tuple[Any, ...]:
        answer = client.messages.create(**{**TURN, **more})
        with client.messages.stream(**{**TURN, **more}) as stream:
            final = stream.get_final_message()
        assert (final.stop_reason, final.stop_sequence) == (answer.stop_reason, answer.stop_sequence)
        assert dicts(final) == dicts(answer)
        return answer.stop_reason, answer.stop_sequence, answer.content[0].text  # type: ignore[union-attr]

    assert ended(max_tokens=1) == ("max_tokens", None, "Hello")
    assert ended(stop_sequences=["nothing", "world"]) == ("stop_sequence", "world", "Hello, ")
    with client.messages.stream(**{**TURN, "max_tokens": 1_000_000}) as stream:  # more than its context holds
        assert stream.get_final_message().stop_reason == "end_turn"


def test_a_call_and_its_result(client: anthropic.Anthropic) -> None:
    tools: Any = {"tools": [WEATHER]}
    answer = client.messages.create(**TURN, **tools)
    text, call = answer.content
    assert (answer.stop_reason, text.to_dict()) == ("tool_use", {"type": "text", "text": "I look."})
    assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Ulm"})
    events = list(client.messages.create(**TURN, **tools, stream=True))
    block = ["content_block_start", "text_delta", "content_block_stop"]
    called = ["content_block_start", "input_json_delta", "content_block_stop"]
    assert series(events) == ["message_start", *block, *called, "message_delta", "message_stop"]
    written = [
        e.delta.partial_json
        for e in events
        if getattr(getattr(e, "delta", None), "type", "") == "input_json_delta"
    ]
    assert json.loads("".join(written)) == {"city": "Ulm"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Rain."}]}
    turns = [
        *ASK,
        answer.to_param(),
        {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
    ]
    again = client.messages.create(**{**TURN, "messages": turns}, **tools)
    assert again.content[0].to_dict() == {"type": "text", "text": "It rains in Ulm."}
    # Arguments that max_tokens cuts are those of no call.
    cut = client.messages.create(**{**TURN, "max_tokens": 3}, **tools)
    assert (cut.stop_reason, cut.content[1].to_dict()["input"]) == ("max_tokens", {})
    lost: Any = {"name": "lost", "input_schema": {"type": "object"}}
    ended = client.messages.create(**TURN, tools=[lost])  # by the model itself, in its arguments
    assert (ended.stop_reason, ended.content[0].to_dict()["input"]) == ("end_turn", {})


@pytest.mark.parametrize(
    "choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}]
)
def test_a_forced_call(client: anthropic.Anthropic, choice: Any) -> None:
    answer = client.messages.create(**TURN, tools=[WEATHER], tool_choice=choice, **COLD)
    (call,) = answer.content
    assert (answer.stop_reason, call.to_dict()["input"]) == ("tool_use", {"city": "Ulm"})
    assert shown(client, tools=[WEATHER], tool_choice={"type": "none"}) == shown(client)


def test_thinking(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(**TURN, **THINK)
    thinking, text = answer.content
    assert (thinking.type, thinking.thinking, text.text) == ("thinking", "Let me think.", "It is four.")
    assert answer.usage.output_tokens_details.thinking_tokens == 2
    with client.messages.stream(**TURN, **THINK) as stream:
        kinds = series([event for event in stream if event.type.startswith(("message", "content"))])
        assert dicts(stream.get_final_message()) == dicts(answer)
    block = ["content_block_start", "thinking_delta", "signature_delta", "content_block_stop"]
    assert kinds[1 : 1 + len(block)] == block
    # The signature brings thinking back that the client was not shown.
    hidden = {"thinking": {**THINK["thinking"], "display": "omitted"}}
    quiet = client.messages.create(**TURN, **hidden).content[0]
    assert quiet.to_dict() == {"type": "thinking", "thinking": "", "signature": thinking.signature}
    counts = []
    for block in (thinking, quiet):
        turns = [*ASK, {"role": "assistant", "content": [block.to_dict(), text.to_dict()]}, *ASK]
        counts.append(client.messages.count_tokens(model="scripted", messages=turns).input_tokens)
    assert counts[0] == counts[1]
    off = client.messages.create(**TURN, thinking={"type": "disabled"})
    assert [block.type for block in off.content] == ["text"]


def test_what_the_model_is_shown(scripted: OpenAiServer, client: anthropic.Anthropic) -> None:
    """As a chat of the same messages."""
    failed = {"type": "tool_result", "tool_use_id": "t1", "content": "No network.", "is_error": True}
    body: Any = {
        "system": [
            {"type": "text", "text": "You are kind.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be brief."},
        ],
        "messages": [*CALLED, {"role": "user", "content": [failed, {"type": "text", "text": "Well?"}]}],
        "tools": [{**WEATHER, "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
    }
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": CALL["input"]}}
    function = {
        "name": "weather",
        "description": WEATHER["description"],
        "parameters": WEATHER["input_schema"],
    }
    chat = {
        "messages": [
            {"role": "system", "content": "You are kind.\nBe brief."},
            *ASK,
            {"role": "assistant", "content": "I look.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "t1", "content": "Error: No network."},
            {"role": "user", "content": "Well?"},
        ],
        "tools": [{"type": "function", "function": function}],
    }
    counted = client.messages.count_tokens(model="scripted", **body).input_tokens
    assert counted == scripted.call("/tokenize", chat, KEY)[2]["count"]
    # A last turn of the assistant's is continued.
    turns = [*ASK, {"role": "assistant", "content": "<|text 0|>Hello"}]
    assert client.messages.create(**{**TURN, "messages": turns}).content[0].to_dict()["text"] == ", world."


def test_helpers_of_the_package(scripted: OpenAiServer, client: anthropic.Anthropic) -> None:
    import anthropic

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Weather of a city."""
        return f"Rain in {city}"

    runner = client.beta.messages.tool_runner(**TURN, tools=[weather])
    assert [message.stop_reason for message in runner] == ["tool_use", "end_turn"]
    runner = client.beta.messages.tool_runner(**TURN, tools=[weather], stream=True)
    finals = [stream.get_final_message() for stream in runner]
    assert finals[-1].content[0].text == "It rains in Ulm."  # type: ignore[union-attr]

    class City(pydantic.BaseModel):
        name: Literal["Ulm"]

    assert client.messages.parse(**TURN, output_format=City, **COLD).parsed_output == City(name="Ulm")

    async def together() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=scripted.url, auth_token=KEY, api_key=None) as own:
            async with own.messages.stream(**TURN) as stream:
                text = "".join([text async for text in stream.text_stream])
            return [text, (await own.messages.create(**TURN)).content[0].text]  # type: ignore[union-attr]

    assert asyncio.run(together()) == ["Hello, world."] * 2


def test_what_claude_code_sends(scripted: OpenAiServer, client: anthropic.Anthropic) -> None:
    """Fields that its documents and releases name, with many tools, as a stream."""
    cached = {"type": "ephemeral"}
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "properties": {}}
    others = [
        {"name": f"mcp__{'server' * 12}__tool{n}", "description": "Does it.", "input_schema": schema}
        for n in range(30)
    ]
    body: Any = {
        **TURN,
        "max_tokens": 32000,
        "system": [
            {"type": "text", "text": "You are Claude Code.", "cache_control": cached},
            {"type": "text", "text": "Tools are below.", "cache_control": {**cached, "ttl": "1h"}},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": cached}]}
        ],
        "tools": [{**WEATHER, "eager_input_streaming": True}, *others],
        "metadata": {"user_id": "user_1_account__session_2"},
        "thinking": {"type": "adaptive"},
        "extra_body": {"temperature": 1},
        "betas": ["claude-code-20250219", "context-management-2025-06-27"],
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }
    with client.beta.messages.stream(**body) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.content[1].to_dict()["input"]) == ("tool_use", {"city": "Ulm"})
    counted = {key: body[key] for key in ("model", "system", "messages", "tools", "betas")}
    usage = final.usage
    sent = usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert client.beta.messages.count_tokens(**counted).input_tokens == sent


def test_errors_are_those_of_the_package(scripted: OpenAiServer, client: anthropic.Anthropic) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError, match="does not exist") as missing:
        client.messages.create(**{**TURN, "model": "other"})
    assert missing.value.request_id == missing.value.body["request_id"]  # type: ignore[index]
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="max_tokens: ") as refused:
        client.messages.create(**{**TURN, "max_tokens": 0})
    assert refused.value.type == "invalid_request_error"
    long = [{"role": "user", "content": "word " * 40000}]
    with (
        pytest.raises(anthropic.BadRequestError, match="prompt is too long"),
        client.messages.stream(**{**TURN, "messages": long}),
    ):
        pass
    with pytest.raises(anthropic.AuthenticationError, match="x-api-key"):
        client.with_options(api_key="sk-two").messages.create(**TURN)
    assert client.messages.create(**TURN)._request_id
    for key, status in ((KEY, 200), ("sk-two", 401)):  # as other clients send it
        sent = {"x-api-key": key, "anthropic-version": "2023-06-01"}
        found, headers, text = fetch(f"{scripted.url}/v1/messages", json.dumps(TURN).encode(), sent)
        assert found == status
        assert status == 200 or headers["request-id"] == json.loads(text)["request_id"]
