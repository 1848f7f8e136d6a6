# SPDX-License-Identifier: Apache-2.0
"""Between the engines' links, which are threads, and the event loop that answers requests."""

from __future__ import annotations

import asyncio
from collections import deque

import msgspec

from flashinfer_backend.openai.errors import ApiError
from flashinfer_backend.serving.engines import Engines
from flashinfer_backend.serving.generation import Chunk, Generation, GenerationRequest
from flashinfer_backend.text.delta import DeltaDecoder
from flashinfer_backend.transport import endpoint, protocol, rundir
from flashinfer_backend.transport.endpoint import LEADS, EngineDown
from flashinfer_backend.transport.supervisor import EngineRecord, Supervisor

RETRYABLE = (endpoint.ENGINE_LOST, endpoint.ENGINE_DOWN, endpoint.LINK_LOST)


class ClientLeft(Exception):
    """The client has closed its connection."""


class Follower(Supervisor):
    """Attaches to an engine that the stubs of a server start, and leaves starting and ending it to them.
    What serve tells the stubs before it ends tritonserver is not for this process, which stays."""

    takes_part = False

    def attach(self) -> tuple[EngineRecord | None, bool]:
        if not self.run_dir.exists():
            return None, False
        with rundir.locked(self.run_dir):
            record = self._read()
        return (record if record is not None and record.alive else None), False

    def leave(self) -> None:
        pass


class EngineLink:
    """One process's link to the engines. All but `schedule` is for the event loop's thread."""

    def __init__(self, engines: Engines, loop: asyncio.AbstractEventLoop) -> None:
        self.engines = engines
        self._loop = loop
        self._due: deque[Stream] = deque()
        self._woken = False

    def schedule(self, stream: Stream) -> None:
        """Something has arrived for a stream. One wake-up of the loop does for all that a step brings."""
        self._due.append(stream)
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False
        while self._due:
            stream = self._due.popleft()
            stream.streams.arrived(stream)

    def generate(self, rows: list[tuple[GenerationRequest, int]], decoder: DeltaDecoder) -> Streams:
        """Submits sequences: for each row as many as said, which share its prompt and differ by their seed.
        Raises ApiError where there is no engine."""
        streams = Streams(self)
        try:
            for row, count in rows:
                first = LEADS if count > 1 else 0
                for number in range(count):
                    stream = Stream(row, self, streams)
                    params = stream.match_stop_words(decoder) if stream.follows_text else row.params
                    if number:
                        params = msgspec.structs.replace(params, seed=(params.seed + number) % 2**64)
                    prompt = row.prompt.tobytes()
                    handle = self.engines.submit(stream, prompt, params, first, row.priority, row.timeout_us)
                    first = handle if first == LEADS else first
        except EngineDown as error:
            streams.cancel()
            raise unavailable(str(error)) from None
        return streams


class Stream(Generation):
    """One sequence; its number among those of its request is `index`."""

    def __init__(self, row: GenerationRequest, link: EngineLink, streams: Streams) -> None:
        super().__init__(row, link.engines.cancel, lambda: link.schedule(self))
        self.streams = streams
        self.index = len(streams.all)
        streams.all.append(self)


class Streams:
    """The sequences of one request, as an asynchronous iterator of (sequence, chunk).

    A stream's chunk is taken when there is somebody to send it, so what arrives for a slow client is one
    chunk. Ends with the last sequence. Raises ApiError for a failure, ClientLeft once `leave` was called.
    """

    def __init__(self, link: EngineLink) -> None:
        self.all: list[Stream] = []
        self._link = link
        self._ready: deque[tuple[Stream, Chunk | None]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._open: int | None = None
        self._left = False

    def arrived(self, stream: Stream) -> None:
        """Something has arrived for a stream."""
        chunk = None
        if not stream.row.streaming:  # there is nothing to send before the end
            chunk = stream.take()
            if chunk is None and stream.failure is None:
                return
        self._ready.append((stream, chunk))
        self._wake()

    def leave(self) -> None:
        """The client has left: the engine drops all sequences."""
        self._left = True
        self.cancel()
        self._wake()

    def cancel(self) -> None:
        """Ends what still runs."""
        for stream in self.all:
            self.cancel_one(stream)

    def cancel_one(self, stream: Stream) -> None:
        """Ends one sequence, if it still runs."""
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
            if self._left:
                raise ClientLeft
            while self._ready:
                stream, chunk = self._ready.popleft()
                chunk = stream.take() if chunk is None else chunk
                if chunk is not None:
                    self._open -= chunk.last
                    if stream.failure is not None and not chunk.last:  # it came while the chunk waited
                        self._ready.append((stream, None))
                    return stream, chunk
                if stream.failure is not None and not stream.ended:
                    stream.ended = True
                    self.cancel()
                    raise failure(stream)
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        raise StopAsyncIteration


def unavailable(message: str) -> ApiError:
    """There is no engine at the moment."""
    return ApiError(message, 503, code="engine_unavailable")


def failure(stream: Stream) -> ApiError:
    """What a client is told of a sequence that failed."""
    message = stream.failure or ""
    if stream.refused and message.startswith(protocol.QUEUE_TIMEOUT):
        return ApiError(message, 503, code="queue_timeout")
    if stream.refused:
        return ApiError(message, 429 if message.startswith(protocol.QUEUE_FULL) else 400)
    if message.startswith(RETRYABLE):
        return unavailable(message)
    return ApiError(message, 500)


def log_probs(chunk: Chunk) -> list[protocol.RowReport]:
    """What was reported of each of a chunk's ids, where log probabilities were asked for."""
    return [report for report in chunk.reports if report.log_prob is not None][: len(chunk.ids)]
