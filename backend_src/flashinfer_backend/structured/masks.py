# SPDX-License-Identifier: Apache-2.0
"""The grammars of the sequences that are being sampled. A step's rows move on by their tokens, and their
masks are computed, while the model runs.

One thread gives all rows of a step to llguidance's own threads, without the interpreter lock. The limits of a
matcher bound what a row costs, and it fails alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from flashinfer_backend.core.step import NewSequence
from flashinfer_backend.structured.compiler import GrammarCompiler
from flashinfer_backend.structured.grammar import Grammar, GrammarError

MOST_THREADS = 16  # a mask takes 0.3 ms; the loop and the doors need some, too
Moves = list[tuple[Grammar, int]]  # grammars and the token that each is to follow


class SequenceGrammars:
    def __init__(self, model_dir: str, vocab_size: int) -> None:
        self._compiler = GrammarCompiler(model_dir, vocab_size)
        self._made: dict[int, Grammar] = {}  # by handle
        self._words = -(-vocab_size // 32)
        self._threads = min(MOST_THREADS, max(1, len(os.sched_getaffinity(0)) - 2))
        self._runner: ThreadPoolExecutor | None = None
        self._executor: Any = None
        self._under_way: Future[None] | None = None
        self._last: tuple[list[Grammar], np.ndarray] | None = None

    def put(self, handle: int, grammar: Grammar) -> None:
        """The grammar of a sequence that the next plan says is new."""
        self._made[handle] = grammar

    def take(self, new: NewSequence) -> Grammar:
        """The grammar of a new sequence, as far as its tokens are; made here where the plan came from another
        process. Raises GrammarError."""
        grammar = self._made.pop(new.handle, None)
        if grammar is None:
            params = new.params
            grammar = self._compiler.compile(params.grammar_type, params.grammar, params.end_id)
            tokens = np.frombuffer(new.tokens, "<i4")[new.prompt_len :].tolist()
            if (problem := grammar.advance(tokens) or grammar.fill(grammar.words)) is not None:
                raise GrammarError(problem)
        return grammar

    def advance(self, moves: Moves) -> None:
        """Begin to move grammars on; nobody else may use them until wait()."""
        self.wait()
        if not moves:
            return
        if self._runner is None:
            import llguidance

            self._runner = ThreadPoolExecutor(1, "grammar-masks")
            self._executor = llguidance.LLExecutor(self._threads)
        self._under_way = self._runner.submit(self._run, moves)

    def wait(self) -> None:
        """Until the grammars have their masks."""
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            under_way.result()

    def stacked(self, rows: Sequence[tuple[Grammar, int]]) -> np.ndarray:
        """The masks of grammars, less a suppressed token each (-1: none); int32 [n, ceil(V / 32)]."""
        self.wait()
        grammars = [grammar for grammar, _ in rows]
        if self._last is not None and self._last[0] == grammars and all(token < 0 for _, token in rows):
            return self._last[1].view(np.int32)  # as they were computed, without a copy
        return np.stack([grammar.without(token) for grammar, token in rows]).view(np.int32)

    def _run(self, moves: Moves) -> None:
        self._last = None
        taken = self._executor.consume_token_par([(grammar.matcher, token) for grammar, token in moves])
        going: list[Grammar] = []
        for (grammar, token), followed in zip(moves, taken, strict=True):
            if grammar.advanced(token, followed) is None:
                going.append(grammar)
        if not going:
            return
        masks = np.empty((len(going), self._words), np.uint32)
        self._executor.unsafe_compute_mask_ptr(
            [(grammar.matcher, i) for i, grammar in enumerate(going)],
            masks.ctypes.data,
            masks[0].nbytes,
            len(going),
        )
        for grammar, words in zip(going, masks, strict=True):
            grammar.take(words)
        self._last = going, masks
