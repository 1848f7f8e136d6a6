# SPDX-License-Identifier: Apache-2.0
"""Grammars over single bytes, for tests."""

import time
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import llguidance
import numpy as np

from flashinfer_backend.structured.compiler import Vocabulary, lark_source, make_matcher
from flashinfer_backend.structured.grammar import Grammar

END = 256


@cache
def byte_tokenizer() -> Any:
    tokens = [*(bytes([i]) for i in range(256)), b"<end>"]
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Vocabulary(tokens, [END], END)))


def matcher(kind: str, text: str) -> Any:
    """An llguidance.LLMatcher over bytes and END. Raises GrammarError."""
    return make_matcher(byte_tokenizer(), lark_source(kind, text))


def admits(matcher: Any, text: str | bytes) -> bool:
    walked, tokens = matcher.deep_copy(), list(text.encode() if isinstance(text, str) else text)
    return walked.try_consume_tokens(tokens) == len(tokens) and walked.is_accepting()


def allowed(matcher: Any) -> list[int]:
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def advance(grammar: Grammar, tokens: Iterable[int]) -> str | None:
    """Follow tokens one by one, and compute the mask behind them. Returns why the text cannot go on."""
    for token in tokens:
        taken = grammar.matcher.try_consume_tokens([token]) == 1
        if (problem := grammar.advanced(token, taken)) is not None:
            return problem
    return grammar.fill()


def takes_less(seconds: float, work: Callable[[], object]) -> bool:
    """Whether work takes less of a core that does ten million additions in half a second: of one that is
    slower now, as much more as these additions take there. Of three tries, as others use the core as well."""
    for _ in range(3):
        began = time.thread_time()
        work()
        took = time.thread_time() - began
        if took < seconds:
            return True
        began, total = time.thread_time(), 0
        for number in range(10_000_000):
            total += number
        if took < seconds * (time.thread_time() - began) / 0.5:
            return True
    return False
