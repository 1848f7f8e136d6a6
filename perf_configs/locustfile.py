# SPDX-License-Identifier: Apache-2.0
"""A stress run with Locust: users who stream answers, some of whom leave in the middle of one.

    uvx locust -f perf_configs/locustfile.py --headless --users 50 --run-time 5m --host http://127.0.0.1:8000
    uvx locust -f perf_configs/locustfile.py --host http://127.0.0.1:8000        # with its page on port 8089

Locust and tritonclient want different versions of geventhttpclient, so it has an environment of its own: what
is imported here needs the standard library and Locust alone.

Each request has a line of its own for the first chunk (TTFT). Streams are checked as by `client bench`: one
that ends early, holds an error or another number of tokens than was due is a failure; with failures the exit
status is 1. Numbers to compare servers by are those of `client bench`, whose processes spend less on a chunk.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gevent
from locust import HttpUser, events, task
from locust.exception import StopUser
from locust.runners import STATE_RUNNING

sys.path.insert(0, str(Path(__file__).parent.parent))

from client.arguments import integer, length_range
from client.wire import Load, error_message, read_stream

WORDS = ["the", "a", "small", "red", "house", "stands", "near", "river", "and", "people", "walk", "there"]
BACKENDS = ("triton", "openai", "openai-chat")
TIMEOUT = (5.0, 300.0)  # seconds to connect, and between two chunks


@events.init_command_line_parser.add_listener
def add_options(parser: Any, **_: Any) -> None:
    """The options of this file, beside Locust's own."""
    group = parser.add_argument_group("requests")
    add = group.add_argument
    add("--backend", choices=BACKENDS, default="triton", help="wire form (default triton)")
    add("--model", default="", help="default: ensemble for Triton; an OpenAI server needs its name")
    add("--prompt-words", type=length_range, default=(16, 256), metavar="LOW[:HIGH]", help="default 16:256")
    add("--output-len", type=length_range, default=(16, 128), metavar="LOW[:HIGH]", help="default 16:128")
    add("--leave", type=share, default=0.0, metavar="SHARE", help="of the requests, left after some chunks")
    add("--requests", type=integer(0), default=0, metavar="N", help="stop after so many; 0: no such limit")
    add("--seed", type=integer(0), default=0, help="of prompts and lengths; each user has its own from it")


@events.test_start.add_listener
def stop_after_requests(environment: Any, **_: Any) -> None:
    """Ends the run once --requests are answered."""
    wanted = environment.parsed_options.requests

    def watch() -> None:
        # Before it runs, Locust is still making users and would not stop.
        while Reader.answered < wanted or environment.runner.state != STATE_RUNNING:
            gevent.sleep(0.1)
        environment.runner.quit()

    if wanted:
        gevent.spawn(watch)  # no user's own greenlet: to quit ends those


def share(text: str) -> float:
    """A number from 0 to 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} must be between 0 and 1")
    return value


class Reader(HttpUser):
    """Sends its next request when the one before is answered."""

    users = 0
    sent = answered = 0

    def on_start(self) -> None:
        options = self.environment.parsed_options
        self.random = random.Random(f"{options.seed} {Reader.users}")
        Reader.users += 1

    @task
    def stream(self) -> None:
        """One answer, to its end or until the user leaves."""
        options = self.environment.parsed_options
        if options.requests and Reader.sent >= options.requests:
            raise StopUser
        Reader.sent += 1
        try:
            self.send(options)
        finally:
            Reader.answered += 1

    def send(self, options: argparse.Namespace) -> None:
        load = Load(options.backend, options.host, options.model or None)
        prompt = " ".join(self.random.choices(WORDS, k=self.random.randint(*options.prompt_words)))
        tokens = self.random.randint(*options.output_len)
        leaves = self.random.random() < options.leave
        chunks = self.random.randint(1, 8) if leaves else None
        path = load.path
        began = time.perf_counter()
        name = f"{path} (left)" if leaves else path
        how = {"stream": True, "catch_response": True, "timeout": TIMEOUT, "name": name}
        with self.client.post(path, json=load.body(prompt, tokens), **how) as response:
            if response.status_code != 200:
                response.failure(f"HTTP {response.status_code}: {error_message(response.text)}")
                return
            reads = list(self.read(response, began, chunks))
            response.request_meta["response_time"] = (time.perf_counter() - began) * 1e3
            response.request_meta["response_length"] = sum(len(data) for _, data in reads)
            if leaves:
                response.close()
                response.success()
                return
            if problem := read_stream(load.backend, reads, tokens, exact=True).error:
                response.failure(problem)
            else:
                response.success()

    def read(self, response: Any, began: float, chunks: int | None) -> Iterator[tuple[float, bytes]]:
        """(time, bytes) of each read, the first of them reported; at most so many."""
        for number, data in enumerate(response.iter_content(chunk_size=None)):
            now = time.perf_counter()
            if number == 0:
                name = response.request_meta["name"]
                self.environment.events.request.fire(
                    request_type="TTFT", name=name, response_time=(now - began) * 1e3,
                    response_length=len(data), exception=None, context={},
                )  # fmt: skip
            yield now, data
            if number + 1 == chunks:
                return
