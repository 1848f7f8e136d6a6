# SPDX-License-Identifier: Apache-2.0
"""One worker process of the load generator. While the clock runs it only sends and stamps what it reads, and
counts for a watcher; chunks are split, parsed and checked after the last request has ended. Only the
answers within a conversation are read at once, since its next turn repeats them."""

import asyncio
import ctypes
import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import aiohttp

from client import grpc_wire
from client.datasets import Prompt
from client.metrics import RequestRecord
from client.progress import Counters
from client.wire import Load, authorization, error_message, read_stream

try:
    import uvloop

    new_event_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
except ImportError:
    new_event_loop = asyncio.new_event_loop

# Below uvicorn's 5 s, so that the client never reuses a connection the server is just closing.
KEEPALIVE_SECONDS = 3.0
UNCOUNTED = "the server does not say how many tokens there were: leave out --respect-eos"
TIME_LIMIT, INTERRUPTED = "not finished within the time limit", "not finished: interrupted"


@dataclass(frozen=True)
class Request:
    """One request as a worker gets it; due is in seconds after the start. later: the further turns, whose
    requests have the indices after this one's."""

    index: int
    body: bytes
    prompt_tokens: int
    output_tokens: int
    due: float
    text: str = ""
    later: tuple[Prompt, ...] = ()
    adapter: str = ""


@dataclass(frozen=True)
class WorkerPlan:
    """What one worker does. Without `ticket` it sends all of `requests`, each when due. With it (a counter
    shared by all workers, each of which then holds every request) it keeps `slots` requests in flight, taking
    the next unsent one. types: of Load.encode."""

    load: Load
    types: dict[str, str] | None
    requests: Sequence[Request]
    counters: Counters
    slots: int
    ticket: Any


@dataclass
class _Exchange:
    """What was observed of one request; times on time.monotonic()."""

    index: int
    prompt_tokens: int
    output_tokens: int
    turn: int
    scheduled: float
    slot_wait: float = 0.0
    start: float = 0.0
    end: float = 0.0
    reads: list[tuple[float, bytes]] = field(default_factory=list)
    error: str | None = None


def end_with_parent(parent: int) -> None:
    """Has the kernel kill this process when the parent (its pid) dies: a load generator that is terminated
    must not leave the server loaded."""
    pr_set_pdeathsig = 1
    # Meant is the thread that started us; it waits in run_load for our end.
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)


def worker_main(plan: WorkerPlan, pipe: Connection) -> None:
    """Process entry: sends "ready", waits for the start time, sends (records, CPU seconds used while the
    clock ran). Whatever comes through the pipe meanwhile ends the run, with what there is."""
    # Ctrl-C reaches the whole group; the parent decides what becomes of the run.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if (parent := multiprocessing.parent_process()) is not None and parent.pid is not None:
        end_with_parent(parent.pid)
    gc.collect()
    gc.freeze()
    gc.disable()  # the run is short and a collection would show up as latency
    loop = new_event_loop()
    try:
        sender = _Sender(plan)
        cpu = loop.run_until_complete(sender.run(pipe))
    finally:
        loop.close()
    records = [_record(plan, exchange, sender.start) for exchange in sender.exchanges]
    os.set_blocking(pipe.fileno(), True)  # the loop that watched it had it otherwise, and results are long
    pipe.send((records, cpu))
    pipe.close()


class _Sender:
    """Sends a worker's requests and holds what was observed, in the order of sending."""

    def __init__(self, plan: WorkerPlan) -> None:
        self.plan = plan
        self.exchanges: list[_Exchange] = []
        self.start = 0.0
        self.cut_off = TIME_LIMIT  # what ended the requests that were cancelled
        self.exchange: Callable[[bytes, _Exchange], Awaitable[None]]

    async def run(self, pipe: Connection) -> float:
        """Everything between "ready" and the last request's end; CPU seconds used meanwhile."""
        load = self.plan.load
        if load.backend == "triton-grpc":
            import grpc

            async with grpc.aio.insecure_channel(load.target, grpc_wire.UNBOUNDED) as channel:
                self.exchange = _grpc_exchange(channel)
                return await self._send_all(pipe)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS)
        async with aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=1 << 20,
            headers={"Content-Type": "application/json", **authorization(load.api_key)},
        ) as session:
            self.exchange = _http_exchange(session, load.target)
            return await self._send_all(pipe)

    async def _send_all(self, pipe: Connection) -> float:
        plan, loop = self.plan, asyncio.get_running_loop()
        pipe.send("ready")
        self.start = await loop.run_in_executor(None, pipe.recv)
        cpu = time.process_time()
        stopped: asyncio.Future[None] = loop.create_future()
        loop.add_reader(pipe.fileno(), lambda: None if stopped.done() else stopped.set_result(None))
        if plan.ticket is None:
            lanes = [self._timed_lane(request) for request in plan.requests]
        else:
            lanes = [self._closed_lane() for _ in range(plan.slots)]
        tasks = [asyncio.ensure_future(lane) for lane in lanes]
        if tasks:
            everything: asyncio.Future[Any] = asyncio.ensure_future(asyncio.wait(tasks))
            left = self.start + plan.load.time_limit - time.monotonic()
            await asyncio.wait(
                {everything, stopped}, timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED
            )
            if stopped.done():
                self.cut_off = INTERRUPTED
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await everything
            for task in tasks:
                if not task.cancelled() and (failure := task.exception()) is not None:
                    raise failure
        loop.remove_reader(pipe.fileno())
        return time.process_time() - cpu

    async def _timed_lane(self, request: Request) -> None:
        due = self.start + request.due
        await asyncio.sleep(due - time.monotonic())
        await self._send(request, due)

    async def _closed_lane(self) -> None:
        plan = self.plan
        await asyncio.sleep(self.start - time.monotonic())
        free_since = self.start
        while True:
            with plan.ticket.get_lock():
                number = plan.ticket.value
                plan.ticket.value += 1
            if number >= len(plan.requests):
                return
            request = plan.requests[number]
            due = self.start + request.due
            scheduled = max(free_since, due)
            if (delay := scheduled - time.monotonic()) > 0:
                await asyncio.sleep(delay)
            # Without a rate all are due at once, and to wait for a slot is what was asked for.
            await self._send(request, scheduled, scheduled - due if request.due else 0.0)
            free_since = time.monotonic()

    async def _send(self, request: Request, scheduled: float, slot_wait: float = 0.0) -> None:
        """The request and, once it is answered, its conversation's next turn; a failure ends it."""
        load = self.plan.load
        first = _Exchange(
            request.index, request.prompt_tokens, request.output_tokens, 0, scheduled, slot_wait
        )
        await self._observed(request.body, first)
        exchange, said = first, [request.text]
        for number, turn in enumerate(request.later, 1):
            answer = read_stream(load.backend, exchange.reads, exchange.output_tokens, False)
            if exchange.error is not None or answer.error is not None:
                return
            tokens = exchange.output_tokens if answer.reported_tokens is None else answer.reported_tokens
            said += [answer.text, turn.text]
            before = exchange.prompt_tokens + tokens
            scheduled = exchange.end + load.think_seconds
            if (delay := scheduled - time.monotonic()) > 0:
                await asyncio.sleep(delay)
            exchange = _Exchange(
                request.index + number, before + turn.prompt_tokens, turn.output_tokens, number, scheduled
            )
            body = load.body(said, turn.output_tokens, request.adapter)
            await self._observed(load.encode(body, self.plan.types), exchange)

    async def _observed(self, body: bytes, exchange: _Exchange) -> None:
        self.exchanges.append(exchange)
        count = self.plan.counters.of(exchange.index)
        exchange.reads = _Reads(exchange, count)
        exchange.start = time.monotonic()
        count.sent()
        try:
            await self.exchange(body, exchange)
        except asyncio.CancelledError:
            exchange.error = self.cut_off
            raise
        finally:
            exchange.end = time.monotonic()
            count.ended(exchange.error is None, exchange.output_tokens)


class _Reads(list[tuple[float, bytes]]):
    """The reads of a request, counted as they come."""

    def __init__(self, exchange: _Exchange, count: Any) -> None:
        super().__init__()
        self._exchange, self._count = exchange, count

    def note(self, data: bytes, chunks: int) -> None:
        now = time.monotonic()
        self.append((now, data))
        self._count.read(now - self._exchange.start, chunks)


def _http_exchange(session: aiohttp.ClientSession, url: str) -> Callable[[bytes, Any], Awaitable[None]]:
    async def send(body: bytes, exchange: Any) -> None:
        note = exchange.reads.note
        try:
            async with session.post(url, data=body) as response:
                if response.status != 200:
                    text = await response.text(errors="replace")
                    exchange.error = f"HTTP {response.status}: {error_message(text)}"
                    return
                async for data in response.content.iter_any():
                    note(data, data.count(b"data:"))
        except (aiohttp.ClientError, OSError) as error:
            exchange.error = f"connection failed: {type(error).__name__}: {error}"

    return send


def _grpc_exchange(channel: Any) -> Callable[[bytes, Any], Awaitable[None]]:
    import grpc

    method = channel.stream_stream(grpc_wire.METHOD)  # without serialisers: bytes in, bytes out

    async def send(body: bytes, exchange: Any) -> None:
        note, call = exchange.reads.note, method()
        try:
            await call.write(body)
            await call.done_writing()
            async for data in call:
                note(data, 1)
        except grpc.aio.AioRpcError as error:
            exchange.error = grpc_wire.error_of(error)
        finally:
            call.cancel()  # nothing where it has ended

    return send


def _record(plan: WorkerPlan, exchange: _Exchange, run_start: float) -> RequestRecord:
    load, exact = plan.load, plan.load.ignore_eos
    record = RequestRecord(exchange.index, exchange.prompt_tokens, exchange.output_tokens, turn=exchange.turn)
    stream = read_stream(load.backend, exchange.reads, exchange.output_tokens, exact)
    record.set_chunk_times(exchange.start, stream.chunk_times, stream.first_text_time, run_start)
    record.scheduled, record.end = exchange.scheduled - run_start, exchange.end - run_start
    record.slot_wait = exchange.slot_wait
    record.reported_tokens, record.finish_reason = stream.reported_tokens, stream.finish_reason
    record.accepted_drafts = stream.accepted_drafts
    if stream.last_token_time is not None:
        record.last_token = stream.last_token_time - exchange.start
    # An in-band error says more than the dropped connection that may follow it.
    told = stream.error is not None and stream.error.startswith("in-band")
    record.error = stream.error if told or exchange.error is None else exchange.error
    if not exact and stream.reported_tokens is not None:
        record.output_tokens = stream.reported_tokens
    elif not exact and record.error is None:
        record.error = UNCOUNTED
    if load.backend == "openai-chat" and stream.reported_prompt_tokens is not None:
        record.prompt_tokens = stream.reported_prompt_tokens  # the chat template adds some
    elif exchange.turn == 0:  # lengths of later turns are sums of parts, which may merge
        record.reported_prompt_tokens = stream.reported_prompt_tokens
    if load.keep_text:
        record.text = stream.text
    return record
