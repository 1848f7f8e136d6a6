# SPDX-License-Identifier: Apache-2.0
"""Responses that the server keeps: previous_response_id, and reading and deleting them."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai_server import KEY, OpenAiServer

TOOL: Any = {
    "type": "function",
    "name": "weather",
    "strict": False,
    "parameters": {"type": "object", "properties": {}},
}


def test_a_conversation_that_the_server_keeps(scripted: OpenAiServer) -> None:
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key=KEY, max_retries=0) as client:
        ask: Any = {"model": "scripted", "tools": [TOOL]}
        first = client.responses.create(**ask, input="Weather?", instructions="Be kind.")
        call = first.output[1]
        assert (call.type, first.store) == ("function_call", True)  # type: ignore[attr-defined]
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}  # type: ignore[union-attr]
        *_, last = client.responses.create(**ask, input=[result], previous_response_id=first.id, stream=True)
        second = last.response  # type: ignore[union-attr]
        assert (second.output_text, second.previous_response_id) == ("It rains in Ulm.", first.id)
        # The same as with all items sent, and without the earlier instructions.
        sent: Any = [
            {"role": "user", "content": "Weather?"},
            *[item.to_dict() for item in first.output],
            result,
        ]
        whole = client.responses.create(**ask, input=sent, store=False)
        assert whole.usage and second.usage and whole.usage.input_tokens == second.usage.input_tokens
        again = client.responses.create(**ask, input="And now?", previous_response_id=second.id)
        assert again.usage and again.usage.input_tokens > second.usage.input_tokens
        assert client.responses.retrieve(second.id).to_dict() == second.to_dict()
        client.responses.delete(second.id)
        for gone in (second.id, whole.id):
            with pytest.raises(openai.NotFoundError, match="not found"):
                client.responses.retrieve(gone)
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(**ask, input="x", previous_response_id=second.id)
        assert (refused.value.param, refused.value.code) == (
            "previous_response_id",
            "previous_response_not_found",
        )
        with pytest.raises(
            openai.BadRequestError
        ) as refused:  # items that this request brings have its numbers
            wrong: Any = [{"role": "user", "content": "Hm"}, {"type": "item_reference", "id": "x"}]
            client.responses.create(**ask, input=wrong, previous_response_id=first.id)
        assert "input[1].type is" in str(refused.value)


def test_without_the_option(door: OpenAiServer) -> None:
    status, message, _, _ = door.error("/v1/responses/resp_1")
    assert status == 404 and "--store-mib" in message
