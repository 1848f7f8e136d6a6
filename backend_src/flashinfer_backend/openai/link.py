# SPDX-License-Identifier: Apache-2.0
"""Between the engines' links, which are threads, and the event loop that answers requests."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Sequence

import msgspec

from flashinfer_backend.core.sampling_params import NO_TOKEN_LEFT, SamplingParams
from flashinfer_backend.openai.errors import ApiError
from flashinfer_backend.openai.turns import Turns
from flashinfer_backend.serving.engines import Engines
from flashinfer_backend.serving.generation import Chunk, Generation, GenerationRequest
from flashinfer_backend.structured.grammar import is_of_the_guide
from flashinfer_backend.text.delta import DeltaDecoder
from flashinfer_backend.transport import endpoint, protocol
from flashinfer_backend.transport.endpoint import LEADS, EngineDown

RETRYABLE = (endpoint.ENGINE_LOST, endpoint.ENGINE_DOWN, endpoint.LINK_LOST)
SHUTTING_DOWN = "The server is shutting down."
OTHER_GUIDE = "guided_decoding_guide"  # the engine's name of a guide, a tensor that these clients do not send
STRICT_FUNCTIONS = "strict functions"  # with these words a refusal of a guide of theirs begins


class ClientLeft(Exception):
    """The client has closed its connection."""


class EngineLink:
    """One process's link to a model's engines. All but `schedule` is for the event loop's thread."""

    def __init__(self, engines: Engines, loop: asyncio.AbstractEventLoop) -> None:
        self.engines = engines
        self.loop = loop
        self.turns = Turns()  # of requests whose sequences are prepared
        self._due: deque[Stream] = deque()
        self._woken = False

    def schedule(self, stream: Stream) -> None:
        """Something has arrived for a stream. One wake-up of the loop does for all that a step brings."""
        self._due.append(stream)
        if not self._woken:
            self._woken = True
            self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False
        while self._due:
            stream = self._due.popleft()
            if (streams := stream.streams) is None:  # its request has ended
                continue
            try:
                streams.arrived(stream)
            except Exception as error:  # of this request alone: others wait for what comes behind it
                streams.fail(error)

    def generate(self, rows: list[tuple[GenerationRequest, int]], decoder: DeltaDecoder) -> Streams:
        """Submits sequences: for each row as many as said, which share its prompt and differ by their seed.
        Raises ApiError where there is no engine, or no room for all."""
        self.check_room(sum(count for _, count in rows))
        streams = Streams(self)
        try:
            for row, count in rows:
                context = decoder.context(row.prompt.tolist())
                group = [Stream(row, self, streams, context) for _ in range(count)]
                if not self._submit(group, decoder):
                    break
        except EngineDown as error:
            streams.cancel()
            raise unavailable(str(error)) from None
        return streams

    def check_room(self, count: int = 1) -> None:
        """Called before work is done for `count` sequences. Raises ApiError if not all would be taken now."""
        if refusal := self.engines.refusal(count):
            raise ApiError(refusal, 429)

    def _submit(self, group: list[Stream], decoder: DeltaDecoder) -> bool:
        """Submits the sequences of one prompt, of which the first alone tells of the prompt's tokens. False
        where one is refused, with which the whole request fails. Raises EngineDown."""
        row, first = group[0].row, LEADS if len(group) > 1 else 0
        prompt = row.prompt.tobytes()
        for number, stream in enumerate(group):
            params: SamplingParams = row.params
            if stream.follows_text:
                streams = stream.streams
                sibling = group[0] if number or streams is None else streams.all[0]
                params = stream.match_stop_words(decoder, sibling)
            if number:
                seed = (params.seed + number) % 2**64
                params = msgspec.structs.replace(params, seed=seed, prompt_log_probs=None)
            handle = self.engines.submit(stream, prompt, params, first, row.priority, row.timeout_us)
            if not handle:
                return False
            first = handle if first == LEADS else first
        return True


class Stream(Generation):
    """One sequence; its number among those of its request is `index`."""

    def __init__(
        self, row: GenerationRequest, link: EngineLink, streams: Streams, context_ids: Sequence[int] = ()
    ) -> None:
        super().__init__(row, link.engines.cancel, link.schedule, context_ids)
        # Weakly: a request's sequences are thousands of objects, and go with it, not by a search for circles.
        self._streams = weakref.ref(streams)
        self.index = len(streams.all)
        streams.all.append(self)

    @property
    def streams(self) -> Streams | None:
        """Those of its request, while somebody has them."""
        return self._streams()


class Streams:
    """The sequences of one request, as an asynchronous iterator of (sequence, chunk).

    A stream's chunk is taken when there is somebody to send it, so what arrives for a slow client is one
    chunk. Ends with the last sequence. Raises ApiError for a failure, ClientLeft once `leave` was called, and
    what `fail` was given.
    """

    def __init__(self, link: EngineLink) -> None:
        self.all: list[Stream] = []
        self._link = link
        self._ready: deque[tuple[Stream, Chunk | None]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._open: int | None = None
        self._failure: Exception | None = None
        self._taken = 0  # bytes of whole answers that were taken
        self._cancelled = False

    def held(self) -> int:
        """Bytes that are kept of its answers until the client reads them."""
        return self._taken + sum(stream.waiting_bytes for stream in self.all)

    def arrived(self, stream: Stream) -> None:
        chunk = None
        if not stream.row.streaming:  # there is nothing to send before the end
            chunk = stream.take()
            if chunk is None and stream.failure is None:
                return
        self._ready.append((stream, chunk))
        self._wake()

    def leave(self) -> None:
        """The client has left: the engine drops all sequences."""
        self.cancel()
        self.fail(ClientLeft())

    def fail(self, error: Exception) -> None:
        """Ends the iterator by an error."""
        self._failure = error
        self._wake()

    def _last_failure(self) -> Exception:
        """Kept no longer: once it is raised it refers to all that has waited for us, and so to us."""
        failure, self._failure, self._open = self._failure, None, 0
        assert failure is not None
        return failure

    def cancel(self) -> None:
        """Ends all sequences that still run. Each is told once, however often this is called."""
        if self._cancelled:
            return
        self._cancelled = True
        for stream in self.all:
            self.cancel_one(stream)

    def cancel_one(self, stream: Stream) -> None:
        if stream.handle and not stream.ended:
            self._link.engines.cancel(stream.handle)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> Streams:
        return self

    async def __anext__(self) -> tuple[Stream, Chunk]:
        if self._open is None:
            self._open = len(self.all)
        while self._open:
            if self._failure is not None:
                raise self._last_failure()
            while self._ready:
                stream, chunk = self._ready.popleft()
                chunk = stream.take() if chunk is None else chunk
                if chunk is not None:
                    self._open -= chunk.last
                    if not stream.row.streaming:
                        self._taken += chunk.size
                    if stream.failure is not None and not chunk.last:  # it came while the chunk waited
                        self._ready.append((stream, None))
                    return stream, chunk
                if stream.failed:
                    stream.ended = True
                    self.cancel()
                    raise failure(stream)
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        raise StopAsyncIteration


def unavailable(message: str) -> ApiError:
    """There is currently no engine."""
    return ApiError(message, 503, code="engine_unavailable")


def failure(stream: Stream) -> ApiError:
    """What a client is told of a sequence that failed."""
    message = stream.failure or ""
    if stream.refused and message.startswith(OTHER_GUIDE):
        field = stream.row.guide_field
        return ApiError(field + message.removeprefix(OTHER_GUIDE), param=field)
    if is_of_the_guide(message) or (stream.refused and message.startswith(STRICT_FUNCTIONS)):
        return ApiError(message, param=stream.row.guide_field)
    if message == NO_TOKEN_LEFT:
        return ApiError(message, param="allowed_token_ids")
    if stream.refused and message.startswith(protocol.QUEUE_TIMEOUT):
        return ApiError(message, 503, code="queue_timeout")
    if stream.refused:
        return ApiError(message, 429 if message.startswith(protocol.QUEUE_FULL) else 400)
    if message.startswith(RETRYABLE):
        return unavailable(message)
    return ApiError(message, 500)
