# SPDX-License-Identifier: Apache-2.0
"""Guides that take too long cost nobody but their own requests."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.harness import TIMEOUT_S, asks, serve, start_core
from flashinfer_backend.core.request import Request
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.structured import grammar, maker
from flashinfer_backend.structured import queue as grammar_queue
from flashinfer_backend.structured.compiler import GrammarCompiler
from flashinfer_backend.structured.grammar import Follower, Grammar, SlowGrammarError
from flashinfer_backend.structured.queue import GrammarQueue

pytest.importorskip("xgrammar")


class Bench:
    """A GrammarQueue with a stopped clock; guides that begin with "slow" compile until `proceed`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.proceed = threading.Event()
        self.compiled: list[str] = []
        self.outcome: dict[int, str | None] = {}  # by handle
        self.requests: dict[int, Request] = {}
        self._handles = itertools.count(1)
        compile_guide = GrammarCompiler.compile

        def compile_slowly(compiler: GrammarCompiler, kind: str, text: str) -> Any:
            self.compiled.append(text)
            if text.startswith("slow"):
                assert self.proceed.wait(TIMEOUT_S)
            return compile_guide(compiler, kind, text)

        monkeypatch.setattr(GrammarCompiler, "compile", compile_slowly)
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(maker, "time", clock)
        monkeypatch.setattr(grammar_queue, "time", clock)
        self.queue = GrammarQueue("bundled", 2048, Follower())

    def submit(self, guide: str) -> int:
        handle = next(self._handles)
        self.requests[handle] = Request(handle, np.array([5], np.int32), asks(guide), max_new=20)
        self.queue.submit(self.requests[handle])
        return handle

    def start(self, *guides: str) -> list[int]:
        """Submit guides, and wait until they are being compiled."""
        handles = [self.submit(guide) for guide in guides]
        self.until(lambda: set(guides) <= set(self.compiled))
        return handles

    def until(self, condition: Any) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, "the guides were not ready in time"
            self.outcome |= {request.handle: problem for request, problem in self.queue.compiled()}
            time.sleep(0.001)

    def wait(self, *handles: int) -> list[str | None]:
        self.until(lambda: all(handle in self.outcome for handle in handles))
        return [self.outcome[handle] for handle in handles]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    bench = Bench(monkeypatch)
    yield bench
    bench.proceed.set()


def test_what_takes_too_long_fails_and_gives_its_turn_to_the_next(bench):
    slow = bench.start("slow1", "slow2")
    bench.now = 20.0
    other = bench.submit("ab")
    bench.now = 31.0
    assert all("compiling the guide takes more than 30 s" in str(p) for p in bench.wait(*slow))
    assert bench.wait(other) == [None]
    assert bench.requests[other].grammar is not None
    again = bench.submit("slow1")
    assert "more than 30 s" in str(bench.wait(again)[0])
    assert bench.compiled.count("slow1") == 1, "known to be too slow"


def test_what_nobody_waits_for_gives_its_turn_to_the_next(bench):
    slow = bench.start("slow1", "slow2")
    other = bench.submit("ab")
    for handle in slow:
        assert bench.queue.cancel(handle) is not None
    bench.now = 2.0
    assert bench.wait(other) == [None]
    again = bench.submit("slow1")  # joins its compilation
    bench.proceed.set()
    assert bench.wait(again) == [None]
    assert bench.compiled.count("slow1") == 1


def test_what_is_compiled_already_waits_for_no_turn(bench):
    assert bench.wait(bench.submit("ab")) == [None]
    bench.start("slow1", "slow2")
    assert bench.wait(bench.submit("ab")) == [None]
    assert bench.compiled.count("ab") == 1


def test_what_nobody_waits_for_gets_no_turn(bench):
    slow = bench.start("slow1", "slow2")
    kept, cancelled, of_a_stub = (bench.submit(guide) for guide in ("ab", "cd", "ab"))
    assert bench.queue.cancel(cancelled) is not None
    assert bench.queue.cancel(of_a_stub) is not None
    bench.proceed.set()
    assert bench.wait(*slow, kept) == [None] * 3
    assert "cd" not in bench.compiled and bench.compiled.count("ab") == 1


def test_requests_of_one_guide_have_matchers_of_their_own(bench):
    one, other = bench.start("slow")[0], bench.submit("slow")
    bench.proceed.set()
    assert bench.wait(one, other) == [None, None]
    assert bench.compiled == ["slow"]
    assert bench.requests[one].grammar is not bench.requests[other].grammar


def test_a_request_waits_no_longer_than_the_limit_for_its_turn(bench):
    bench.start("slow1", "slow2")
    third = bench.submit("slow3")
    bench.now = 31.0
    assert "not ready within 30 s, as other guides came first" in str(bench.wait(third)[0])
    again = bench.submit("slow3")
    bench.proceed.set()
    assert bench.wait(again) == [None], "it was not its own fault"


def test_threads_that_are_left_behind_are_few(bench, monkeypatch):
    monkeypatch.setattr(maker, "MOST_LEFT_BEHIND", 2)
    assert bench.wait(bench.submit("ab")) == [None]
    slow = bench.start("slow1", "slow2")
    bench.now = 31.0
    bench.wait(*slow)
    refused, known = bench.submit("cd"), bench.submit("ab")
    problem, none = bench.wait(refused, known)
    assert "2 or more guides that took too long are still at work" in str(problem) and none is None
    assert "cd" not in bench.compiled
    bench.proceed.set()
    bench.until(lambda: not bench.queue._maker.left_behind)
    assert bench.wait(bench.submit("cd")) == [None]


def test_at_their_limit_turns_are_kept(bench, monkeypatch):
    monkeypatch.setattr(maker, "MOST_LEFT_BEHIND", 1)
    slow = bench.start("slow1", "slow2")
    queued = bench.submit("slow3"), bench.submit("slow4")
    bench.now = 31.0
    bench.wait(*slow, *queued)
    bench.until(lambda: len(bench.compiled) == 3)
    assert bench.compiled[2] == "slow3", "the one turn that was given away"
    bench.proceed.set()
    bench.until(lambda: not bench.queue._maker.left_behind and bench.queue._maker._turns == 2)


def test_turns_that_were_kept_at_the_limit_are_given_away_once_there_is_room(bench, monkeypatch):
    monkeypatch.setattr(maker, "MOST_LEFT_BEHIND", 1)
    slow = bench.start("slow1", "slow2")
    bench.now = 31.0
    bench.wait(*slow)
    made_by = bench.queue._maker
    assert (made_by.left_behind, made_by._turns) == (1, 1)
    monkeypatch.setattr(maker, "MOST_LEFT_BEHIND", 3)  # as if threads had ended
    bench.wait(bench.submit("ab"))
    bench.until(lambda: made_by._turns == 2)
    bench.proceed.set()
    bench.until(lambda: not made_by.left_behind and made_by._turns == 2 and not made_by._overdue)


def test_a_request_that_waited_for_its_turn_hears_of_its_own_guide(bench):
    slow = bench.start("slow1", "slow2")
    queued = bench.submit("slow3")
    bench.now = 20.0
    for handle in slow:
        bench.queue.cancel(handle)
    other = bench.submit("ab")  # someone asks, and unwanted guides lose their turns
    bench.wait(other)
    bench.until(lambda: "slow3" in bench.compiled)
    bench.now = 35.0  # 15 s after it began
    bench.wait(bench.submit("cd"))
    assert queued not in bench.outcome
    bench.now = 51.0
    assert "compiling the guide takes more than 30 s" in str(bench.wait(queued)[0])
    bench.proceed.set()


def test_what_waits_is_not_looked_at_in_every_step(bench, monkeypatch):
    looks = []

    class SeenWaiting(maker.Waiting):
        def __getattribute__(self, name: str) -> Any:
            looks.append(name)
            return super().__getattribute__(name)

    class SeenJob(maker._Job):
        def __getattribute__(self, name: str) -> Any:
            looks.append(name)
            return super().__getattribute__(name)

    monkeypatch.setattr(grammar_queue, "Waiting", SeenWaiting)
    monkeypatch.setattr(maker, "_Job", SeenJob)
    slow = bench.start("slow1", "slow2")
    waiting = [bench.submit(guide) for guide in [f"a{n}" for n in range(100)] + ["slow1"] * 100]
    looks.clear()
    assert not list(bench.queue.compiled()) and not bench.queue.drop_late(time.monotonic_ns())
    assert len(looks) < 20
    bench.proceed.set()
    assert bench.wait(*slow, *waiting) == [None] * 202


def test_the_memory_of_guides_is_bounded(bench, monkeypatch):
    monkeypatch.setattr(maker, "CACHED_GRAMMARS", 2)
    for guide in ("ab", "cd", "ab", "([", "ab", "cd"):
        bench.wait(bench.submit(guide))
    assert bench.compiled == ["ab", "cd", "([", "cd"]


def test_the_memory_of_grammars_is_bounded_by_bytes(bench, monkeypatch):
    kept = bench.queue._maker
    assert bench.wait(bench.submit("ab"), bench.submit("cd")) == [None, None]
    both = kept._bytes
    assert both == sum(len(key[1]) + grammar.memory_size_bytes for key, grammar in kept._known.items()) > 1000
    monkeypatch.setattr(maker, "CACHED_BYTES", both)  # a third one does not fit
    for guide in ("cd", "ef", "cd", "ab"):
        assert bench.wait(bench.submit(guide)) == [None]
    assert bench.compiled[2:] == ["ef", "ab"] and kept._bytes <= both
    monkeypatch.setattr(maker, "CACHED_BYTES", 1)  # the newest stays
    for guide in ("gh", "gh", "ab"):
        assert bench.wait(bench.submit(guide)) == [None]
    assert bench.compiled[4:] == ["gh", "ab"] and len(kept._known) == 1


def test_a_guide_is_made_beside_the_loop(tmp_path, monkeypatch):
    advance, proceed = Grammar._advance, threading.Event()

    def slowly(guide: Grammar) -> None:
        assert proceed.wait(TIMEOUT_S / 2)
        advance(guide)

    monkeypatch.setattr(Grammar, "_advance", slowly)
    with serve(start_core(Path("bundled")), tmp_path) as client:
        slow = client.submit([5], asks("[a-z]{3}"))
        plain = client.submit([5], SamplingParams(max_tokens=5, temperature=0.0))
        client.wait([plain])
        assert not client.tokens[slow] and slow not in client.failure
        proceed.set()
        client.wait([slow])
        assert client.tokens[slow]


def test_a_first_mask_that_costs_too_much_refuses_the_guide(bench, monkeypatch):
    monkeypatch.setattr(grammar, "MOST_STEP_SECONDS", 0.0)
    one, other = bench.start("slow")[0], bench.submit("slow")
    bench.proceed.set()
    problems = bench.wait(one, other)
    assert all("finding the tokens that can begin the guide takes" in str(p) for p in problems)
    monkeypatch.undo()
    assert "can begin the guide" in str(bench.wait(bench.submit("slow"))[0]), "it is known to be too slow"


def test_one_token_that_costs_too_much_fails_the_guide_at_once(bench, monkeypatch):
    (handle,) = bench.start("[a-z]+")
    bench.wait(handle)
    request = bench.requests[handle]
    assert request.grammar is not None
    allowed = int(np.flatnonzero(np.unpackbits(request.grammar._words.view(np.uint8), bitorder="little"))[0])
    monkeypatch.setattr(grammar, "MOST_STEP_SECONDS", 0.0)
    with pytest.raises(SlowGrammarError, match=r"by one token, after 1, takes"):
        request.grammar.accept(allowed)
