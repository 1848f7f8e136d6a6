# SPDX-License-Identifier: Apache-2.0
"""/v1/responses through OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pydantic
import pytest
from openai_server import OpenAiServer

ASK = "Why is the sky blue?"
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Ulm"]}}, "required": ["city"]},
    "strict": True,
}


class Animal(pydantic.BaseModel):
    kind: Literal["cat", "dog"]


def respond(client: openai.OpenAI, **more: Any) -> Any:
    body = {"model": "tiny-chat", "input": ASK, "max_output_tokens": 40, "temperature": 0.0, **more}
    return client.responses.create(**body)


def test_text_is_that_of_a_chat(client: openai.OpenAI) -> None:
    answer = respond(client)
    chat = client.chat.completions.create(
        model="tiny-chat", messages=[{"role": "user", "content": ASK}], max_tokens=40, temperature=0.0
    )
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage.output_tokens == chat.usage.completion_tokens
    ended = {"stop": "completed", "length": "incomplete"}[chat.choices[0].finish_reason]
    assert answer.status == ended
    short = respond(client, max_output_tokens=2)
    assert (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert short.output[0].status == "incomplete"


def test_items_are_messages(client: openai.OpenAI) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": ASK}]},
        {
            "type": "reasoning",
            "id": "r",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm"}],
        },
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": "Ulm"}'},
        {"type": "function_call_output", "call_id": "c", "output": "Rain."},
        {"type": "message", "role": "user", "content": ASK},
    ]
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    chat = client.chat.completions.create(
        model="tiny-chat",
        messages=[
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": ASK},
            {"role": "assistant", "content": None, "tool_calls": [call]},  # type: ignore[typeddict-item]
            {"role": "tool", "tool_call_id": "c", "content": "Rain."},
            {"role": "user", "content": ASK},
        ],
        max_tokens=40,
        temperature=0.0,
    )
    answer = respond(client, input=items, instructions="Be kind.")
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage.input_tokens == chat.usage.prompt_tokens


@pytest.mark.parametrize("kind", ["text", "call", "reasoning"])
def test_a_stream_says_the_same(client: openai.OpenAI, kind: str) -> None:
    more: dict[str, Any] = {}
    if kind == "call":
        more = {"tools": [TOOL], "tool_choice": {"type": "function", "name": "weather"}}
    elif kind == "reasoning":
        more = {"extra_body": {"chat_template_kwargs": {"think_first": True}}}
    whole = respond(client, **more)
    events = list(respond(client, stream=True, **more))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:3]] == [
        *("response.created", "response.in_progress", "response.output_item.added"),
    ]
    final = events[-1].response
    assert events[-1].type == f"response.{whole.status}"
    assert final.usage.output_tokens == whole.usage.output_tokens
    (item,) = final.output
    deltas = "".join(event.delta for event in events if event.type.endswith(".delta"))
    if kind == "call":
        assert json.loads(deltas) == {"city": "Ulm"} and item.arguments == deltas
        assert (whole.output[0].name, whole.output[0].arguments) == ("weather", deltas)
    elif kind == "reasoning":
        assert item.content[0].text == deltas == whole.output[0].content[0].text
        assert whole.usage.output_tokens_details.reasoning_tokens > 0
    else:
        assert final.output_text == deltas == whole.output_text


def test_the_clients_own_models_of_answers(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(
        model="tiny-chat", input=ASK, text_format=Animal, max_output_tokens=200, temperature=0.0
    )
    assert isinstance(parsed.output_parsed, Animal)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"previous_response_id": "x"}, "keeps no responses"),
        ({"store": True}, "keeps nothing"),
        ({"tools": [{"type": "web_search"}]}, "only functions"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"truncation": "auto"}, "truncation"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "the last event has it"),
        ({"text": {"format": "json_object"}}, "text.format is"),
        ({"input": [{"type": "reasoning", "content": 1}]}, "input[0].content should be a list"),
        (
            {"input": [{"type": "reasoning", "content": [{"text": None}]}]},
            "input[0].content should be a list",
        ),
        (
            {
                "tools": [TOOL],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": ["weather"]},
            },
            "tool_choice should be",
        ),
    ],
)
def test_what_is_not_supported_is_named(door: OpenAiServer, more: dict[str, Any], words: str) -> None:
    status, message, _, _ = door.error("/v1/responses", {"input": ASK, **more})
    assert status == 400 and words in message
