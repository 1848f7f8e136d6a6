# SPDX-License-Identifier: Apache-2.0
"""Errors of the OpenAI API: OpenAI's form and statuses, with what was wrong and what would be right."""

import http.client
import json
import re
from email.message import Message
from pathlib import Path
from typing import Any

import openai
import pytest
from openai_server import OpenAiServer, model_with_template, openai_running
from running import TIMEOUT_S, fetch

ASK: list[Any] = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"


def test_bodies_paths_and_models(api: OpenAiServer) -> None:
    assert api.error(CHAT, b"{")[:2] == (400, "the body is not valid JSON: Input data was truncated")
    assert api.error(CHAT, {})[1:] == ("messages is missing", "messages", "missing_required_parameter")
    assert api.error(CHAT, b"[" * 100_000)[0] == 400
    status, message, _, _ = api.error(CHAT, b'{"model": "\xba"}')
    assert status == 400 and message.startswith("the body is not valid JSON")
    status, message, param, code = api.error(CHAT, {"messages": ASK, "model": "gpt-4"})
    assert (status, param, code) == (404, "model", "model_not_found") and "tiny-chat" in message
    assert api.error("/v1/nothing", {})[:2] == (404, "there is no /v1/nothing")
    assert api.error("/v1/load_lora_adapter", {})[1].endswith("was started without --lora-root")
    assert api.error(CHAT)[:2] == (405, f"{CHAT} takes POST, not GET")
    assert api.call(CHAT)[1]["allow"] == "POST"
    assert api.error("/v1/models/gpt-4")[3] == "model_not_found"
    assert api.error("/tokenize", {})[0] == 400
    assert "tokens holds -1; token ids should lie in" in api.error("/detokenize", {"tokens": [7, -1]})[1]
    prompt = "word " * 3000
    _, message, param, code = api.error("/v1/completions", {"prompt": prompt})
    # LangChain looks for the one sentence, LiteLLM, and with it aider, for the other.
    assert (param, code) == ("prompt", "context_length_exceeded") and "prompt is too long" in message
    assert "This model's maximum context length is 2048 tokens" in message
    assert api.metric('errors_total{status="404"}') >= 3


def test_what_can_be_read_has_a_head(api: OpenAiServer) -> None:
    """aiperf looks for the metrics in this way; an error would count among the requests'."""
    refused = api.metric('errors_total{status="405"}')
    for path in ("/health", "/metrics", "/version", "/", "/v1/models", "/v1/models/tiny-chat"):
        connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=TIMEOUT_S)
        for method in ("HEAD", "GET"):  # on one connection: the head leaves nothing behind
            connection.request(method, path)
            answer = connection.getresponse()
            assert (answer.status, bool(answer.read())) == (200, method == "GET" and path != "/health")
        connection.close()
    assert api.metric('errors_total{status="405"}') == refused


def test_the_page_is_sent_whole_whatever_part_is_asked_for(api: OpenAiServer) -> None:
    whole = fetch(api.url + "/")[2]
    for part in ("bytes=5-2", "bytes=x", "bytes=99999999-", "bytes=0-3"):
        status, _, text = fetch(api.url + "/", headers={"Range": part})
        assert (status, text) == (200, whole), part


def test_a_text_that_is_too_long_is_refused_before_it_is_tokenized(api: OpenAiServer) -> None:
    longest = "é" * (1 << 19)
    text = longest + "aaaa"
    bodies: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": [{"role": "user", "content": text}]}),
        ("/v1/completions", {"prompt": ["Once", text]}),
        ("/v1/responses", {"input": text}),
        ("/tokenize", {"prompt": text}),
    ]
    for path, body in bodies:
        status, message, param, code = api.error(path, body)
        assert (status, param, code) == (400, next(iter(body)), "context_length_exceeded")
        assert "bytes; this server takes" in message
    assert api.error("/v1/completions", {"prompt": longest})[1].startswith("the prompt is too long: it has ")


def test_every_answer_has_a_request_id(api: OpenAiServer, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"prompt": "Once", "max_tokens": 2}

    def headers(path: str, body: Any = None, **sent: str) -> tuple[Message, str]:
        data = None if body is None else json.dumps(body).encode()
        _, found, text = fetch(api.url + path, data, sent)
        assert len(found.get_all("x-request-id") or []) == 1
        return found, text

    found, text = headers("/v1/completions", asked)
    assert found["x-request-id"] == json.loads(text)["id"]
    found, text = headers("/v1/completions", {**asked, "stream": True})
    assert f'"id":"{found["x-request-id"]}"' in text
    for path, body in [("/v1/models", None), ("/v1/x", None), ("/v1/completions", {}), ("/health", None)]:
        made = headers(path, body)[0]["x-request-id"], headers(path, body)[0]["x-request-id"]
        assert all(re.fullmatch("req_[0-9a-f]{32}", each) for each in made) and made[0] != made[1]
    for path, body in [("/v1/models", None), ("/v1/x", None), ("/v1/completions", asked)]:
        found, text = headers(path, body, **{"X-Request-Id": "a b/" + "c" * 196})
        assert found["x-request-id"] == "a b/" + "c" * 196 and "c" * 196 not in text
        for strange in ("c" * 201, "caf\u00e9", "a\tb"):
            assert headers(path, body, **{"X-Request-Id": strange})[0]["x-request-id"] != strange

    completion = client.completions.create(model="tiny-chat", prompt="Once", max_tokens=1)
    assert completion._request_id == completion.id
    answer = client.chat.completions.create(model="tiny-chat", messages=ASK, max_tokens=1)
    assert answer._request_id == answer.id
    response = client.responses.create(model="tiny-chat", input="Once", max_output_tokens=16)
    assert response._request_id == response.id
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="gpt-4", messages=ASK, extra_headers={"x-request-id": "mine"})
    assert refused.value.request_id == "mine"


def test_a_model_without_a_template_has_no_chat(tmp_path: Path) -> None:
    """And one process can do with little: keys, sizes, several names."""
    model = model_with_template(tmp_path)
    (model / "chat_template.jinja").unlink()
    keys = tmp_path / "keys"
    keys.write_text("# of the team\nsecret-1\nsecret-2\n")
    arguments = ["--api-key-file", str(keys), "--max-request-bytes", "2000", "--workers", "2"]
    arguments += ["--served-model-name", "one", "--served-model-name", "two"]
    with openai_running(model, tmp_path, *arguments, FLASHINFER_BACKEND_API_KEYS="secret-3") as server:
        status, message, _, _ = server.error(CHAT, {"messages": ASK}, "secret-1")
        assert status == 400 and "no chat template" in message and "/v1/completions" in message
        body = {"prompt": "Once", "max_tokens": 2, "model": "two"}
        for key in ("secret-1", "secret-2", "secret-3"):
            assert server.call("/v1/completions", body, key)[0] == 200
        for key in ("secret-4", "secret-", None):
            assert server.error("/v1/completions", body, key)[::3] == (401, "invalid_api_key")
            assert server.error("/tokenize", {"prompt": "x"}, key)[0] == 401
        assert server.call("/health")[0] == server.call("/metrics")[0] == server.call("/")[0] == 200
        assert [m["id"] for m in server.call("/v1/models", key="secret-1")[2]["data"]] == ["one", "two"]
        large = {**body, "prompt": "x" * 3000}
        assert server.error("/v1/completions", large, "secret-1")[0] == 413
        assert len(server.workers()) == 2
        # The sum over both processes, whichever is asked.
        assert {server.metric('sequences_finished_total{finish_reason="length"}') for _ in range(6)} == {3.0}
