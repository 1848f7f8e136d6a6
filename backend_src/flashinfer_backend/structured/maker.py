# SPDX-License-Identifier: Apache-2.0
"""Makes the guides of requests in threads, beside the engine's loop.

A guide is compiled once for all requests that have it, and each gets a matcher of its own. Neither can be
interrupted: what takes too long is left behind with its thread, and the next one has its turn.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

from flashinfer_backend.core.request import Request
from flashinfer_backend.structured.compiler import GrammarCompiler
from flashinfer_backend.structured.grammar import Grammar, GrammarError, SlowGrammarError

CACHED_GRAMMARS = 128
CACHED_BYTES = 128 << 20  # of compiled grammars: a large one takes tens of MB
COMPILING_THREADS = 2
MOST_WAIT_SECONDS = 30.0  # of a request for its guide, and of a guide from its turn on
UNWANTED_SECONDS = 1.0  # what a guide that nobody waits for any more may take of its turn
MOST_LEFT_BEHIND = 4  # threads: each takes a core, and may take a GB

TOO_LONG = "compiling the guide takes more than {:g} s; write it smaller, or with less nesting"

Key = tuple[str, str]  # a guide's type and text


@dataclass(eq=False)
class Waiting:
    """A request and, once it is there, its guide or what is wrong."""

    request: Request
    key: Key
    since: float
    outcome: Grammar | Exception | None = None


@dataclass(eq=False)
class _Job:
    """The work on one guide, for all requests that wait for it."""

    key: Key
    waiting: OrderedDict[Waiting, None] = field(default_factory=OrderedDict)  # who came first is first
    began: float | None = None  # to compile, or with the guide of the first that waits
    has_turn: bool = False
    left_behind: bool = False


class GrammarMaker:
    """Makes the guides of requests in threads (xgrammar releases the interpreter).

    COMPILING_THREADS of them have a turn at what is not compiled yet. Keeps what the last guides were
    compiled to, or why they cannot be used.
    """

    def __init__(self, model_dir: str, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._compiler = GrammarCompiler(model_dir, vocab_size)
        self._lock = threading.Lock()  # of all below and of the jobs
        self._known: OrderedDict[Key, Any] = OrderedDict()  # xgrammar.CompiledGrammar, or an exception
        self._bytes = 0  # of them
        self._jobs: dict[Key, _Job] = {}
        self._queue: OrderedDict[Key, _Job] = OrderedDict()  # those of them that wait for a turn
        self._at_work: dict[_Job, None] = {}  # the others, in the order in which they were started
        self._turns = COMPILING_THREADS
        self._overdue: list[_Job] = []  # failed, and to be left behind as soon as there is room for it
        self.left_behind = 0  # threads
        # Whose outcome is there, for the loop to take out; some may not be wanted any more.
        self.done: deque[Waiting] = deque()

    def submit(self, waiting: Waiting, crowded: bool) -> None:
        """crowded: too many threads have been left behind to compile anything new."""
        with self._lock:
            known = self._known.get(waiting.key)
            job = self._jobs.get(waiting.key)
            if known is not None:
                self._known.move_to_end(waiting.key)
            if isinstance(known, Exception):
                self._finish(waiting, known)
            elif job is not None:
                job.waiting[waiting] = None
            elif known is None and crowded:
                problem = (
                    f"{MOST_LEFT_BEHIND} or more guides that took too long are still at work; until they end"
                    " only guides that are compiled already are taken: try again later"
                )
                self._finish(waiting, GrammarError(problem))
            else:
                job = self._jobs[waiting.key] = _Job(waiting.key, OrderedDict({waiting: None}))
                if known is None:
                    self._queue[job.key] = job
                    self._start_queued()
                else:  # what is compiled waits for nothing that is not
                    self._start(job)

    def forget(self, waiting: Waiting) -> None:
        with self._lock:
            self._forget(waiting)

    def begun(self, waiting: Waiting) -> bool:
        """Whether somebody is, or was, at work on a request's guide."""
        with self._lock:
            job = self._jobs.get(waiting.key)
            return waiting.outcome is not None or (job is not None and job.began is not None)

    def _forget(self, waiting: Waiting) -> None:
        job = self._jobs.get(waiting.key)
        if job is not None and waiting in job.waiting:
            del job.waiting[waiting]
            if not job.waiting and job.key in self._queue:
                del self._queue[job.key], self._jobs[job.key]

    def pass_turns(self, now: float) -> None:
        """Leave behind what takes too long."""
        with self._lock:
            for job in list(self._at_work):
                took = 0.0 if job.began is None else now - job.began
                if took > MOST_WAIT_SECONDS:
                    self._fail(job, SlowGrammarError(TOO_LONG.format(MOST_WAIT_SECONDS)))
                    del self._jobs[job.key], self._at_work[job]
                    self._overdue.append(job)
                elif took > UNWANTED_SECONDS and not job.waiting:
                    self._leave(job)
            for job in self._overdue:
                self._leave(job)
            self._overdue = [job for job in self._overdue if not job.left_behind]

    def refuse(self, key: Key, error: Exception) -> None:
        """Refuse a guide whenever it comes back."""
        with self._lock:
            dropped = self._remember(key, error)
        del dropped  # what was compiled may be large: nobody should wait for the lock meanwhile

    def _leave(self, job: _Job) -> None:
        if job.left_behind or self.left_behind >= MOST_LEFT_BEHIND:
            return  # at the limit turns are kept
        job.left_behind = True
        self.left_behind += 1
        if job.has_turn:
            job.has_turn = False
            self._turns += 1
            self._start_queued()

    def _start_queued(self) -> None:
        while self._queue and self._turns:
            self._turns -= 1
            self._start(self._next_queued())

    def _next_queued(self) -> _Job:
        _, job = self._queue.popitem(last=False)
        job.has_turn = True
        return job

    def _start(self, job: _Job) -> None:
        self._at_work[job] = None
        # A daemon: an engine that ends does not wait for a compilation.
        threading.Thread(target=self._run, args=(job,), name="guide", daemon=True).start()

    def _run(self, first: _Job) -> None:
        job: _Job | None = first
        while job is not None:
            self._make(job)
            with self._lock:
                job = self._next_turn(job)

    def _next_turn(self, done: _Job) -> _Job | None:
        """What the thread that has `done` this one does next; None if it ends."""
        self.left_behind -= done.left_behind
        if done in self._overdue:
            self._overdue.remove(done)
        if not done.has_turn:
            return None
        if not self._queue:
            self._turns += 1
            return None
        job = self._next_queued()
        self._at_work[job] = None
        return job

    def _make(self, job: _Job) -> None:
        with self._lock:
            compiled = self._known.get(job.key)
        if compiled is None:
            compiled = self._compile(job)
        while (waiting := self._next_waiting(job)) is not None:
            outcome = self._guide(compiled, waiting.request.params.end_id)
            with self._lock:
                if isinstance(outcome, SlowGrammarError):
                    self._fail(job, outcome)
                elif waiting in job.waiting:
                    self._finish(waiting, outcome)
                    del job.waiting[waiting]

    def _guide(self, compiled: Any, end_id: int) -> Grammar | Exception:
        if isinstance(compiled, Exception):
            return compiled
        try:
            return Grammar(compiled, end_id, self._vocab_size)
        except Exception as error:
            return error

    def _compile(self, job: _Job) -> Any:
        """As it is in `_known` afterwards."""
        compiled: Any
        try:
            self._compiler.load()
            job.began = time.monotonic()
            compiled = self._compiler.compile(*job.key)
        except Exception as error:
            compiled = error
        with self._lock:
            if job.key in self._known:  # as too slow, meanwhile
                return self._known[job.key]
            dropped = self._remember(job.key, compiled)
        del dropped
        return compiled

    def _next_waiting(self, job: _Job) -> Waiting | None:
        """Whose guide to make next; None ends the job."""
        with self._lock:
            if job.waiting:
                job.began = time.monotonic()
                return next(iter(job.waiting))
            if self._jobs.get(job.key) is job:
                del self._jobs[job.key], self._at_work[job]
            return None

    def _finish(self, waiting: Waiting, outcome: Grammar | Exception) -> None:
        waiting.outcome = outcome
        self.done.append(waiting)

    def _fail(self, job: _Job, error: SlowGrammarError) -> None:
        for waiting in job.waiting:
            self._finish(waiting, error)
        job.waiting.clear()
        self._remember(job.key, error)

    def _remember(self, key: Key, compiled: Any) -> list[Any]:
        """Returns what is not kept any more."""
        dropped = [self._known.pop(key)] if key in self._known else []
        self._bytes -= sum(_bytes(key, old) for old in dropped)
        self._known[key] = compiled
        self._bytes += _bytes(key, compiled)
        while len(self._known) > CACHED_GRAMMARS or (self._bytes > CACHED_BYTES and len(self._known) > 1):
            old_key, old = self._known.popitem(last=False)
            self._bytes -= _bytes(old_key, old)
            dropped.append(old)
        return dropped


def _bytes(key: Key, compiled: Any) -> int:
    """About how much memory is kept for a guide."""
    return len(key[1]) + int(getattr(compiled, "memory_size_bytes", 0))
