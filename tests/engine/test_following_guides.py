# SPDX-License-Identifier: Apache-2.0
"""Guides that take too long for a token hold up nobody else."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from engine.harness import TIMEOUT_S, asks, serve, start_core
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.structured.compiler import GrammarCompiler
from flashinfer_backend.structured.grammar import Follower, Grammar, GrammarError, SlowGrammarError

pytest.importorskip("xgrammar")


class FakeGuide:
    def __init__(self, grammar: str, proceed: threading.Event | None = None) -> None:
        self.grammar, self._proceed = grammar, proceed
        self.tokens: list[int] = []

    def accept(self, token: int) -> None:
        while self._proceed is not None and not self._proceed.is_set():
            pass  # costs CPU time, as xgrammar does
        if token < 0:
            raise GrammarError("no such token")
        self.tokens.append(token)

    def too_slow(self, seconds: float) -> SlowGrammarError:
        return SlowGrammarError(self.grammar)


def test_a_step_that_does_not_end_is_left_behind():
    follower, proceed = Follower(), threading.Event()
    moves: Any = [
        (FakeGuide("fast"), 1),
        (FakeGuide("fast"), -1),
        (FakeGuide("slow", proceed), 2),
        (FakeGuide("slow"), 3),
        (FakeGuide("other"), 4),
    ]
    try:
        errors = follower.follow(moves)
        assert [str(error) for error in errors] == ["None", "no such token", "slow", "slow", "None"]
        assert [guide.tokens for guide, _ in moves] == [[1], [], [], [], [4]]
        assert follower.left_behind == 1
        assert follower.follow(moves[:1]) == [None]
    finally:
        proceed.set()
    for thread in follower._left:
        thread.join(TIMEOUT_S)
    assert follower.left_behind == 0
    assert moves[-1][0].tokens == [4], "what was left does not go on with the others"


def test_a_step_that_does_not_end_holds_up_nobody(tmp_path, monkeypatch):
    accept, proceed = Grammar.accept, threading.Event()
    slow_grammars: list[Any] = []
    compile_guide = GrammarCompiler.compile

    def compile_and_note(compiler: GrammarCompiler, kind: str, text: str) -> Any:
        grammar = compile_guide(compiler, kind, text)
        if text == "[a-z]{9}":
            slow_grammars.append(grammar)
        return grammar

    def slowly(guide: Grammar, token: int) -> None:
        while guide.grammar in slow_grammars and not proceed.is_set():
            pass
        accept(guide, token)

    monkeypatch.setattr(GrammarCompiler, "compile", compile_and_note)
    monkeypatch.setattr(Grammar, "accept", slowly)
    with serve(start_core(Path("bundled")), tmp_path) as client:
        try:
            slow, fast = client.submit([5], asks("[a-z]{9}")), client.submit([5], asks("[a-z]{8}"))
            plain = client.submit([5], SamplingParams(max_tokens=30, temperature=0.0))
            client.wait([slow, fast, plain])
            assert "following the guide by one token, after 0, takes 100 ms or more" in (
                client.failure[slow].message
            )
            assert not client.failure[slow].refused and not client.tokens[slow]
            assert client.tokens[fast] and len(client.tokens[plain]) == 30
            again = client.submit([5], asks("[a-z]{9}"))
            client.wait([again])
            assert client.failure[again].refused and len(slow_grammars) == 1
        finally:
            proceed.set()
