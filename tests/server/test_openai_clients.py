# SPDX-License-Identifier: Apache-2.0
"""What other programs send to the OpenAI API, replayed."""

from __future__ import annotations

import json
from typing import Any

from openai_server import OpenAiServer, events

CHAT = "/v1/chat/completions"
PARIS = {"role": "user", "content": "What is the capital of France?"}


def test_open_webui(door: OpenAiServer) -> None:
    """It lists the models, streams the answer with the parameters of its controls, and then asks for a title,
    tags and follow-ups, and lets a tool be called."""
    _, headers, models = door.call("/v1/models", key="sk-anything")
    assert headers.get_content_type() == "application/json"
    model = models["data"][0]["id"]
    system = {"role": "system", "content": "You are kind."}
    controls = {
        **{"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 42, "max_tokens": 24},
        **{"frequency_penalty": 0.1, "presence_penalty": 0.1, "stop": ["\n\n\n"], "logit_bias": {"5": 1}},
    }
    body: dict[str, Any] = {"model": model, "messages": [system, PARIS], "stream": True, **controls}
    with door.opened(CHAT, {**body, "stream_options": {"include_usage": True}}) as answer:
        assert answer.getheader("content-type", "").startswith("text/event-stream")
        chunks = events(answer.read().decode())
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    assert text and chunks[-1]["usage"]["completion_tokens"] <= 24
    turn = [system, PARIS, {"role": "assistant", "content": text}]
    for task in ("a title", "tags", "follow-ups"):
        words = f"### Task:\nGenerate {task} as JSON.\n<chat_history>\n{json.dumps(turn)}\n</chat_history>"
        messages = [{"role": "user", "content": words}]
        asked = {"model": model, "messages": messages, "stream": False, "max_completion_tokens": 1000}
        status, _, made = door.call(CHAT, asked)
        assert status == 200 and made["choices"][0]["message"]["content"] is not None
    parameters = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
    function = {"name": "search_web", "description": "Searches", "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    call = {"id": "call_1", "type": "function", "function": {"name": "search_web", "arguments": "{}"}}
    called = {"role": "assistant", "content": "", "tool_calls": [{"index": 0, **call}]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "Paris"}
    with door.opened(CHAT, {**body, "messages": [*turn, PARIS, called, result], "tools": tools}) as answer:
        assert answer.status == 200 and events(answer.read().decode())


def test_vllm_bench_serve(door: OpenAiServer) -> None:
    """--backend openai-chat and openai, with and without --ignore-eos. A chunk is a token to it."""
    options = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    parts = [{"role": "user", "content": [{"type": "text", "text": PARIS["content"]}]}]
    chat = {"model": "tiny-chat", "messages": parts, "max_completion_tokens": 16, "temperature": 0.0}
    text = {"model": "tiny-chat", "prompt": PARIS["content"], "max_tokens": 16, "repetition_penalty": 1.0}
    for path, body in ((CHAT, chat), ("/v1/completions", {**text, "logprobs": None})):
        with door.opened(path, {**body, **options}) as answer:
            *chunks, last = events(answer.read().decode())
        assert last["usage"]["completion_tokens"] == 16 and not last["choices"]
        assert all(chunk["choices"] for chunk in chunks)
        assert len(chunks) > 2  # of a busy door one may have several tokens


def test_a_benchmark_that_asks_for_usage_all_along(door: OpenAiServer) -> None:
    body = {"messages": [PARIS], "max_tokens": 8, "stream": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    with door.opened(CHAT, {**body, "stream_options": options}) as answer:
        counts = [chunk["usage"]["completion_tokens"] for chunk in events(answer.read().decode())]
    assert counts == sorted(counts) and 1 <= counts[0] < counts[-1]
