# SPDX-License-Identifier: Apache-2.0
"""What all kinds of requests share on the way back: text of chunks, usage, events, clients that leave."""

import asyncio
import base64
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, Protocol

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from flashinfer_backend.openai import request_ids
from flashinfer_backend.openai.connection import BODY_SEND, CONNECTION
from flashinfer_backend.openai.errors import ApiError, field_error
from flashinfer_backend.openai.link import SHUTTING_DOWN, ClientLeft, Stream, Streams, unavailable
from flashinfer_backend.openai.requests import ChatRequest, CompletionRequest
from flashinfer_backend.openai.served_model import ServedModel
from flashinfer_backend.serving.generation import Chunk
from flashinfer_backend.text.chunk import NO_LIMIT
from flashinfer_backend.text.delta import CONTEXT_IDS, DeltaDecoder
from flashinfer_backend.transport import protocol

encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"
MOST_AT_ONCE = 1 << 20  # bytes of an answer that wait for its client
JSON = [(b"content-type", b"application/json")]
EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # or nginx would gather what is to be streamed
]


class Reply(Protocol):
    """An answer that its streams' chunks make: one body, or events."""

    id: str

    async def body(self) -> Mapping[str, Any]: ...

    def events(self) -> AsyncIterator[bytes]: ...


def event(content: Any) -> bytes:
    return b"data: " + encode(content) + b"\n\n"


def take_text(served: ServedModel, stream: Stream, chunk: Chunk, decoder: DeltaDecoder) -> str:
    """The text that a chunk adds to its sequence's. To be called once for each chunk, in their order."""
    text = decoder.delta(stream.context_ids, chunk.ids, chunk.last)
    note_sent(served, stream, chunk)
    return text if chunk.max_chars == NO_LIMIT else text[: chunk.max_chars]


def text_of_ids(stream: Stream, chunk: Chunk, decoder: DeltaDecoder) -> Iterator[str]:
    """The same text in a piece for each id, before the chunk is noted."""
    context, left = stream.context_ids, chunk.max_chars
    for n, token in enumerate(chunk.ids, 1):
        text = decoder.delta(context, [token], chunk.last and n == len(chunk.ids))
        context = [*context, token][-CONTEXT_IDS:]
        if left != NO_LIMIT:
            text = text[:left]
            left -= len(text)
        yield text
    if chunk.last and not chunk.ids:  # an incomplete character may be left
        yield decoder.delta(context, [], True)


def note_sent(served: ServedModel, stream: Stream, chunk: Chunk) -> None:
    """Counts a chunk's ids as sent, and with the last chunk the sequence as ended."""
    stream.sent(chunk)
    if chunk.last:
        served.metrics.ended(served.name, stream, chunk)


def finish_reason(code: int) -> str:
    return "length" if code == protocol.FINISHED_LENGTH else "stop"


def wrapped_text(text: str) -> str:
    """Reasoning for the client to keep and send back. It has the text anyway: nothing is hidden from it."""
    return base64.b64encode(text.encode(errors="replace")).decode()


def unwrapped_text(content: Any, place: str) -> str:
    """The text that wrapped_text had. Raises ApiError for what it did not make."""
    try:
        return base64.b64decode(content or "", validate=True).decode()
    except (TypeError, ValueError):
        raise field_error(place, "is not of this server") from None


class Usage:
    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._cached: dict[int, int] = {}  # tokens, by id() of the prompt
        self._drafts: dict[int, tuple[int, int]] = {}  # accepted and rejected ones, by id() of the sequence
        self._reasoning: dict[int, int] = {}  # tokens, by id() of a sequence that has ended

    def note(self, stream: Stream, chunk: Chunk) -> None:
        """Takes in what a chunk says of its prompt's blocks, and the last one of its sequence's drafts."""
        for report in chunk.reports:
            if report.perf is not None:
                # Sequences of one prompt find what the first of them made, and may end before it.
                found = report.perf.cached_tokens
                self._cached[id(stream.row)] = min(found, self._cached.get(id(stream.row), found))
                drafted, accepted = report.perf.drafted_tokens, report.perf.accepted_tokens
                if drafted:
                    self._drafts[id(stream)] = accepted, drafted - accepted

    def reasoned(self, stream: Stream, tokens: int) -> None:
        """Takes in how many tokens of reasoning a sequence had."""
        self._reasoning[id(stream)] = tokens

    def body(self) -> dict[str, Any]:
        """So far. A prompt counts once, however many sequences it has."""
        prompts = {id(stream.row): len(stream.row.prompt) for stream in self._streams.all}
        prompt, completion = sum(prompts.values()), sum(s.timing.sent for s in self._streams.all)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }
        details = {"reasoning_tokens": sum(self._reasoning.values())} if self._reasoning else {}
        if self._drafts:
            accepted, rejected = map(sum, zip(*self._drafts.values(), strict=True))
            details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
        if details:
            usage["completion_tokens_details"] = details
        return usage


class Choices:
    """What the answers of chats and completions have in common."""

    def __init__(
        self,
        served: ServedModel,
        request: ChatRequest | CompletionRequest,
        streams: Streams,
        prefix: str,
        kind: str,
    ) -> None:
        """prefix: of the answer's id. kind: of object."""
        self.id = f"{prefix}-{request.request_id or secrets.token_hex(16)}"
        model = request.model or served.name
        self._head = {"id": self.id, "object": kind, "created": int(time.time()), "model": model}
        self._usage = Usage(streams)
        options = request.stream_options
        self._tells_usage = options is not None and options.include_usage
        self._always = options is not None and options.continuous_usage_stats

    def _whole(self, choices: AsyncIterator[dict[str, Any]] | tuple[()]) -> dict[str, Any]:
        return {**self._head, "choices": choices, "usage": self._usage.body()}

    def _event(self, choice: dict[str, Any], **more: Any) -> bytes:
        body = {**self._head, "choices": [choice], **more}
        if self._tells_usage:
            body["usage"] = self._usage.body() if self._always else None
        return event(body)

    def _end(self) -> bytes:
        return (event(self._whole(())) if self._tells_usage else b"") + DONE


class GenerationResponse(Response):
    """Answers while it watches whether the client is still there; one that leaves ends its sequences. Until
    it has begun, an ApiError is for the application's handlers, with its own status."""

    def __init__(
        self, served: ServedModel, streams: Streams, make: Callable[[], Any], answer_id: str
    ) -> None:
        """make: a Reply's body or events."""
        super().__init__()
        self.served, self.streams, self.make = served, streams, make
        self.named = (request_ids.HEADER.encode(), answer_id.encode())
        self.left = False  # the client has

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if CONNECTION in scope:
            scope[CONNECTION].held = self.streams.held
        watch = asyncio.ensure_future(self._watch(receive))
        try:
            await self._answer(scope, send)
        except (ClientLeft, ClientDisconnect, OSError):
            pass
        finally:
            watch.cancel()
            self.streams.cancel()
            for stream in self.streams.all:
                if not stream.timing.counted:
                    self.served.metrics.ended(self.served.name, stream, None)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left = True
        self.streams.leave()

    async def _answer(self, scope: Scope, send: Send) -> None:
        raise NotImplementedError


class JsonResponse(GenerationResponse):
    """One JSON body, at the end; a large one in chunks."""

    async def _answer(self, scope: Scope, send: Send) -> None:
        pieces = _pieces(await self.make())
        content, more = await _gathered(pieces)
        length = [] if more else [(b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": [*JSON, *length, self.named]})
        while more:
            await send({"type": "http.response.body", "body": content, "more_body": True})
            await asyncio.sleep(0)  # or a client that reads fast would keep the loop
            if self.left:
                raise ClientLeft
            content, more = await _gathered(pieces)
        await send({"type": "http.response.body", "body": content})


async def _pieces(body: Mapping[str, Any]) -> AsyncIterator[bytes]:
    """JSON of an answer. A choice is written when those before it are on their way: each repeats what is told
    of the prompt, and together they took 362 MB for a request of 10 kB; log probabilities are ten times
    larger as JSON than as they are kept."""
    if "choices" not in body:
        yield encode(body)
        return
    before, begin, after = encode({**body, "choices": []}).partition(b'"choices":[')
    yield before + begin
    comma = b""
    async for choice in body["choices"]:
        yield comma + encode(choice)
        comma = b","
    yield after


async def _gathered(pieces: AsyncIterator[bytes]) -> tuple[bytes, bool]:
    """The next pieces, together MOST_AT_ONCE bytes or somewhat more, and whether others can follow."""
    content = bytearray()
    async for piece in pieces:
        content += piece
        if len(content) >= MOST_AT_ONCE:
            return bytes(content), True
    return bytes(content), False


class EventResponse(GenerationResponse):
    async def _answer(self, scope: Scope, send: Send) -> None:
        begun, send_body = False, send
        try:
            async for data in self.make():
                if not begun:
                    begun = True
                    await send(
                        {"type": "http.response.start", "status": 200, "headers": [*EVENTS, self.named]}
                    )
                    send_body = scope.get(BODY_SEND, send)
                await send_body({"type": "http.response.body", "body": data, "more_body": True})
        except ApiError as error:
            if not begun:
                raise
            self.served.metrics.error(error.status)
            await send({"type": "http.response.body", "body": error.event(scope), "more_body": True})
        except asyncio.CancelledError:  # the time that running requests have at the server's end is over
            if begun:
                body = unavailable(SHUTTING_DOWN).event(scope)
                await send({"type": "http.response.body", "body": body})
            raise
        await send({"type": "http.response.body", "body": b""})


def respond(served: ServedModel, streams: Streams, reply: Reply, stream: bool | None) -> Response:
    """stream: whether the client wants events."""
    kind, make = (EventResponse, reply.events) if stream else (JsonResponse, reply.body)
    return kind(served, streams, make, reply.id)
