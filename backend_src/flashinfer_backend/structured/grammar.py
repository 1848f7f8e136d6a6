# SPDX-License-Identifier: Apache-2.0
"""Guided decoding: which tokens a sequence's grammar allows next, by llguidance's matcher on the host."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np


class GrammarError(ValueError):
    """A grammar that cannot be used or followed; the message is for the client."""


# What llguidance says when one of its limits ends a matcher. They bound a mask to some 30 ms of a slow core.
# "at 2(8): failed to compile JSON schema: " in front of its messages
SOURCE_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
TOO_COMPLEX = ("too many", "too complex", "limit", "items; max", "fuel")
NO_TOKEN = "the grammar allows no token of this model's vocabulary after {} tokens"
ADVICE = "repetitions within repetitions and broad alternatives are ambiguous, write it with fewer of them"


class Grammar:
    """How far one sequence has come in its grammar.

    `words`: uint32 [ceil(V / 32)], the allowed tokens: token t is bit t % 32 of word t // 32. The end id is
    among them where the sequence may end. After advance() they are those of the token before, until fill().
    `problem` says why it cannot go on, where it cannot.
    """

    def __init__(self, matcher: Any, eos_id: int, end_id: int, vocab_size: int) -> None:
        """matcher: llguidance.LLMatcher in its first state. eos_id: what its masks have where the text may
        end. end_id: what ends the sequence, or -1: then it ends where the grammar lets nothing follow.

        Raises GrammarError when no token can begin what the grammar describes.
        """
        self.matcher = matcher
        self.tokens = 0  # that it has followed
        self.problem: str | None = None
        self.complete = self.exhausted = False  # nothing need follow; nothing may follow
        self._eos_id, self._end_id = eos_id, end_id
        self.words = np.empty(-(-vocab_size // 32), np.uint32)
        if (problem := self.fill(self.words)) is not None:
            raise GrammarError(problem)
        if self.exhausted:
            raise GrammarError(NO_TOKEN.format(0))

    def fill(self, words: np.ndarray) -> str | None:
        """Compute the mask of the current state into `words`; returns why it cannot go on, or None."""
        self.matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        return self.take(words)

    def take(self, words: np.ndarray) -> str | None:
        """The same of words that the matcher has filled."""
        if self.matcher.is_error():
            return self._failed(self._why())
        self.complete = _bit(words, self._eos_id)
        _set_bit(words, self._eos_id, False)
        if self._end_id >= 0:
            _set_bit(words, self._end_id, self.complete)
        self.exhausted = not words.any()
        self.words = words
        if self.exhausted and not self.complete:
            return self._failed(NO_TOKEN.format(self.tokens))
        return None

    def advance(self, tokens: Sequence[int]) -> str | None:
        """Follow the sequence by tokens, none of which ends it. Returns why one does not follow."""
        followed = self.matcher.try_consume_tokens(list(tokens))
        self.tokens += followed
        if followed == len(tokens):
            return None
        return self._stray(tokens[followed])

    def advanced(self, token: int, followed: bool) -> str | None:
        """The same of one token that the matcher has taken already, or refused."""
        self.tokens += followed
        return None if followed else self._stray(token)

    def masks_along(self, draft: Sequence[int], words: np.ndarray) -> int:
        """Masks before each token of a draft and behind the last one, into words[0], words[1], ...; uint32
        [len(draft) + 1, ceil(V / 32)]. Returns how many of them there are: those up to the first token that
        does not follow or ends the sequence. The state is what it was before."""
        state = self.words, self.complete, self.exhausted, self.problem
        count, began = 0, self.tokens
        for token in [*draft, None]:
            if self.fill(words[count]) is not None:
                break
            count += 1
            # The end id is no step of the matcher: rolling it back would take a real token off.
            if token is None or token in (self._end_id, self._eos_id) or not _bit(words[count - 1], token):
                break
            if self.advance([token]) is not None:
                break
        self.rollback(self.tokens - began)
        self.words, self.complete, self.exhausted, self.problem = state
        return count

    def rollback(self, tokens: int) -> None:
        """Take back the last tokens that advance() followed; `words` has to be filled anew."""
        if tokens and not self.matcher.rollback(tokens):
            raise GrammarError(f"cannot take back {tokens} of {self.tokens} tokens: {self._why()}")
        self.tokens -= tokens

    def without(self, suppressed: int) -> np.ndarray:
        """The allowed tokens without token `suppressed` (-1: none), unless it is the only one."""
        if suppressed < 0 or not _bit(self.words, suppressed):
            return self.words
        words = self.words.copy()
        _set_bit(words, suppressed, False)
        return words if words.any() else self.words

    def _stray(self, token: int) -> str:
        if self.matcher.is_error():
            return self._failed(self._why())
        return self._failed(f"token {token} does not follow the grammar after {self.tokens} tokens")

    def _failed(self, problem: str) -> str:
        self.problem = problem
        return problem

    def _why(self) -> str:
        reason = matcher_error(self.matcher)
        if reason.startswith("NoExtension"):
            return NO_TOKEN.format(self.tokens)
        return f"following the grammar failed after {self.tokens} tokens: {reason}"


def matcher_error(matcher: Any) -> str:
    """What is wrong with a matcher, in the words of a client."""
    message = str(matcher.get_error()).partition("\n")[0].removesuffix("<non-verbose/>").strip()
    message = SOURCE_PLACE.sub("", message)
    return f"{message}; {ADVICE}" if any(word in message for word in TOO_COMPLEX) else message


def _bit(words: np.ndarray, token: int) -> bool:
    return token >> 5 < len(words) and bool(int(words[token >> 5]) >> (token & 31) & 1)


def _set_bit(words: np.ndarray, token: int, value: bool) -> None:
    if token >> 5 < len(words):
        bit = np.uint32(1 << (token & 31))
        words[token >> 5] = words[token >> 5] | bit if value else words[token >> 5] & ~bit
