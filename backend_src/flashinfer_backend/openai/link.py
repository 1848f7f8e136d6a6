# SPDX-License-Identifier: Apache-2.0
"""Between the engines' links, which are threads, and the event loop that answers requests."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import numpy as np

from flashinfer_backend.core.gate import Gate, Ticket
from flashinfer_backend.core.sampling_params import NO_TOKEN_LEFT, SamplingParams
from flashinfer_backend.openai.arguments import LOGITS_ROOM
from flashinfer_backend.openai.errors import ApiError
from flashinfer_backend.openai.log_probs import PromptLogProbs
from flashinfer_backend.openai.turns import Turns
from flashinfer_backend.serving.engines import Engines
from flashinfer_backend.serving.generation import Chunk, Generation, GenerationRequest
from flashinfer_backend.structured.grammar import is_of_the_guide
from flashinfer_backend.text.delta import DeltaDecoder
from flashinfer_backend.transport import endpoint, protocol
from flashinfer_backend.transport.endpoint import LEADS, EngineDown

# Of a prompt (int32 [n]) and its logits (float32 [n, V]).
Reduce = Callable[[np.ndarray, memoryview], PromptLogProbs]
MOST_REDUCERS = 4  # threads that reduce logits of prompts
MOST_WAITING = 4096  # prompts for that room; the engine's queue has no smaller bound by default
RETRYABLE = (endpoint.ENGINE_LOST, endpoint.ENGINE_DOWN, endpoint.LINK_LOST)
SHUTTING_DOWN = "The server is shutting down."
OTHER_GUIDE = "guided_decoding_guide"  # the engine's name of a guide, a tensor that these clients do not send
STRICT_FUNCTIONS = "strict functions"  # with these words a refusal of a guide of theirs begins


class ClientLeft(Exception):
    """The client has closed its connection."""


class LogitsRoom:
    """What one process has for logits of prompts, of all models: memory, and threads that reduce them."""

    def __init__(
        self, size: int = LOGITS_ROOM, changed: Callable[[int, int], None] = lambda held, waiting: None
    ) -> None:
        """size: bytes that they may take at the same time, or one prompt's where that is more. changed: of
        Gate."""
        self.gate = Gate(size, changed, MOST_WAITING)
        # A thread reduces some 2000 tokens of 128 256 logits a second; the loop and the link also need cores.
        threads = max(1, min(MOST_REDUCERS, len(os.sched_getaffinity(0)) // 4))
        self.reducer = ThreadPoolExecutor(threads, "prompt logits")


class EngineLink:
    """One process's link to a model's engines. All but `schedule` is for the event loop's thread."""

    def __init__(self, engines: Engines, loop: asyncio.AbstractEventLoop, room: LogitsRoom) -> None:
        self.engines = engines
        self.loop = loop
        self.room = room
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

    def generate(
        self, rows: list[tuple[GenerationRequest, int]], decoder: DeltaDecoder, reduce: Reduce | None = None
    ) -> Streams:
        """Submits sequences: for each row as many as said, which share its prompt and differ by their seed.
        Rows with context logits wait until there is room for these, which go through `reduce`, in a thread.
        Raises ApiError where there is no engine, or no room for all that need not wait."""
        self.check_room(sum(count for row, count in rows if not row.params.context_logits))
        streams = Streams(self)
        try:
            for row, count in rows:
                context = decoder.context(row.prompt.tolist())
                group = [Stream(row, self, streams, context) for _ in range(count)]
                if row.params.context_logits:
                    assert reduce is not None
                    group[0].logits = PromptLogits(self, group, decoder, reduce)
                    group[0].logits.enter()
                elif not self.submit(group, decoder, row.timeout_us):
                    break
        except EngineDown as error:
            streams.cancel()
            raise unavailable(str(error)) from None
        return streams

    def check_room(self, count: int = 1) -> None:
        """Called before work is done for `count` sequences. Raises ApiError if not all would be taken now."""
        if refusal := self.engines.refusal(count):
            raise ApiError(refusal, 429)

    def submit(self, group: list[Stream], decoder: DeltaDecoder, timeout_us: int) -> bool:
        """Submits the sequences of one prompt. The first alone brings its logits. False where one is refused,
        with which the whole request fails. Raises EngineDown."""
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
                params = msgspec.structs.replace(params, seed=seed, context_logits=False)
            handle = self.engines.submit(stream, prompt, params, first, row.priority, timeout_us)
            if not handle:
                return False
            first = handle if first == LEADS else first
        return True


class Stream(Generation):
    """One sequence; its number among those of its request is `index`. `logits`: what becomes of its prompt's,
    if they are asked for; set before it is submitted."""

    def __init__(
        self, row: GenerationRequest, link: EngineLink, streams: Streams, context_ids: Sequence[int] = ()
    ) -> None:
        super().__init__(row, link.engines.cancel, link.schedule, context_ids)
        # Weakly: a request's sequences are thousands of objects, and go with it, not by a search for circles.
        self._streams = weakref.ref(streams)
        self.index = len(streams.all)
        self.logits: PromptLogits | None = None
        streams.all.append(self)

    @property
    def streams(self) -> Streams | None:
        """Those of its request, while somebody has them."""
        return self._streams()

    def on_token(self, token: int, code: int, report: protocol.RowReport | None) -> None:
        if self.logits is not None and not self.logits.arrived:
            data = None
            if report is not None:  # which is kept until the sequence's end, and should not hold them
                data, report.context_logits = report.context_logits, None
            self.logits.take(data)
        super().on_token(token, code, report)

    def on_failure(self, message: str, refused: bool) -> None:
        if self.logits is not None and not self.logits.arrived:
            self.logits.take(None)
        super().on_failure(message, refused)


class PromptLogits:
    """The logits of one prompt, from the wait for room until they are reduced to what is asked of them."""

    def __init__(self, link: EngineLink, group: list[Stream], decoder: DeltaDecoder, reduce: Reduce) -> None:
        """group: the sequences of the prompt."""
        self.arrived = False  # they, or that there will be none
        # What `reduce` has made of them; None where none came.
        self.reduced: Future[PromptLogProbs | None] = Future()
        self.size = 0  # of that, in bytes
        self.reduced.set_running_or_notify_cancel()  # who waits for it cannot end it
        self._link, self._group, self._decoder, self._reduce = link, group, decoder, reduce
        self._row = row = group[0].row
        status = link.engines.status
        size = 4 * len(row.prompt) * (status.vocab_size if status else 0)
        self._ticket = Ticket(size, row.priority, self._start)
        self._since = link.loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._abandoned = False

    def enter(self) -> None:
        """Submits the prompt's sequences once there is room. Raises EngineDown where there is no engine; what
        is wrong later comes as the sequences' failure."""
        if not self._link.engines.up:
            raise EngineDown(endpoint.ENGINE_DOWN)
        if not self._link.room.gate.enter(self._ticket):
            self._fail(
                f"{protocol.QUEUE_FULL} of {MOST_WAITING} prompts that wait for room for their log"
                " probabilities has been reached, please try again later",
                True,
            )
        elif self._ticket.waiting and self._row.timeout_us:
            self._timer = self._link.loop.call_later(self._row.timeout_us / 1e6, self._too_late)

    def abandon(self) -> None:
        """They are wanted no more. If the engine has the prompt, their room is kept until it has heard of
        that."""
        self._abandoned = True
        if self._timer is not None:
            self._timer.cancel()
        if self._ticket.waiting:
            self._link.room.gate.leave(self._ticket)

    def take(self, data: memoryview | None) -> None:
        """They have arrived, or (None) will not. For the link's thread."""
        self.arrived = True
        if data is None or self._abandoned:
            self.reduced.set_result(None)
            self._leave()
        else:
            self._link.room.reducer.submit(self._work, [data])

    def _work(self, data: list[memoryview]) -> None:
        try:
            found = None if self._abandoned else self._reduce(self._row.prompt, data[0])
            self.size = 0 if found is None else found.size
            self.reduced.set_result(found)
        except Exception as error:
            self.reduced.set_exception(error)
        finally:
            data.clear()  # before others may take their room
            self._leave()

    def _leave(self) -> None:
        if self._group[0].handle:
            self._link.engines.freed(self._group[0].handle)
        self._link.loop.call_soon_threadsafe(self._link.room.gate.leave, self._ticket)

    def _start(self) -> None:
        timeout_us = self._row.timeout_us
        if self._timer is not None:
            self._timer.cancel()
            timeout_us = max(1, timeout_us - round((self._link.loop.time() - self._since) * 1e6))
        try:
            self._link.submit(self._group, self._decoder, timeout_us)
        except EngineDown as error:
            self._fail(str(error), False)

    def _too_late(self) -> None:
        self._link.room.gate.leave(self._ticket)
        waited_s = self._row.timeout_us / 1e6
        self._fail(
            f"{protocol.QUEUE_TIMEOUT}: it waited for {waited_s:.3g} s for room for its prompt's log"
            " probabilities. Send it again later, with a longer timeout",
            True,
        )

    def _fail(self, message: str, refused: bool) -> None:
        for stream in self._group:
            if not stream.handle:
                stream.on_failure(message, refused)


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
        told = sum(stream.logits.size for stream in self.all if stream.logits is not None)
        return self._taken + told + sum(stream.waiting_bytes for stream in self.all)

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
        for stream in reversed(self.all):  # or the room of one that waits would go to the next
            if stream.logits is not None:
                stream.logits.abandon()
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
