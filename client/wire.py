# SPDX-License-Identifier: Apache-2.0
"""The streaming wire forms: request bodies, server-sent events, and what a finished stream says. It needs the
standard library alone.

Over HTTP all answer with `data: {json}` lines. Triton's `generate_stream` sends text deltas in `text_output`
and reports a later failure in-band as `{"error": ...}`; only this backend's ensemble marks the last chunk,
with a `finish_reason` of length, stop or cancelled, where TensorRT-LLM's stream just ends. OpenAI's
`/v1/completions` and `/v1/chat/completions` send `choices`, a chunk with `usage` when asked, and end with
`[DONE]`. The gRPC form (client/grpc_wire.py) has the same fields as `generate_stream`.
"""

from __future__ import annotations

import json
import math
import urllib.parse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from client import grpc_wire

if TYPE_CHECKING:
    from client.datasets import Ramp

BACKENDS = ("triton", "triton-grpc", "openai", "openai-chat")
TRITON, OPENAI = BACKENDS[:2], BACKENDS[2:]
DEFAULT_ENDPOINTS = {
    "triton": "/v2/models/{model}/generate_stream",
    "triton-grpc": "",  # a service's method, not a path
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}
DEFAULT_MODELS = {"triton": "ensemble", "triton-grpc": "ensemble", "openai": "model", "openai-chat": "model"}

# Larger than any vocabulary: never sampled, so a sequence runs to its full length.
END_ID_OUTSIDE_VOCABULARY = 1048576

# What a request's numbers are counted from; overriding them would make the results wrong without a word.
COUNTED_KEYS = frozenset({"text_input", "prompt", "messages", "max_tokens", "stream"})


@dataclass(frozen=True)
class Load:
    """How prompts are sent. request_rate is in requests/s (inf: all at once), burstiness and ramp as in
    arrival_times; max_concurrency bounds requests in flight over all workers (None: no bound); time_limit is
    in seconds from the start, unfinished requests then fail. think_seconds pass before each later turn of a
    conversation, which counts as one request for rate and concurrency. check_tokens has a Triton ensemble
    report the token count of each chunk, which costs it a little; always so without ignore_eos. api_key goes
    into HTTP's Authorization. priority_per_output_token: an OpenAI server gets this many times the output
    tokens as each request's priority (0: none), so that -1 asks vLLM and this backend for the longest answers
    first. lora_modules: names of adapters, which requests (with all turns of a conversation) ask for in
    turns."""

    backend: str
    url: str
    model: str | None = None
    endpoint: str | None = None
    request_rate: float = math.inf
    burstiness: float = 1.0
    ramp: Ramp | None = None
    max_concurrency: int | None = None
    seed: int = 0
    workers: int = 0
    time_limit: float = 600.0
    ignore_eos: bool = True
    check_tokens: bool = False
    keep_text: bool = False
    extra_body: dict[str, Any] = field(default_factory=dict)
    think_seconds: float = 0.0
    api_key: str | None = field(default=None, repr=False)
    priority_per_output_token: int = 0
    lora_modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"unknown backend {self.backend!r}; it is one of {', '.join(BACKENDS)}")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ValueError(f"max_concurrency {self.max_concurrency} must be at least 1")
        if self.workers < 0:
            raise ValueError(f"workers {self.workers} must be at least 1, or 0 for a number by cores")
        if self.backend == "triton-grpc" and (self.endpoint is not None or self.api_key is not None):
            raise ValueError("backend triton-grpc takes no endpoint and no api_key: they are for HTTP")
        if self.backend == "triton-grpc" and not _is_host_and_port(self.url):
            raise ValueError(
                f"url {self.url!r} must be http://host:port for gRPC, which has no TLS and no path here"
            )
        path = self.endpoint or DEFAULT_ENDPOINTS[self.backend] or "/"
        if not path.startswith("/") or set("{}") & set(path.replace("{model}", "")):
            raise ValueError(f"endpoint {path!r} must begin with / and may hold {{model}}, no other braces")
        if overridden := sorted(COUNTED_KEYS & self.extra_body.keys()):
            raise ValueError(
                f"extra_body must not hold {', '.join(overridden)}: the prompts and their lengths say that"
            )
        if self.priority_per_output_token:
            if self.backend in TRITON:
                raise ValueError(
                    "priority_per_output_token is for OpenAI servers: a Triton ensemble knows the length by "
                    "max_tokens (knob schedule_policy=lof)"
                )
            if "priority" in self.extra_body:
                raise ValueError("extra_body must not hold priority together with priority_per_output_token")
        if self.lora_modules and self.backend == "triton-grpc":
            raise ValueError("lora_modules is for HTTP: use backend triton, or an OpenAI server")
        if not self.ignore_eos:  # else nothing says how many tokens there were
            object.__setattr__(self, "check_tokens", True)

    def body(self, prompt: str | Sequence[str], max_tokens: int, adapter: str = "") -> dict[str, Any]:
        """The JSON body of one greedy streaming request; `extra_body` is laid over it.

        prompt: a text, or the texts of a conversation so far: the user's and the model's in turns, the user's
        last. Only openai-chat sends those as messages, the others as one text. adapter: its name; "": none.
        """
        turns = [prompt] if isinstance(prompt, str) else list(prompt)
        body: dict[str, Any] = {"max_tokens": max_tokens, "stream": True, "temperature": 0.0}
        if self.backend in TRITON:
            body["text_input"] = "".join(turns)
            if self.ignore_eos:
                body |= {"end_id": END_ID_OUTSIDE_VOCABULARY, "min_length": max_tokens}
            if self.check_tokens:
                body["return_num_output_tokens"] = True
        else:
            body |= {"model": self.asked_model, "stream_options": {"include_usage": True}}
            if self.backend == "openai-chat":
                roles = ("user", "assistant")
                body["messages"] = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
            else:
                body["prompt"] = "".join(turns)
            if self.ignore_eos:
                body["ignore_eos"] = True
        body |= self.extra_body
        if adapter:
            body["model" if self.backend in OPENAI else "lora_name"] = adapter
        if self.priority_per_output_token:
            body["priority"] = self.priority_per_output_token * max_tokens
        return body

    def encode(self, body: dict[str, Any], types: dict[str, str] | None) -> bytes:
        """A body as it is sent. types: the model's inputs, for gRPC."""
        if types is None:
            return json.dumps(body).encode()
        return grpc_wire.request_message(self.asked_model, body, types)

    @property
    def asked_model(self) -> str:
        return self.model or DEFAULT_MODELS[self.backend]

    @property
    def target(self) -> str:
        """The full URL that is posted to, or host:port for gRPC."""
        if self.backend == "triton-grpc":
            return urllib.parse.urlsplit(self.url).netloc or self.url
        return self.url.rstrip("/") + self.path

    @property
    def path(self) -> str:
        return (self.endpoint or DEFAULT_ENDPOINTS[self.backend]).replace("{model}", self.asked_model)


def _is_host_and_port(url: str) -> bool:
    """Whether it says no more than where a server is, without TLS."""
    parts = urllib.parse.urlsplit(url)
    more = parts.path.strip("/") or parts.query or parts.fragment or parts.username
    return parts.scheme == "http" and parts.port is not None and not more


def authorization(api_key: str | None) -> dict[str, str]:
    """The header for a key, none without one."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


class EventSplitter:
    """Cuts a byte stream, however TCP split it, into the payloads of its complete `data:` lines."""

    def __init__(self) -> None:
        self.tail = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Payloads (without `data:` and surrounding blanks) of the lines that `data` completes."""
        lines = (self.tail + data if self.tail else data).split(b"\n")
        self.tail = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


def error_message(body: str) -> str:
    """The message of an error answer of either server (Triton may write it as an event), or the body's
    beginning."""
    try:
        error = json.loads(body.removeprefix("data:"))["error"]
        return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
    except (ValueError, KeyError, TypeError):
        return body[:200].strip()


@dataclass
class StreamSummary:
    """What one stream held. Times are those of the reads that completed each chunk, in the caller's clock."""

    chunk_times: list[float] = field(default_factory=list)
    first_text_time: float | None = None
    text: str = ""
    reported_tokens: int | None = None  # `usage`, or `num_output_tokens` summed; None if neither was sent
    last_token_time: float | None = None  # of the last chunk with a `num_output_tokens` over 0
    reported_prompt_tokens: int | None = None  # `usage`
    accepted_drafts: int | None = None  # `usage`, or a Triton request's metrics where it asked for them
    finish_reason: str | None = None  # the last chunk's, if it had one
    error: str | None = None


def read_stream(
    backend: str, reads: Iterable[tuple[float, bytes]], max_tokens: int, exact: bool
) -> StreamSummary:
    """Reads a whole recorded stream: (time, bytes) of every read, or of every gRPC message, in order.

    exact says that the request ignored its end token, so that exactly max_tokens tokens were due. A stream
    without chunks, with an in-band error, with something that is no chunk of this wire form, cut off before
    its end, ended for another reason than was due, or with another number of tokens than was due (the last
    two where the server reports them) has `error` set.
    """
    summary = StreamSummary()
    pieces: list[str] = []
    splitter = EventSplitter()
    finished = False
    for time, data in reads:
        for payload in [data] if backend == "triton-grpc" else splitter.feed(data):
            if payload == b"[DONE]":
                finished = True
                continue
            event: Any
            if backend == "triton-grpc":
                try:
                    event, final = grpc_wire.read_response(payload)
                except ValueError as error:
                    summary.error = str(error)
                    break
                finished = finished or final
                if event is None:
                    continue
            else:
                try:
                    event = json.loads(payload)
                except ValueError:
                    summary.error = f"chunk is not JSON: {payload[:200]!r}"
                    break
            try:
                text = _read_event(backend, event, time, summary)
            except (AttributeError, LookupError, TypeError, ValueError):
                text, summary.error = None, f"chunk is not of this form: {str(event)[:200]}"
            if summary.error is not None:
                break
            if text is None:
                continue
            summary.chunk_times.append(time)
            pieces.append(text)
            if text and summary.first_text_time is None:
                summary.first_text_time = time
        if summary.error is not None:
            break
    summary.text = "".join(pieces)
    if summary.error is None:
        summary.error = _length_error(backend, summary, splitter.tail, finished, max_tokens, exact)
    return summary


def _read_event(backend: str, event: Any, time: float, summary: StreamSummary) -> str | None:
    """The text of a chunk, or None for an event that is no chunk (usage); sets summary.error for a
    failure."""
    if not isinstance(event, dict):
        summary.error = f"chunk is not a JSON object: {str(event)[:200]}"
        return None
    if "error" in event:
        error = event["error"]
        message = error.get("message", error) if isinstance(error, dict) else error
        summary.error = f"in-band error: {str(message)[:500]}"
        return None
    if backend in TRITON:
        if "text_output" not in event:
            summary.error = f"chunk has no text_output: {str(event)[:200]}"
            return None
        summary.finish_reason = event.get("finish_reason") or None
        if "total_accepted_draft_tokens" in event:  # so far
            summary.accepted_drafts = int(event["total_accepted_draft_tokens"])
        if "num_output_tokens" in event:
            tokens = int(event["num_output_tokens"])
            summary.reported_tokens = (summary.reported_tokens or 0) + tokens
            if tokens > 0:
                summary.last_token_time = time
        return str(event["text_output"])
    if event.get("usage"):
        summary.reported_tokens = int(event["usage"]["completion_tokens"])
        summary.reported_prompt_tokens = int(event["usage"].get("prompt_tokens") or 0) or None
        details = event["usage"].get("completion_tokens_details") or {}
        summary.accepted_drafts = details.get("accepted_prediction_tokens")
    if "choices" not in event:
        summary.error = f"chunk has no choices: {str(event)[:200]}"
        return None
    if not event["choices"]:
        return None
    choice = event["choices"][0]
    summary.finish_reason = choice.get("finish_reason")
    if backend == "openai":
        return str(choice.get("text") or "")
    delta = choice.get("delta") or {}
    held = {name for name, value in delta.items() if value is not None}
    if not held - {"role"} and (summary.finish_reason is None or summary.chunk_times):
        return None  # it announces the role, before there is a token, or says why the answer ended
    text = delta_thought(delta) + (delta.get("content") or "")
    # The announcement of the role may hold an empty text.
    return None if "role" in delta and not text and summary.finish_reason is None else text


def delta_thought(delta: dict[str, Any]) -> str:
    """What the model thinks by a chat's `delta`, under either of its names."""
    thought: str = delta.get("reasoning_content") or delta.get("reasoning") or ""
    return thought


def _length_error(
    backend: str, summary: StreamSummary, tail: bytes, finished: bool, max_tokens: int, exact: bool
) -> str | None:
    chunks, tokens = len(summary.chunk_times), summary.reported_tokens
    if tail.strip():
        return f"stream ended inside an event: {tail[:200]!r}"
    if chunks == 0:
        return "stream ended without a chunk"
    if backend != "triton" and not finished:
        end = "its final response" if backend == "triton-grpc" else "[DONE]"
        return f"stream ended early, without {end}, after {chunks} chunks"
    # An OpenAI server's reason adds nothing to its [DONE] and its usage.
    reason = summary.finish_reason if backend in TRITON else None
    if reason == "cancelled" or (exact and reason not in (None, "length")):
        return f"stream ended with finish_reason {reason!r}" + (", 'length' was due" if exact else "")
    if tokens is not None and (tokens != max_tokens if exact else tokens > max_tokens):
        return f"stream held {tokens} tokens, {max_tokens} were due"
    # One more than tokens: a server may close with an empty chunk.
    if chunks > max_tokens + 1:
        return f"stream held {chunks} chunks for at most {max_tokens} tokens"
    return None
