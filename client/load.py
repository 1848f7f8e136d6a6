# SPDX-License-Identifier: Apache-2.0
"""Load generator: `python -m client.load --backend triton --url http://127.0.0.1:8000 --dataset random ...`

Prompts, bodies and arrival times are made before the clock starts; several processes then send from one
common start time. Every request is greedy and ignores its end token unless told otherwise.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from client.arguments import http_url, integer, json_object, length_range, output_file, request_rate, seconds
from client.datasets import Prompt, arrival_times, fingerprint, load_prompts, load_tokenizer
from client.metrics import RequestRecord, check_ends, format_table, request_columns, summarise
from client.wire import BACKENDS, COUNTED_KEYS, DEFAULT_ENDPOINTS, DEFAULT_MODELS, request_body
from client.worker import Request, WorkerPlan, worker_main

START_SECONDS = 60.0  # for the workers to import, unpack and report ready


@dataclass(frozen=True)
class Load:
    """How prompts are sent. request_rate is in requests/s (inf: all at once); max_concurrency bounds requests
    in flight over all workers (None: no bound); time_limit is in seconds from the start, unfinished requests
    then fail. check_tokens has a Triton ensemble report the token count of each chunk, which costs it a
    little; always so without ignore_eos."""

    backend: str
    url: str
    model: str | None = None
    endpoint: str | None = None
    request_rate: float = math.inf
    max_concurrency: int | None = None
    seed: int = 0
    workers: int = 0
    time_limit: float = 600.0
    ignore_eos: bool = True
    check_tokens: bool = False
    keep_text: bool = False
    extra_body: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"unknown backend {self.backend!r}; it is one of {', '.join(BACKENDS)}")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ValueError(f"max_concurrency {self.max_concurrency} must be at least 1")
        if self.workers < 0:
            raise ValueError(f"workers {self.workers} must be at least 1, or 0 for a number by cores")
        path = self.endpoint or DEFAULT_ENDPOINTS[self.backend]
        if not path.startswith("/") or set("{}") & set(path.replace("{model}", "")):
            raise ValueError(f"endpoint {path!r} must begin with / and may hold {{model}}, no other braces")
        if overridden := sorted(COUNTED_KEYS & self.extra_body.keys()):
            raise ValueError(
                f"extra_body must not hold {', '.join(overridden)}: the prompts and their lengths say that"
            )
        if not self.ignore_eos:  # else nobody says how many tokens there were
            object.__setattr__(self, "check_tokens", True)

    @property
    def target(self) -> str:
        """The full URL that is posted to."""
        model = self.model or DEFAULT_MODELS[self.backend]
        path = self.endpoint or DEFAULT_ENDPOINTS[self.backend]
        return self.url.rstrip("/") + path.replace("{model}", model)


@dataclass
class LoadResult:
    """summary: see client.metrics.summarise, with the client's own use of processors added."""

    records: list[RequestRecord]
    summary: dict[str, Any]


def default_workers() -> int:
    """min(8, half the cores this process may run on), at least 1."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // 2))


def run_load(load: Load, prompts: Sequence[Prompt]) -> LoadResult:
    """Sends every prompt and returns every request's record, in order, failed ones included.

    Raises RuntimeError when a worker process dies or does not answer in time.
    """
    model = load.model or DEFAULT_MODELS[load.backend]
    arrivals = arrival_times(len(prompts), load.request_rate, load.seed)
    requests = []
    for index, (prompt, due) in enumerate(zip(prompts, arrivals, strict=True)):
        body = request_body(
            load.backend, model, prompt.text, prompt.output_tokens,
            ignore_eos=load.ignore_eos, check_tokens=load.check_tokens, extra=load.extra_body,
        )  # fmt: skip
        requests.append(
            Request(index, json.dumps(body).encode(), prompt.prompt_tokens, prompt.output_tokens, due)
        )
    count = min(load.workers or default_workers(), len(requests), load.max_concurrency or len(requests))
    context = multiprocessing.get_context("spawn")
    ticket = None if load.max_concurrency is None else context.Value("l", 0)
    plans = [
        WorkerPlan(
            load.backend,
            load.target,
            requests[w::count] if load.max_concurrency is None else requests,
            0 if load.max_concurrency is None else len(range(w, load.max_concurrency, count)),
            load.ignore_eos,
            load.keep_text,
            load.time_limit,
            ticket,
        )
        for w in range(count)
    ]
    records, cpu = _run_workers(context, plans, load.time_limit)
    if load.backend == "triton":
        check_ends(records)
    sent = {r.index for r in records}
    for request in requests:
        if request.index not in sent:
            late = RequestRecord(
                request.index, request.prompt_tokens, request.output_tokens, scheduled=request.due
            )
            late.error = "not sent within the time limit"
            records.append(late)
    records.sort(key=lambda r: r.index)
    summary = summarise(records)
    duration = summary["duration_s"] or 1.0
    summary["client_workers"] = count
    summary["busiest_worker_cpu"] = round(max(cpu, default=0.0) / duration, 3)
    return LoadResult(records, summary)


def _run_workers(
    context: Any, plans: list[WorkerPlan], time_limit: float
) -> tuple[list[RequestRecord], list[float]]:
    workers, records, cpu = [], [], []
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
            pipe.send(start)
        # After the time limit the recorded streams are still to be parsed.
        deadline = start + time_limit + START_SECONDS
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
    return records, cpu


def _receive(pipe: Any, deadline: float, what: str) -> Any:
    if not pipe.poll(max(0.0, deadline - time.monotonic())):
        raise RuntimeError(f"a worker process {what} in time")
    try:
        return pipe.recv()
    except EOFError:
        raise RuntimeError("a worker process died; its error is printed above") from None


def make_parser() -> argparse.ArgumentParser:
    """Checks each option alone; what shows only with others or in files, main finds out."""
    p = argparse.ArgumentParser(
        prog="python -m client.load", description="Load generator for streaming servers."
    )
    p.add_argument("--backend", choices=BACKENDS, default="triton")
    p.add_argument("--url", type=http_url, default="http://127.0.0.1:8000")
    p.add_argument("--endpoint", help="path to post to, {model} replaced (default: by backend)")
    p.add_argument("--model", help="model name (default: ensemble for triton, model for openai)")
    p.add_argument("--tokenizer", required=True, help="folder with tokenizer.json")
    p.add_argument("--dataset", default="random", help="sharegpt:FILE or random")
    p.add_argument("--num-prompts", type=integer(1), default=100)
    p.add_argument(
        "--input-len", type=length_range, default=(128, 128), metavar="LOW[:HIGH]", help="random data"
    )
    p.add_argument(
        "--output-len", type=length_range, default=(128, 128), metavar="LOW[:HIGH]", help="random data"
    )
    p.add_argument(
        "--request-rate", type=request_rate, default=math.inf, help="requests/s, Poisson; inf: all at once"
    )
    p.add_argument("--max-concurrency", type=integer(1), help="most requests in flight")
    p.add_argument("--seed", type=integer(0), default=0)
    p.add_argument("--workers", type=integer(0), default=0, help="processes (0: min(8, cores/2))")
    p.add_argument("--time-limit", type=seconds, default=600.0, help="seconds; unfinished requests then fail")
    p.add_argument("--respect-eos", action="store_true", help="let sequences end at their end token")
    p.add_argument(
        "--check-tokens",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="triton: have every chunk's token count reported and compared, which costs the server an output"
        " a chunk; --no-check-tokens leaves it out",
    )
    p.add_argument("--retokenize", action="store_true", help="also count the tokens of the received text")
    p.add_argument("--save-itl", action="store_true", help="write every inter-chunk time to --output")
    p.add_argument("--extra-body", type=json_object, default={}, help="JSON object laid over each request")
    p.add_argument("--output", type=output_file, help="write everything as JSON")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    lengths = (
        {"input_range": args.input_len, "output_range": args.output_len} if args.dataset == "random" else {}
    )
    try:
        load = Load(
            backend=args.backend, url=args.url, model=args.model, endpoint=args.endpoint,
            request_rate=args.request_rate, max_concurrency=args.max_concurrency, seed=args.seed,
            workers=args.workers, time_limit=args.time_limit, ignore_eos=not args.respect_eos,
            check_tokens=args.check_tokens, keep_text=args.retokenize, extra_body=args.extra_body,
        )  # fmt: skip
        tokenizer = load_tokenizer(args.tokenizer)
        prompts = load_prompts(args.dataset, tokenizer, args.num_prompts, args.seed, **lengths)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    result = run_load(load, prompts)
    if args.retokenize:
        texts = [r.text for r in result.records if r.error is None]
        encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
        result.summary["retokenized_output_tokens"] = sum(len(e) for e in encodings)
    print(format_table(result.summary, f"{load.backend} {load.target} rate {args.request_rate}"))
    if args.output:
        arguments = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
        if math.isinf(args.request_rate):
            arguments["request_rate"] = None  # JSON has no infinity
        document = {
            "arguments": arguments,
            "prompts_sha256": fingerprint(prompts),
            "summary": result.summary,
            "requests": request_columns(result.records, args.save_itl),
        }
        args.output.write_text(json.dumps(document, allow_nan=False), encoding="utf-8")
    return 1 if result.summary["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
