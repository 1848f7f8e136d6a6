# SPDX-License-Identifier: Apache-2.0
"""Grammars of the sequences that are being sampled."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashinfer_backend.core.step import NewSequence
from flashinfer_backend.structured.compiler import GrammarCompiler
from flashinfer_backend.structured.grammar import Follower, Grammar


class GrammarStore:
    """Gives the sampler a sequence's grammar: the one that was compiled beside the engine's loop, or, where a
    plan came from another process, one made here."""

    def __init__(self, tokenizer_dir: str, vocab_size: int) -> None:
        self.follower = Follower()
        self._compiler = GrammarCompiler(tokenizer_dir, vocab_size)
        self._vocab_size = vocab_size
        self._made: dict[int, Grammar] = {}  # by handle
        self._compiled: dict[tuple[str, str], Any] = {}

    def put(self, handle: int, grammar: Grammar) -> None:
        """The grammar of a sequence that the next plan says is new."""
        self._made[handle] = grammar

    def take(self, new: NewSequence) -> Grammar:
        """The grammar of a new sequence, as far as its tokens are. Raises GrammarError."""
        grammar = self._made.pop(new.handle, None)
        if grammar is None:
            key = new.params.grammar_type, new.params.grammar
            if key not in self._compiled:
                self._compiled[key] = self._compiler.compile(*key)
            grammar = Grammar(self._compiled[key], new.params.end_id, self._vocab_size)
            for token in np.frombuffer(new.tokens, "<i4")[new.prompt_len :].tolist():
                grammar.accept(token)
        return grammar
