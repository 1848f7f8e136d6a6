# SPDX-License-Identifier: Apache-2.0
"""/v1/completions."""

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from msgspec import Raw
from starlette.responses import Response

from flashinfer_backend.core.bounds import MOST_CHOICES
from flashinfer_backend.openai.answer import Choices, finish_reason, respond, take_text
from flashinfer_backend.openai.errors import ApiError, field_error
from flashinfer_backend.openai.link import Stream, Streams
from flashinfer_backend.openai.log_probs import (
    PromptLogProbs,
    TokenLists,
    check_log_probs,
    in_thread_if_many,
    mean,
    prompt_lists,
    prompt_log_probs,
)
from flashinfer_backend.openai.requests import CompletionRequest
from flashinfer_backend.openai.sampling import (
    EngineLimits,
    Length,
    check_ids,
    guide_of,
    named_tokens,
    shortened,
)
from flashinfer_backend.openai.served_model import Answering, ServedModel, generation_request
from flashinfer_backend.serving.generation import Chunk


class PromptReport(NamedTuple):
    """What is told of a prompt, if it is asked for: for echo with logprobs, and for prompt_logprobs."""

    lists: TokenLists | None
    by_id: Raw | None


def completions(served: ServedModel, request: CompletionRequest) -> Answering:
    limits = served.limits
    given = _prompts(request.prompt, limits)  # texts, or lists of ids
    n = request.n or 1
    count = request.best_of or n
    if count * len(given) > MOST_CHOICES:
        raise ApiError(
            f"{len(given)} prompts with {count} completions each are more than {MOST_CHOICES}; send them in"
            " several requests",
            param="prompt",
        )
    guide = guide_of(request.response_format, request)
    tokens = named_tokens(request, limits, served.tokenizer)

    async def answer() -> Response:
        prompts = given
        served.check_room()
        if isinstance(given[0], str):
            prompts = await served.encode(given, request.add_special_tokens)
            _check_ids(prompts, limits)
        echoed, by_id = bool(request.echo) and request.logprobs is not None, request.prompt_logprobs
        told_of = echoed or by_id is not None  # each token of the prompts
        top = max((request.logprobs or 0) * echoed, by_id or 0)
        await served.prepare(count * len(prompts))
        prompts = [shortened(prompt, request, limits) for prompt in prompts]
        rows = []
        for prompt in prompts:
            length = Length(len(prompt), 1 if request.max_tokens == 0 else request.max_tokens)
            row = generation_request(served, request, prompt, tokens, length, bool(request.stream), guide)
            row.params.log_probs = request.logprobs is not None or count > n
            row.params.top_logprobs = request.logprobs or 0
            row.params.prompt_log_probs = top if told_of else None
            rows.append((row, count))
        told = (1 + (request.logprobs or 0)) * echoed + (0 if by_id is None else 1 + by_id)
        number = "best_of" if count > n else "n"
        asks = "logprobs" if request.logprobs is not None else number if count > n else "prompt_logprobs"
        fields = dict.fromkeys((asks, "max_tokens", number, "number of prompts"))
        check_log_probs(rows, told, request.stream, count == n and not told, *fields)
        streams = await served.generate(rows, request.skip_special_tokens)
        return respond(served, streams, _Reply(served, request, streams, count), request.stream)

    return answer


def _prompts(given: str | list[Any], limits: EngineLimits) -> list[Any]:
    """Texts, or ids within the vocabulary."""
    if isinstance(given, str):
        return [given]
    kinds = set(map(type, given))
    if len(kinds) != 1:
        raise _not_prompts()
    if kinds == {str}:
        return given
    prompts = [given] if kinds == {int} else given
    _check_ids(prompts, limits)
    return prompts


def _check_ids(prompts: Sequence[list[int]], limits: EngineLimits) -> None:
    for prompt in prompts:
        if not prompt:
            raise _not_prompts()
        if len(prompt) > limits.max_input_len:  # sampling_params refuses it
            continue
        check_ids("prompt", (min(prompt), max(prompt)), limits)


def _not_prompts() -> ApiError:
    return field_error(
        "prompt",
        "should be a text, a list of texts, a list of token ids or a list of those lists, none of them empty",
    )


class _Made(NamedTuple):
    stream: Stream
    text: str
    context_ids: list[int]  # the last ones before the completion
    chunk: Chunk
    finish: str


class _Reply(Choices):
    def __init__(self, served: ServedModel, request: CompletionRequest, streams: Streams, count: int) -> None:
        """count: completions that are made for each prompt."""
        super().__init__(served, request, streams, "cmpl", "text_completion")
        self._served, self._request, self._streams, self._count = served, request, streams, count
        self._decoder = served.decoder(request.skip_special_tokens)
        self._told: dict[int, PromptLogProbs] = {}  # of each prompt, by its place in the request
        self._reported: int | None = None  # the prompt that `_report` tells of
        self._report = PromptReport(None, None)

    def _take(self, stream: Stream, chunk: Chunk) -> str:
        self._usage.note(stream, chunk)
        text = take_text(self._served, stream, chunk, self._decoder)
        if self._request.max_tokens == 0:  # the engine makes at least one
            del chunk.ids[:]
            stream.timing.sent = 0
            return ""
        return text

    def _finish_reason(self, chunk: Chunk) -> str:
        return "length" if self._request.max_tokens == 0 else finish_reason(chunk.code)

    async def _lists(self, chunk: Chunk, context_ids: list[int], offset: int) -> TokenLists | None:
        """Log probabilities of a chunk's tokens, if they are asked for. The others: see TokenLists."""
        top = self._request.logprobs
        if top is None or self._request.max_tokens == 0:
            return None
        lists = TokenLists(self._served.completion_tokens, self._decoder, offset, context_ids)
        await in_thread_if_many(partial(lists.add_chunk, chunk, top), len(chunk.ids), top)
        return lists

    def _shown(self, lists: TokenLists | None) -> dict[str, Raw] | None:
        if self._request.logprobs is None:
            return None
        return (lists or TokenLists(self._served.completion_tokens, self._decoder)).json()

    async def body(self) -> dict[str, Any]:
        n = self._request.n or 1
        found: dict[int, _Made] = {}
        async for stream, chunk in self._streams:
            if stream.row.params.prompt_log_probs is not None and stream.index % self._count == 0:
                told = PromptLogProbs(stream.row.prompt, chunk.prompt_log_probs)
                self._told[stream.index // self._count] = told
            context_ids = stream.context_ids
            text = self._take(stream, chunk)
            found[stream.index] = _Made(stream, text, context_ids, chunk, self._finish_reason(chunk))
        best: list[_Made] = []
        for begin in range(0, len(found), self._count):
            made = [found[index] for index in range(begin, begin + self._count)]
            if n < self._count:
                made.sort(key=lambda each: -mean(each.chunk))
            best += made[:n]
        return self._whole(self._choices(best))

    async def _prompt_report(self, prompt: int) -> PromptReport:
        """What is told of a prompt. It is written once for its completions, which follow each other."""
        if self._reported != prompt and (found := self._told.get(prompt)) is not None:
            request, served = self._request, self._served
            echoed = request.echo and request.logprobs is not None
            top, by_id = request.logprobs or 0, request.prompt_logprobs

            def write() -> PromptReport:
                return PromptReport(
                    prompt_lists(found, top, served.completion_tokens, self._decoder) if echoed else None,
                    None if by_id is None else prompt_log_probs(found, by_id, served.token_texts),
                )

            self._report = await in_thread_if_many(write, len(found.prompt), max(top, by_id or 0))
            self._reported = prompt
        return self._report

    async def _choices(self, made: list[_Made]) -> AsyncIterator[dict[str, Any]]:
        """What the answer has of each completion. What all of them repeat of their prompt comes in here, when
        it is sent: before, it would be held n times."""
        request = self._request
        for index, (stream, text, context_ids, chunk, finish) in enumerate(made):
            report = await self._prompt_report(stream.index // self._count)
            offset = 0 if report.lists is None else report.lists.offset
            every = lists = await self._lists(chunk, context_ids, offset)
            if report.lists is not None:
                every = report.lists if lists is None else report.lists.followed_by(lists)
            choice: dict[str, Any] = {
                "index": index,
                "text": self._prompt_text(stream) + text if request.echo else text,
                "finish_reason": finish,
            }
            if request.return_token_ids:
                choice["prompt_token_ids"], choice["token_ids"] = stream.row.prompt.tolist(), list(chunk.ids)
            choice["logprobs"] = self._shown(every)
            if report.by_id is not None:
                choice["prompt_logprobs"] = report.by_id
            yield choice

    def _prompt_text(self, stream: Stream) -> str:
        # An incomplete character at its end is part of what comes next.
        return self._decoder.delta([], stream.row.prompt.tolist(), last=self._request.max_tokens == 0)

    async def events(self) -> AsyncIterator[bytes]:
        request = self._request
        begun: set[int] = set()
        ids: dict[int, list[int]] = {}  # of each stream, not sent yet
        offsets: dict[int, int] = {}  # characters of each stream so far
        async for stream, chunk in self._streams:
            lists = await self._lists(chunk, stream.context_ids, offsets.get(stream.index, 0))
            if lists is not None:
                offsets[stream.index] = lists.offset
            text = self._take(stream, chunk)
            if request.return_token_ids:
                ids.setdefault(stream.index, []).extend(chunk.ids)
            if request.echo and stream.index not in begun:
                text = self._prompt_text(stream) + text
            if not text and not chunk.last and not (lists and lists.count):
                continue  # an incomplete character
            choice = {
                "index": stream.index,
                "text": text,
                "logprobs": self._shown(lists),
                "finish_reason": self._finish_reason(chunk) if chunk.last else None,
            }
            if request.return_token_ids:
                choice["token_ids"] = ids.pop(stream.index)
                if stream.index not in begun:
                    choice["prompt_token_ids"] = stream.row.prompt.tolist()
            begun.add(stream.index)
            yield self._event(choice)
        yield self._end()
