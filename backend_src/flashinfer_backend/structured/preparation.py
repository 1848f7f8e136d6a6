# SPDX-License-Identifier: Apache-2.0
"""Gets the grammars of requests ready in threads, next to the engine's loop."""

import contextlib
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from flashinfer_backend.core.bounds import MOST_GRAMMARS_NS
from flashinfer_backend.core.deadlines import Waiting
from flashinfer_backend.core.gate import Gate, Ticket
from flashinfer_backend.core.paths import resolve_model_dir
from flashinfer_backend.core.request import Request
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.structured.compiler import GrammarCompiler
from flashinfer_backend.structured.grammar import Grammar, GrammarError

log = logging.getLogger(__name__)
MOST_THREADS = 8


@dataclass
class Entry:
    """made: the grammar, and how many nanoseconds of a core it took to make. ticket: for the room for
    grammars, from when it was first made until the request goes on."""

    made: Future[tuple[Grammar, int]]
    ticket: Ticket | None = None


def _nothing() -> None:
    pass


class GrammarPreparation(Waiting[Entry]):
    """Guided requests from their submission until their grammars are there.

    The limits of GrammarCompiler bound what each takes: a millisecond, or half a second of the largest. What
    took long to make is large, some 100 MB a second. So those of requests that wait for a slot are bounded by
    that time: who finds no room gives the grammar up, waits, and has it made again.
    """

    poll_ms = 2
    overtaken = False

    def __init__(self, model_dir: str, vocab_size: int, slots: int, enabled: bool) -> None:
        super().__init__(self._forgotten)
        self._compiler = GrammarCompiler(model_dir, vocab_size, slots)
        threads = min(MOST_THREADS, max(2, len(os.sched_getaffinity(0)) - 2))
        self._threads = ThreadPoolExecutor(threads, "grammar")
        self._done: deque[tuple[Request, Entry]] = deque()  # some may not be wanted any more
        self._room = Gate(MOST_GRAMMARS_NS)
        # By handle, of requests with a grammar and without a slot: called once they have one, or are no more.
        self._in_room: dict[int, weakref.finalize] = {}
        self._gone: deque[Ticket] = deque()  # to be given back by the loop, whose thread has the gate
        if enabled and (resolve_model_dir(model_dir) / "tokenizer.json").is_file():
            self._threads.submit(self._load)

    def needed(self, params: SamplingParams) -> bool:
        return bool(params.grammar_type)

    def submit(self, request: Request) -> None:
        entry = Entry(self._threads.submit(self._make, request.params))
        self.add(request, entry)
        self._await(request, entry)

    def ready(self) -> Iterator[tuple[Request, str | None]]:
        """Requests that need not wait any more: with their grammar in place, or with what is wrong."""
        while self._gone:
            self._room.leave(self._gone.popleft())
        while self._done:
            request, entry = self._done.popleft()
            if not self.holds(request):
                continue
            try:
                grammar, cost_ns = entry.made.result()
            except Exception as error:
                if not isinstance(error, GrammarError):
                    log.error("the grammar of request %d failed", request.handle, exc_info=error)
                self.cancel(request.handle)
                yield request, str(error) or type(error).__name__
                continue
            if entry.ticket is None and not self._enter(request, entry, cost_ns):
                continue
            ticket = entry.ticket
            assert ticket is not None
            # The finalizer keeps the ticket, and a Future its callback: neither may know the request.
            ticket.start, entry.ticket, entry.made = _nothing, None, Future()
            leave = weakref.finalize(request, self._leave, request.handle, ticket)
            leave.atexit = False
            self._in_room[request.handle] = leave
            self.cancel(request.handle)
            request.grammar = grammar
            yield request, None

    def started(self, request: Request) -> None:
        """A request has a slot. Those who have one are bounded by the slots, and need no room here."""
        if (leave := self._in_room.get(request.handle)) is not None:
            leave()

    def _leave(self, handle: int, ticket: Ticket) -> None:  # in any thread
        self._in_room.pop(handle, None)
        self._gone.append(ticket)

    def _make(self, params: SamplingParams) -> tuple[Grammar, int]:
        began = time.thread_time_ns()
        grammar = self._compiler.compile(params.grammar_type, params.grammar, params.end_id)
        return grammar, time.thread_time_ns() - began

    def _await(self, request: Request, entry: Entry) -> None:
        entry.made.add_done_callback(lambda _: self._done.append((request, entry)))

    def _enter(self, request: Request, entry: Entry, cost_ns: int) -> bool:
        """Whether there is room; else it is made again once there is."""
        ticket = entry.ticket = Ticket(cost_ns, request.priority, _nothing)
        self._room.enter(ticket)
        if ticket.inside:
            return True
        entry.made = Future()

        def start() -> None:
            entry.made = self._threads.submit(self._make, request.params)
            self._await(request, entry)

        ticket.start = start
        return False

    def _forgotten(self, entry: Entry) -> None:
        entry.made.cancel()
        if entry.ticket is not None:
            self._room.leave(entry.ticket)

    def _load(self) -> None:
        with contextlib.suppress(GrammarError):  # guided requests hear of it
            self._compiler.load_all()
