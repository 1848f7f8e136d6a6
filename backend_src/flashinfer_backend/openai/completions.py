# SPDX-License-Identifier: Apache-2.0
"""/v1/completions."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from starlette.responses import Response

from flashinfer_backend.core.values import shown
from flashinfer_backend.openai.answer import (
    DONE,
    EventResponse,
    JsonResponse,
    LogProb,
    Usage,
    event,
    finish_reason,
    log_prob_of,
    take_text,
    token_log_probs,
)
from flashinfer_backend.openai.door import Door, generation_request
from flashinfer_backend.openai.errors import ApiError
from flashinfer_backend.openai.link import Stream, Streams
from flashinfer_backend.openai.requests import MOST_CHOICES, CompletionRequest
from flashinfer_backend.openai.sampling import Limits, guide_of, sampling_params
from flashinfer_backend.serving.generation import Chunk
from flashinfer_backend.text.delta import DeltaDecoder

# Log probabilities of a prompt need all of its logits, which come as one message.
MOST_PROMPT_LOGITS = 1 << 28  # bytes


async def completions(door: Door, request: CompletionRequest) -> Response:
    """Raises ApiError."""
    model = door.check_model(request.model)
    limits = door.limits
    prompts = await _prompts(door, request, limits)
    n = request.n or 1
    count = request.best_of or n
    if count * len(prompts) > MOST_CHOICES:
        raise ApiError(
            f"{len(prompts)} prompts with {count} completions each are more than {MOST_CHOICES}; send them in"
            " several requests",
            param="prompt",
        )
    guide = guide_of(request.response_format, request.structured_outputs)
    wants_prompt = bool(request.echo) and request.logprobs is not None
    if wants_prompt:
        _check_prompt_log_probs(request, prompts, limits)
    rows = []
    for prompt in prompts:
        params = sampling_params(
            request,
            door.defaults,
            limits,
            door.tokenizer.eos_id,
            len(prompt),
            1 if request.max_tokens == 0 else request.max_tokens,
            guide,
            request.logprobs is not None or count > n,
            request.logprobs or 0,
        )
        params.context_logits = wants_prompt
        rows.append((generation_request(request, prompt, params, bool(request.stream)), count))
    streams = door.generate(rows, request.skip_special_tokens)
    reply = _Reply(door, request, model, streams, count)
    if request.stream:
        return EventResponse(door, streams, reply.events())
    return JsonResponse(door, streams, reply.body)


async def _prompts(door: Door, request: CompletionRequest, limits: Limits) -> list[list[int]]:
    """Ids of each prompt: text or ids, one or several."""
    given = request.prompt
    if isinstance(given, str):
        given = [given]
    if not given:
        raise ApiError("prompt is empty; it should be text or token ids", param="prompt")
    if all(isinstance(text, str) for text in given):
        prompts = await door.encode(given, request.add_special_tokens)
    else:
        prompts = [given] if all(type(i) is int for i in given) else given
    for prompt in prompts:
        if not isinstance(prompt, list) or not prompt:
            raise ApiError(
                "prompt should be a text, a list of texts, a list of token ids or a list of those lists, none"
                " of them empty",
                param="prompt",
            )
        for token in prompt:
            if type(token) is not int or not 0 <= token < limits.vocab_size:
                raise ApiError(
                    f"prompt holds {shown(token)}; token ids should lie in 0..{limits.vocab_size - 1}",
                    param="prompt",
                )
    return prompts


def _check_prompt_log_probs(request: CompletionRequest, prompts: list[list[int]], limits: Limits) -> None:
    if request.stream:
        raise ApiError("echo with logprobs cannot be streamed; set stream to false", param="echo")
    most = MOST_PROMPT_LOGITS // (4 * limits.vocab_size)
    for prompt in prompts:
        if len(prompt) > most:
            raise ApiError(
                f"echo with logprobs takes prompts of at most {most} tokens of this vocabulary; this one has"
                f" {len(prompt)}",
                param="echo",
            )


class _Reply:
    def __init__(
        self, door: Door, request: CompletionRequest, model: str, streams: Streams, count: int
    ) -> None:
        """count: completions that are made for each prompt."""
        self._door, self._request, self._streams, self._count = door, request, streams, count
        self._head: dict[str, Any] = {
            "id": f"cmpl-{secrets.token_hex(16)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._usage = Usage(door, streams)
        self._decoder = door.decoder(request.skip_special_tokens)
        self._pieces = door.decoder(skip_special_tokens=False)  # of tokens by themselves
        self._offsets: dict[int, int] = {}  # characters of each stream so far

    def _take(self, stream: Stream, chunk: Chunk) -> str:
        self._usage.note(stream, chunk)
        text = take_text(self._door, stream, chunk, self._decoder)
        if self._request.max_tokens == 0:  # the engine makes at least one, which nobody asked for
            chunk.ids.clear()
            stream.timing.sent = 0
            return ""
        return text

    def _probs(self, stream: Stream, chunk: Chunk) -> list[LogProb]:
        if self._request.logprobs is None and self._count == (self._request.n or 1):
            return []
        return token_log_probs(chunk, self._pieces, self._request.logprobs or 0)

    def _log_probs(self, stream: Stream, probs: list[LogProb]) -> dict[str, Any] | None:
        """OpenAI's older form: lists by token."""
        if self._request.logprobs is None:
            return None
        offsets, offset = [], self._offsets.get(stream.index, 0)
        for one in probs:
            offsets.append(offset)
            offset += len(one.token)
        self._offsets[stream.index] = offset
        return {
            "tokens": [one.token for one in probs],
            "token_logprobs": [None if one.logprob > 0 else one.logprob for one in probs],
            "top_logprobs": [_top(one) for one in probs],
            "text_offset": offsets,
        }

    async def body(self) -> dict[str, Any]:
        """The whole answer."""
        request, n = self._request, self._request.n or 1
        found: list[tuple[float, dict[str, Any]]] = [(0.0, {}) for _ in self._streams.all]
        prompt_probs: dict[int, list[LogProb]] = {}
        async for stream, chunk in self._streams:
            probs = self._probs(stream, chunk)
            if request.max_tokens == 0:
                probs = []
            text = self._take(stream, chunk)
            mean = sum(one.logprob for one in probs) / max(1, len(probs))
            choice: dict[str, Any] = {"text": text, "finish_reason": finish_reason(chunk.code)}
            if request.max_tokens == 0:
                choice["finish_reason"] = "length"
            choice["probs"], choice["stream"] = probs, stream
            if request.return_token_ids:
                choice["prompt_token_ids"], choice["token_ids"] = stream.row.prompt.tolist(), chunk.ids
            if stream.row.params.context_logits and stream.index % self._count == 0:
                prompt_probs[stream.index // self._count] = await self._prompt_probs(stream, chunk)
            found[stream.index] = (mean, choice)
        choices: list[dict[str, Any]] = []
        for begin in range(0, len(found), self._count):
            made = found[begin : begin + self._count]
            if n < self._count:
                made = sorted(made, key=lambda each: -each[0])[:n]
            for _, choice in made:
                before = prompt_probs.get(begin // self._count, [])
                choices.append(self._choice(choice, len(choices), before))
        return {**self._head, "choices": choices, "usage": self._usage.body()}

    def _choice(self, made: dict[str, Any], index: int, prompt_probs: list[LogProb]) -> dict[str, Any]:
        stream: Stream = made.pop("stream")
        probs = made.pop("probs")
        if self._request.echo:
            made["text"] = self._prompt_text(stream) + made["text"]
        logprobs = self._log_probs(stream, [*prompt_probs, *probs])
        return {"index": index, **made, "logprobs": logprobs}

    def _prompt_text(self, stream: Stream) -> str:
        return self._decoder.decode(stream.row.prompt.tolist())

    async def _prompt_probs(self, stream: Stream, chunk: Chunk) -> list[LogProb]:
        """Of the prompt's tokens; the first one has none (a positive number stands for that)."""
        (data,) = [report.context_logits for report in chunk.reports if report.context_logits is not None]
        return await asyncio.to_thread(
            prompt_log_probs, stream.row.prompt, data, self._request.logprobs or 0, self._pieces
        )

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as it comes."""
        request, options = self._request, self._request.stream_options
        usage = options is not None and options.include_usage
        always = options is not None and options.continuous_usage_stats
        begun: set[int] = set()
        async for stream, chunk in self._streams:
            probs = self._probs(stream, chunk)
            text = self._take(stream, chunk)
            if request.echo and stream.index not in begun:
                text = self._prompt_text(stream) + text
            if not text and not chunk.last and not probs:
                continue  # an incomplete character
            choice = {
                "index": stream.index,
                "text": text,
                "logprobs": self._log_probs(stream, probs),
                "finish_reason": finish_reason(chunk.code) if chunk.last else None,
            }
            if request.return_token_ids:
                choice["token_ids"] = chunk.ids
                if stream.index not in begun:
                    choice["prompt_token_ids"] = stream.row.prompt.tolist()
            begun.add(stream.index)
            body = {**self._head, "choices": [choice]}
            if usage:
                body["usage"] = self._usage.body() if always else None
            yield event(body)
        if usage:
            yield event({**self._head, "choices": [], "usage": self._usage.body()})
        yield DONE


def _top(one: LogProb) -> dict[str, float] | None:
    """The likeliest tokens and the one that was chosen, by text."""
    if one.logprob > 0:
        return None
    return {other.token: other.logprob for other in [*one.top, one]}


NO_LOG_PROB = 1.0  # of a prompt's first token


def prompt_log_probs(
    prompt: np.ndarray, logits: bytes | memoryview, top: int, decoder: DeltaDecoder
) -> list[LogProb]:
    """Log probabilities of a prompt's tokens (int32 [n]) by its logits (float32 [n, V] as bytes), with the
    `top` likeliest of each. The first token's is NO_LOG_PROB."""
    rows = np.frombuffer(logits, "<f4").reshape(len(prompt), -1)
    result = [log_prob_of(int(prompt[0]), NO_LOG_PROB, decoder)]
    for row, token in zip(rows, prompt[1:].tolist(), strict=False):  # the last row is about what follows
        high = float(row.max())
        total = high + float(np.log(np.exp(row - high, dtype=np.float64).sum()))
        best: Any = np.argpartition(-row, top - 1)[:top] if top else []
        one = log_prob_of(token, float(row[token]) - total, decoder)
        pairs = sorted(((float(row[i]) - total, int(i)) for i in best), reverse=True)
        one.top = [log_prob_of(i, value, decoder) for value, i in pairs]
        result.append(one)
    return result
