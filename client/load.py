# SPDX-License-Identifier: Apache-2.0
"""Sends prompts to a server under load; `python -m client bench` is its command line.

Prompts, bodies and arrival times are made before the clock starts; several processes then send from one
common start time. Every request is greedy and ignores its end token unless told otherwise.
"""

import itertools
import math
import multiprocessing
import multiprocessing.connection
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from client import grpc_wire
from client.datasets import Prompt, arrival_times
from client.metrics import PERCENTILES, RequestRecord, check_ends, summarise
from client.progress import Counters, Snapshot
from client.wire import TRITON, Load
from client.worker import INTERRUPTED, Request, WorkerPlan, worker_main

WATCH_SECONDS = 0.2  # between two looks at the counters
START_SECONDS = 60.0  # for the workers to import, unpack and report ready


@dataclass
class LoadResult:
    """summary: see client.metrics.summarise, with the client's own use of processors added. interrupted: not
    everything was sent and answered; records and summary are of what was. started: when the run's clock
    began, in seconds since 1970. clock: when it began and when the last request ended, on
    time.monotonic()."""

    records: list[RequestRecord]
    summary: dict[str, Any]
    interrupted: bool = False
    started: float = 0.0
    clock: tuple[float, float] = (-math.inf, math.inf)


# Called a few times a second while a run lasts; True ends it.
Watch = Callable[[Snapshot], bool]


def default_workers() -> int:
    """min(8, half the cores this process may run on), at least 1."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // 2))


def run_load(
    load: Load,
    prompts: Sequence[Prompt],
    watch: Watch | None = None,
    percentiles: Sequence[float] = PERCENTILES,
) -> LoadResult:
    """Sends every prompt and returns every request's record, in order, failed ones included.

    Raises RuntimeError when a worker process dies or does not answer in time, and over gRPC ConnectionError
    when the server does not tell the model's inputs, ValueError for one that it has not.
    """
    types = grpc_wire.input_types(load.target, load.asked_model) if load.backend == "triton-grpc" else None
    arrivals = arrival_times(
        len(prompts), load.request_rate, load.seed, burstiness=load.burstiness, ramp=load.ramp
    )
    requests, total = [], 0
    names = itertools.cycle(load.lora_modules or ("",))
    for prompt, due, name in zip(prompts, arrivals, names, strict=False):
        body, later = load.encode(load.body(prompt.text, prompt.output_tokens, name), types), prompt.later
        text, lengths = prompt.text if later else "", (prompt.prompt_tokens, prompt.output_tokens)
        requests.append(Request(total, body, *lengths, due, text, later, name))
        total += 1 + len(later)
    count = min(load.workers or default_workers(), len(requests), load.max_concurrency or len(requests))
    context = multiprocessing.get_context("spawn")
    ticket = None if load.max_concurrency is None else context.Value("l", 0)
    counters = Counters(context, count, total)
    plans = [
        WorkerPlan(
            load,
            types,
            requests[w::count] if load.max_concurrency is None else requests,
            counters.for_worker(w),
            0 if load.max_concurrency is None else len(range(w, load.max_concurrency, count)),
            ticket,
        )
        for w in range(count)
    ]
    records, cpu, interrupted, start = _run_workers(context, plans, load.time_limit, counters, watch)
    started = time.time() - (time.monotonic() - start)
    if load.backend in TRITON:
        check_ends(records)
    if interrupted:
        records = [r for r in records if r.error != INTERRUPTED]
    else:
        records += _not_sent(requests, records)
    records.sort(key=lambda r: r.index)
    summary = summarise(records, percentiles)
    duration = summary["duration_s"] or 1.0
    summary["client_workers"] = count
    summary["busiest_worker_cpu"] = round(max(cpu, default=0.0) / duration, 3)
    if interrupted:
        summary["unfinished"] = total - len(records)
    clock = start, start + max((record.end for record in records), default=0.0)
    return LoadResult(records, summary, interrupted, started, clock)


def _not_sent(requests: Sequence[Request], records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """A failed record for each request that no worker came to send."""
    errors = {record.index: record.error for record in records}
    missing = []
    for request in requests:
        turns = [(request.prompt_tokens, request.output_tokens)]
        turns += [(turn.prompt_tokens, turn.output_tokens) for turn in request.later]
        failed = False  # a turn of this conversation
        for number, lengths in enumerate(turns):
            index = request.index + number
            if index not in errors:
                late = RequestRecord(index, *lengths, scheduled=request.due, turn=number)
                why = "an earlier turn of the conversation failed"
                late.error = f"not sent: {why}" if failed else "not sent within the time limit"
                missing.append(late)
            else:
                failed = errors[index] is not None and "time limit" not in str(errors[index])
    return missing


def _run_workers(
    context: Any, plans: list[WorkerPlan], time_limit: float, counters: Counters, watch: Watch | None
) -> tuple[list[RequestRecord], list[float], bool, float]:
    """All workers' records, each one's CPU seconds, whether `watch` ended the run, and when it began on
    time.monotonic()."""
    workers, records, cpu, interrupted = [], [], [], False
    try:
        for plan in plans:
            ours, theirs = context.Pipe()
            process = context.Process(target=worker_main, args=(plan, theirs), daemon=True)
            process.start()
            theirs.close()
            workers.append((process, ours))
        deadline = time.monotonic() + START_SECONDS
        for _, pipe in workers:
            _receive(pipe, deadline, "did not become ready")
        start = time.monotonic() + 0.1
        for _, pipe in workers:
            _tell(pipe, start)
        # After the time limit the recorded streams are still to be parsed.
        deadline = start + time_limit + START_SECONDS
        waiting = [pipe for _, pipe in workers]
        while waiting and time.monotonic() < deadline:
            found = multiprocessing.connection.wait(waiting, WATCH_SECONDS)
            waiting = [pipe for pipe in waiting if pipe not in found]
            now = time.monotonic()
            if watch is not None and not interrupted and watch(counters.snapshot(now - start)):
                interrupted = True
                for pipe in waiting:
                    _tell(pipe, "stop")
                deadline = now + START_SECONDS
        for process, pipe in workers:
            part, seconds = _receive(pipe, deadline, "did not finish")
            records += part
            cpu.append(seconds)
            process.join(5)
    finally:
        for process, _ in workers:
            if process.is_alive():
                process.kill()
                process.join(5)
    return records, cpu, interrupted, start


def _tell(pipe: Any, message: Any) -> None:
    with suppress(BrokenPipeError):  # the worker has ended: `_receive` gets its results, or says that it died
        pipe.send(message)


def _receive(pipe: Any, deadline: float, what: str) -> Any:
    if not pipe.poll(max(0.0, deadline - time.monotonic())):
        raise RuntimeError(f"a worker process {what} in time")
    try:
        return pipe.recv()
    except (EOFError, ConnectionResetError):  # the second where it had not read what it was told
        raise RuntimeError("a worker process died; its error is printed above") from None
