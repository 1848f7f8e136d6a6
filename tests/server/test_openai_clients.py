# SPDX-License-Identifier: Apache-2.0
"""What other programs send to the OpenAI API, replayed. codex_requests.json has requests of Codex CLI (`codex
exec` 0.169.0) with a scripted model, its texts cut."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai_server import KEY, OpenAiServer, events

RECORDED: list[Any] = json.loads(Path(__file__).with_name("codex_requests.json").read_text())


@pytest.fixture
def client(scripted: OpenAiServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def test_a_session_with_a_call(client: openai.OpenAI) -> None:
    def answered(body: Any) -> Any:
        events = list(
            client.post("/responses", body=body, cast_to=object, stream=True, stream_cls=openai.Stream[Any])
        )
        assert events[-1]["type"] == "response.completed"
        return events[-1]["response"]

    first = answered(RECORDED[0])
    (call,) = first["output"]
    assert (call["type"], call["name"], call["arguments"]) == (
        "function_call",
        "exec_command",
        '{"cmd": "cat note.txt"}',
    )
    offered = [tool["type"] for tool in RECORDED[0]["tools"]]
    assert "web_search" in offered
    assert [tool["type"] for tool in first["tools"]] == [kind for kind in offered if kind != "web_search"]
    (message,) = answered(RECORDED[1])["output"]
    assert message["content"][0]["text"] == "The note says: water the plants."


def test_namespaces(scripted: OpenAiServer, client: openai.OpenAI) -> None:
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    close = {"type": "function", "name": "close", "parameters": nothing}
    space = {"type": "namespace", "name": "agents", "description": "Agents", "tools": [close]}
    patch = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    patches = {"type": "custom", "name": "apply_patch", "format": patch}
    more: Any = {"tools": [space, patches], "input": "Close it."}
    (call,) = client.responses.create(model="scripted", **more).output
    assert (call.type, call.namespace, call.name) == ("function_call", "agents", "close")  # type: ignore[union-attr]
    more["tool_choice"] = {"type": "function", "namespace": "agents", "name": "close"}
    (forced,) = client.responses.create(model="scripted", **more).output
    assert (forced.namespace, forced.name) == ("agents", "close")  # type: ignore[union-attr]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Closed."}  # type: ignore[union-attr]
    turns = [{"role": "user", "content": "Close it."}, call.to_dict(), result]
    assert (
        client.responses.create(model="scripted", **{"tools": [space], "input": turns}).output_text
        == "It is closed."
    )
    assert "tools of type custom with a Lark grammar are left out" in scripted.log


def test_custom_tools(scripted: OpenAiServer, client: openai.OpenAI) -> None:
    tool: Any = {"type": "custom", "name": "write_sql", "description": "SQL"}
    turns: list[Any] = [{"role": "user", "content": "Write it."}]
    with client.responses.stream(model="scripted", tools=[tool], input=turns) as stream:
        events = [event.to_dict() for event in stream]
        answer = stream.get_final_response()
    (call,) = answer.output
    assert call.type == "custom_tool_call" and call.id and call.id.startswith("ctc_")
    assert (call.name, call.input) == ("write_sql", 'SELECT "a";')
    assert events[2]["item"] == {**call.to_dict(), "input": "", "status": "in_progress"}
    told = [event for event in events if "custom_tool_call_input" in str(event["type"])]
    assert [(event["type"], event.get("delta"), event.get("input")) for event in told] == [
        ("response.custom_tool_call_input.delta", call.input, None),
        ("response.custom_tool_call_input.done", None, call.input),
    ]
    assert answer.tools[0].to_dict() == tool
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done."}
    turns += [call.to_dict(), output]
    assert (
        client.responses.create(model="scripted", tools=[tool], input=turns).output_text == "It was written."
    )
    # In a namespace; and arguments without an input are all that the model wrote.
    space: Any = {"type": "namespace", "name": "db", "tools": [{**tool, "name": "note"}]}
    (call,) = client.responses.create(model="scripted", tools=[space], input="Note it.").output
    told = call.to_dict()
    assert (told["namespace"], told["name"], told["input"]) == ("db", "note", '{"text": 1}')
    for number in (1, 2):
        regex = {"type": "grammar", "syntax": "regex", "definition": "^(?P<word>[ab]+)-[0-9]{2}$"}
        asked: Any = {"tools": [{**tool, "format": regex}], "max_output_tokens": 60, "temperature": 1.5}
        choices = (None, "required", {"type": "custom", "name": "write_sql"})
        found = client.responses.create(
            model="scripted",
            input="Write.",
            tool_choice=choices[number],
            **asked,
            extra_body={"seed": number},
        )
        (call,) = found.output
        assert call.type == "custom_tool_call"
        assert found.status == "completed" and re.fullmatch("[ab]+-[0-9]{2}", call.input)


CHAT = "/v1/chat/completions"
PARIS = {"role": "user", "content": "What is the capital of France?"}


def test_open_webui(api: OpenAiServer) -> None:
    """It lists the models, streams the answer with the parameters of its controls, and then asks for a title,
    tags and follow-ups, and lets a tool be called."""
    _, headers, models = api.call("/v1/models", key="sk-anything")
    assert headers.get_content_type() == "application/json"
    model = models["data"][0]["id"]
    system = {"role": "system", "content": "You are kind."}
    controls = {
        **{"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 42, "max_tokens": 24},
        **{"frequency_penalty": 0.1, "presence_penalty": 0.1, "stop": ["\n\n\n"], "logit_bias": {"5": 1}},
    }
    body: dict[str, Any] = {"model": model, "messages": [system, PARIS], "stream": True, **controls}
    with api.opened(CHAT, {**body, "stream_options": {"include_usage": True}}) as answer:
        assert answer.getheader("content-type", "").startswith("text/event-stream")
        chunks = events(answer.read().decode())
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    assert text and chunks[-1]["usage"]["completion_tokens"] <= 24
    turn = [system, PARIS, {"role": "assistant", "content": text}]
    for task in ("a title", "tags", "follow-ups"):
        words = f"### Task:\nGenerate {task} as JSON.\n<chat_history>\n{json.dumps(turn)}\n</chat_history>"
        messages = [{"role": "user", "content": words}]
        asked = {"model": model, "messages": messages, "stream": False, "max_completion_tokens": 1000}
        status, _, made = api.call(CHAT, asked)
        assert status == 200 and made["choices"][0]["message"]["content"] is not None
    parameters = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
    function = {"name": "search_web", "description": "Searches", "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    call = {"id": "call_1", "type": "function", "function": {"name": "search_web", "arguments": "{}"}}
    called = {"role": "assistant", "content": "", "tool_calls": [{"index": 0, **call}]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "Paris"}
    with api.opened(CHAT, {**body, "messages": [*turn, PARIS, called, result], "tools": tools}) as answer:
        assert answer.status == 200 and events(answer.read().decode())


def test_vllm_bench_serve(api: OpenAiServer) -> None:
    """--backend openai-chat and openai, with and without --ignore-eos. A chunk is a token to it."""
    options = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    parts = [{"role": "user", "content": [{"type": "text", "text": PARIS["content"]}]}]
    chat = {"model": "tiny-chat", "messages": parts, "max_completion_tokens": 16, "temperature": 0.0}
    text = {"model": "tiny-chat", "prompt": PARIS["content"], "max_tokens": 16, "repetition_penalty": 1.0}
    for path, body in ((CHAT, chat), ("/v1/completions", {**text, "logprobs": None})):
        with api.opened(path, {**body, **options}) as answer:
            *chunks, last = events(answer.read().decode())
        assert last["usage"]["completion_tokens"] == 16 and not last["choices"]
        assert all(chunk["choices"] for chunk in chunks)
        assert len(chunks) > 2  # of a busy API one may have several tokens
