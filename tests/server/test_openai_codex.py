# SPDX-License-Identifier: Apache-2.0
"""What Codex CLI sends to /v1/responses: codex_requests.json has requests of `codex exec` 0.169.0 with a
scripted model, its texts cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai_server import KEY, OpenAiServer

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
    close = {"type": "function", "name": "close", "parameters": {"type": "object", "properties": {}}}
    space = {"type": "namespace", "name": "agents", "description": "Agents", "tools": [close]}
    more: Any = {"tools": [space, {"type": "custom", "name": "apply_patch"}], "input": "Close it."}
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
    assert "tools of type custom are left out" in scripted.log
    wrong = {"input": "x", "tools": [{"type": "web_search"}, {**space, "tools": [{**close, "name": "a b"}]}]}
    assert "tools[1].tools[0].name is" in scripted.error("/v1/responses", wrong, KEY)[1]
    for tool in ({**space, "tools": [space]}, {"type": "namespace"}, {"type": "other"}):
        status, message, param, _ = scripted.error("/v1/responses", {"input": "x", "tools": [tool]}, KEY)
        assert (status, param) == (400, "tools") and message.startswith("tools[0]")
