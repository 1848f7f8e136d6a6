# SPDX-License-Identifier: Apache-2.0
"""/v1/responses through OpenAI's own client, and responses that the server keeps."""

import base64
import json
from typing import Any, Literal

import openai
import pydantic
import pytest
from openai_server import KEY, OpenAiServer

from flashinfer_backend.openai.requests import ResponsesRequest
from flashinfer_backend.openai.responses import messages_of

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


def series(kind: str) -> list[str]:
    """The events of an output item, a delta for any number of them, in the order that OpenAI's API has."""
    added, done = "response.output_item.added", "response.output_item.done"
    if kind == "function_call":
        name = "response.function_call_arguments"
        return [added, f"{name}.delta", f"{name}.done", done]
    name = "response.output_text" if kind == "message" else "response.reasoning_text"
    part = "response.content_part"
    return [added, f"{part}.added", f"{name}.delta", f"{name}.done", f"{part}.done", done]


def check_events(events: list[Any]) -> list[str]:
    """That the events of a stream have their order and add up to the last one's output; kinds of its items.
    The client has checked each against its type."""
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    between, final = events[2:-1], events[-1].response
    for n, item in enumerate(final.output):
        own = [event for event in between if event.output_index == n]
        names = [event.type for event in own]
        assert list(dict.fromkeys(names)) == series(item.type)
        assert all(names.count(name) == 1 for name in names if not name.endswith(".delta"))
        assert {event.item_id for event in own[1:-1]} == {item.id} == {own[0].item.id}
        assert own[0].item.status == "in_progress" and own[-1].item == item
        said = "".join(event.delta for event in own if event.type.endswith(".delta"))
        if item.type == "function_call":
            assert own[0].item.arguments == "" and own[-2].arguments == item.arguments == said
        else:
            (part,) = item.content
            assert own[0].item.content == [] and own[1].part.to_dict() == {**part.to_dict(), "text": ""}
            assert own[-3].text == part.text == said and own[-2].part.to_dict() == part.to_dict()
    assert [event.output_index for event in between] == sorted(event.output_index for event in between)
    return [item.type for item in final.output]


def test_reasoning_that_the_client_keeps(client: openai.OpenAI) -> None:
    """LiteLLM and the Vercel AI SDK ask for it, and send it back without the text."""
    more: Any = {
        "include": ["reasoning.encrypted_content"],
        "extra_body": {"chat_template_kwargs": {"think_first": True}},
    }
    events = list(respond(client, stream=True, **more))
    (item,) = (e.item for e in events if e.type == "response.output_item.done")
    for kept in (item, respond(client, **more).output[0]):
        assert (kept.type, base64.b64decode(kept.encrypted_content).decode()) == (
            "reasoning",
            item.content[0].text,
        )
    sent = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": item.encrypted_content}
    request = ResponsesRequest(input=[{"role": "user", "content": ASK}, sent])
    assert messages_of(request)[0][1]["reasoning_content"] == item.content[0].text
    assert respond(client, input=[*request.input, {"role": "user", "content": ASK}]).output_text
    assert not hasattr(respond(client).output[0], "encrypted_content")


def dicts(tokens: Any) -> list[dict[str, Any]]:
    return [token.to_dict() for token in tokens]


def test_log_probs_are_those_of_a_chat(client: openai.OpenAI) -> None:
    """Those of the text alone: a chat also has them of the stop word behind it."""
    (choice,) = client.chat.completions.create(
        model="tiny-chat", messages=[{"role": "user", "content": ASK}], max_tokens=40, temperature=0.0,
        logprobs=True, top_logprobs=3,
    ).choices  # fmt: skip
    more: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 3}
    (part,) = respond(client, **more).output[0].content
    expected = dicts(part.logprobs)
    assert "".join(token["token"] for token in expected) == part.text == choice.message.content
    assert expected == dicts(choice.logprobs.content)[: len(expected)]  # type: ignore[union-attr]
    events = list(respond(client, stream=True, **more))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1 and [one for each in deltas for one in dicts(each.logprobs)] == expected
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert dicts(done.logprobs) == expected
    final = events[-1].response
    assert final.top_logprobs == 3 and final.output[0].content[0].to_dict()["logprobs"] == expected
    alone = respond(client, include=more["include"]).output[0].content[0].logprobs
    assert dicts(alone) == [token | {"top_logprobs": []} for token in expected]
    assert not respond(client, top_logprobs=0).output[0].content[0].logprobs
    thinks = {"extra_body": {"chat_template_kwargs": {"think_first": True}}}
    assert [item.type for item in respond(client, **more, **thinks).output] == ["reasoning"]


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
    kinds = {"text": "message", "call": "function_call", "reasoning": "reasoning"}
    assert check_events(events) == [kinds[kind]]
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


def test_items_of_several_kinds_stream_one_after_the_other(client: openai.OpenAI) -> None:
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'
    text = json.dumps(f"Let me see.\n{call}\n{call}\nDone.")
    more = {"tools": [TOOL], "extra_body": {"structured_outputs": {"grammar": f"root ::= {text}"}}}
    whole, events = (
        respond(client, max_output_tokens=200, **more),
        list(respond(client, max_output_tokens=200, stream=True, **more)),
    )
    kinds = ["message", "function_call", "function_call", "message"]
    assert check_events(events) == [item.type for item in whole.output] == kinds
    for output in (whole.output, events[-1].response.output):
        assert [output[n].content[0].text for n in (0, 3)] == ["Let me see.", "Done."]


def test_the_clients_own_models_of_answers(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(
        model="tiny-chat", input=ASK, text_format=Animal, max_output_tokens=200, temperature=0.0
    )
    assert isinstance(parsed.output_parsed, Animal)


LOOSE: Any = {**TOOL, "strict": False, "parameters": {"type": "object", "properties": {}}}


def test_a_conversation_that_the_server_keeps(scripted: OpenAiServer) -> None:
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key=KEY, max_retries=0) as client:
        ask: Any = {"model": "scripted", "tools": [LOOSE]}
        first = client.responses.create(**ask, input="Weather?", instructions="Be kind.")
        call = first.output[1]
        assert (call.type, first.store) == ("function_call", True)  # type: ignore[attr-defined]
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}  # type: ignore[union-attr]
        *_, last = client.responses.create(**ask, input=[result], previous_response_id=first.id, stream=True)
        second = last.response  # type: ignore[union-attr]
        assert (second.output_text, second.previous_response_id) == ("It rains in Ulm.", first.id)
        # The same as with all items sent or referred to, and without the earlier instructions.
        sent: Any = [
            {"role": "user", "content": "Weather?"},
            *[item.to_dict() for item in first.output],
            result,
        ]
        whole = client.responses.create(**ask, input=sent, store=False)
        assert whole.usage and second.usage and whole.usage.input_tokens == second.usage.input_tokens
        sent[1:3] = [{"type": "item_reference", "id": item.id} for item in first.output]
        referring = client.responses.create(**ask, input=sent)
        assert referring.usage and referring.usage.input_tokens == whole.usage.input_tokens
        more: Any = {"previous_response_id": referring.id, "input": "And now?"}
        assert client.responses.create(**ask, **more).output_text == "It rains in Ulm."
        counted = client.responses.input_tokens.count(**ask, input="And now?", previous_response_id=second.id)
        again = client.responses.create(**ask, input="And now?", previous_response_id=second.id)
        assert again.usage and counted.input_tokens == again.usage.input_tokens
        assert again.usage and again.usage.input_tokens > second.usage.input_tokens
        assert client.responses.retrieve(second.id).to_dict() == second.to_dict()
        # Its input, oldest first, in pages of two, by ids that stay.
        pages: Any = client.responses.input_items.list(second.id, limit=2, order="asc")
        items = [item.to_dict() for item in pages]
        assert (len(items), items[0]["type"]) == (4, "message")
        assert items[0]["content"] == [{"type": "input_text", "text": "Weather?"}]
        assert items[1:3] == [item.to_dict() for item in first.output] and items[3]["output"] == "Rain."
        latest: Any = client.responses.input_items.list(second.id, after=items[3]["id"])
        assert [item.to_dict() for item in latest] == items[2::-1]
        for wrong_query, param in (({"limit": 101}, "limit"), ({"after": "x"}, "after"), ({"x": 1}, "x")):
            with pytest.raises(openai.BadRequestError) as refused:
                client.responses.input_items.list(second.id, extra_query=wrong_query)
            assert refused.value.param == param
        for wrong_query, param in (({"stream": "true"}, "stream"), ({"include": "x"}, "include")):
            with pytest.raises(openai.BadRequestError) as refused:
                client.responses.retrieve(second.id, extra_query=wrong_query)
            assert refused.value.param == param
        client.responses.delete(second.id)
        for gone in (second.id, whole.id):
            with pytest.raises(openai.NotFoundError, match="not found"):
                client.responses.retrieve(gone)
            with pytest.raises(openai.NotFoundError, match="not found"):
                client.responses.input_items.list(gone)
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(**ask, input="x", previous_response_id=second.id)
        assert (refused.value.param, refused.value.code) == (
            "previous_response_id",
            "previous_response_not_found",
        )
        with pytest.raises(
            openai.BadRequestError
        ) as refused:  # items that this request brings have its numbers
            wrong: Any = [{"role": "user", "content": "Hm"}, {"type": "other", "id": "x"}]
            client.responses.create(**ask, input=wrong, previous_response_id=first.id)
        assert "input[1].type is" in str(refused.value)


def test_without_the_option(api: OpenAiServer) -> None:
    for path in ("/v1/responses/resp_1", "/v1/responses/resp_1/input_items"):
        status, message, _, _ = api.error(path)
        assert status == 404 and "--store-mib" in message
