# SPDX-License-Identifier: Apache-2.0
"""One worker process of the load generator. While the clock runs it only sends and stamps what it reads;
chunks are split, parsed and checked after the last request has ended."""

from __future__ import annotations

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

from client.metrics import RequestRecord
from client.wire import error_message, read_stream

try:
    import uvloop

    new_event_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
except ImportError:
    new_event_loop = asyncio.new_event_loop

# Below uvicorn's 5 s, so that the client never reuses a connection the server is just closing.
KEEPALIVE_SECONDS = 3.0
HEADERS = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Request:
    """One request as a worker gets it; due is in seconds after the start."""

    index: int
    body: bytes
    prompt_tokens: int
    output_tokens: int
    due: float


@dataclass(frozen=True)
class WorkerPlan:
    """What one worker does. Without `ticket` it sends all of `requests`, each when due. With it (a counter
    shared by all workers, each of which then holds every request) it keeps `slots` requests in flight, taking
    the next unsent one."""

    backend: str
    url: str
    requests: Sequence[Request]
    slots: int
    exact: bool
    keep_text: bool
    time_limit: float
    ticket: Any = None


@dataclass
class _Exchange:
    """What was observed of one request; times on time.monotonic()."""

    scheduled: float
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
    clock ran)."""
    if (parent := multiprocessing.parent_process()) is not None and parent.pid is not None:
        end_with_parent(parent.pid)
    gc.collect()
    gc.freeze()
    gc.disable()  # the run is short and a collection would show up as latency
    loop = new_event_loop()
    try:
        exchanges, cpu = loop.run_until_complete(_run(plan, pipe))
    finally:
        loop.close()
    run_start = exchanges.pop("start")
    records = [_record(plan, request, exchanges[request.index], run_start)
               for request in plan.requests if request.index in exchanges]  # fmt: skip
    pipe.send((records, cpu))
    pipe.close()


async def _run(plan: WorkerPlan, pipe: Connection) -> tuple[dict[Any, Any], float]:
    exchanges: dict[Any, Any] = {}
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 20) as session:
        pipe.send("ready")
        start = await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        exchanges["start"] = start
        cpu = time.process_time()

        async def send(request: Request, scheduled: float) -> None:
            exchanges[request.index] = exchange = _Exchange(scheduled)
            await _exchange(session, plan.url, request.body, exchange)

        deadline = start + plan.time_limit
        lanes = [_timed_lane(r, start, send) for r in plan.requests] if plan.ticket is None else [
            _closed_lane(plan, start, send) for _ in range(plan.slots)
        ]  # fmt: skip
        tasks = [asyncio.ensure_future(lane) for lane in lanes]
        if tasks:
            _, pending = await asyncio.wait(tasks, timeout=max(0.0, deadline - time.monotonic()))
            for task in pending:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for task in tasks:
                if not task.cancelled() and (failure := task.exception()) is not None:
                    raise failure
        return exchanges, time.process_time() - cpu


Send = Callable[[Request, float], Awaitable[None]]


async def _timed_lane(request: Request, start: float, send: Send) -> None:
    due = start + request.due
    await asyncio.sleep(due - time.monotonic())
    await send(request, due)


async def _closed_lane(plan: WorkerPlan, start: float, send: Send) -> None:
    await asyncio.sleep(start - time.monotonic())
    free_since = start
    while True:
        with plan.ticket.get_lock():
            index = plan.ticket.value
            plan.ticket.value += 1
        if index >= len(plan.requests):
            return
        request = plan.requests[index]
        scheduled = max(free_since, start + request.due)
        if (delay := scheduled - time.monotonic()) > 0:
            await asyncio.sleep(delay)
        await send(request, scheduled)
        free_since = time.monotonic()


async def _exchange(session: aiohttp.ClientSession, url: str, body: bytes, exchange: _Exchange) -> None:
    monotonic, append = time.monotonic, exchange.reads.append
    exchange.start = monotonic()
    try:
        async with session.post(url, data=body, headers=HEADERS) as response:
            if response.status != 200:
                exchange.error = f"HTTP {response.status}: {error_message(await response.text())}"
                return
            async for data in response.content.iter_any():
                append((monotonic(), data))
    except asyncio.CancelledError:
        exchange.error = "not finished within the time limit"
        raise
    except (aiohttp.ClientError, OSError) as error:
        exchange.error = f"connection failed: {type(error).__name__}: {error}"
    finally:
        exchange.end = monotonic()


def _record(plan: WorkerPlan, request: Request, exchange: _Exchange, run_start: float) -> RequestRecord:
    record = RequestRecord(request.index, request.prompt_tokens, request.output_tokens)
    stream = read_stream(plan.backend, exchange.reads, request.output_tokens, plan.exact)
    record.set_chunk_times(exchange.start, stream.chunk_times, stream.first_text_time, run_start)
    record.scheduled, record.end = exchange.scheduled - run_start, exchange.end - run_start
    record.reported_tokens, record.finish_reason = stream.reported_tokens, stream.finish_reason
    if stream.last_token_time is not None:
        record.last_token = stream.last_token_time - exchange.start
    # An in-band error says more than the dropped connection that may follow it.
    told = stream.error is not None and stream.error.startswith("in-band")
    record.error = stream.error if told or exchange.error is None else exchange.error
    if not plan.exact and stream.reported_tokens is not None:
        record.output_tokens = stream.reported_tokens
    if plan.keep_text:
        record.text = stream.text
    return record
