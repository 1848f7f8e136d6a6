# SPDX-License-Identifier: Apache-2.0
"""Guided decoding: which tokens a sequence's grammar allows next, by llguidance's matcher on the host."""

import re
import time
from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import Any

import numpy as np


class GrammarError(ValueError):
    """A grammar that cannot be used or followed; the message is for the client."""


# What llguidance says when one of its limits ends a matcher. They bound a mask to some 30 ms of a slow core.
# "at 2(8): failed to compile JSON schema: " in front of its messages
SOURCE_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
TOO_COMPLEX = ("too many", "too complex", "limit", "items; max", "fuel")
NO_TOKEN = "the grammar allows no token of this model's vocabulary after {} tokens"
AT_A_LIMIT = "following the grammar failed after {} tokens: {}"
FORCED_WORDS = 8  # words of a mask that have the tokens which spell one text
ADVICE = "repetitions within repetitions and broad alternatives are ambiguous, write it with fewer of them"


class Grammar:
    """How far one sequence has come in its grammar.

    `masks`: uint32 [1 + drafts, ceil(V / 32)], the tokens allowed next and behind each token of a draft:
    token t is bit t % 32 of word t // 32. The end id is among them where the sequence may end. Between
    advanced() and fill() they are those of the token before. `ended`: the text is whole and no token can
    follow. `problem`: why it cannot go on.
    """

    def __init__(self, matcher: Any, tokenizer: Any, end_id: int, vocab_size: int) -> None:
        """matcher: llguidance.LLMatcher in its first state, of an LLTokenizer. end_id: what ends the
        sequence, or -1: then it ends where the grammar lets nothing follow.

        Raises GrammarError when no token can begin what the grammar describes.
        """
        self.matcher = matcher
        self.tokens = 0  # that it has followed
        self.problem: str | None = None
        self.ended = False
        self._tokenizer, self._end_id = tokenizer, end_id
        self._eos_id: int = tokenizer.eos_token  # what the matcher's masks have where the text may end
        self.masks = np.empty((1, -(-vocab_size // 32)), np.uint32)
        if (problem := self.fill()) is not None:
            raise GrammarError(problem)

    def fill(self) -> str | None:
        """Compute the mask of the current state; returns why it cannot go on, or None."""
        masks = np.empty_like(self.masks[:1])
        self.matcher.unsafe_compute_mask_ptr(masks.ctypes.data, masks.nbytes)
        return self.take(masks)

    def cost_s(self) -> float:
        """Seconds of a core that its mask takes, which llguidance then has ready: to be asked before the mask
        is computed. No other thread may use the grammar meanwhile."""
        masks, began = np.empty_like(self.masks[:1]), time.thread_time()
        self.matcher.unsafe_compute_mask_ptr(masks.ctypes.data, masks.nbytes)
        return time.thread_time() - began

    def give_up(self, reason: str) -> None:
        """End it for the sake of others."""
        self._failed(AT_A_LIMIT.format(self.tokens, f"{reason}; {ADVICE}"))

    def take(self, masks: np.ndarray) -> str | None:
        """The same of masks that the matcher has filled. Those behind a draft's first token that does not
        follow are 0 and become the one before them: what is sampled there is of no use."""
        if self.matcher.is_error():
            return self._failed(self._why())
        complete = self._set_end(masks[0])
        self.masks = masks
        if not masks[0].any() and not (complete and self.ended):
            return self._failed(NO_TOKEN.format(self.tokens))
        for before, mask in pairwise(masks):
            self._set_end(mask)
            if not mask.any():
                mask[:] = before
        return None

    def _set_end(self, mask: np.ndarray) -> bool:
        """Have the end id in place of the matcher's. Returns whether the text may end."""
        complete = _bit(mask, self._eos_id)
        _set_bit(mask, self._eos_id, False)
        if self._end_id >= 0:
            _set_bit(mask, self._end_id, complete)
        return complete

    def advanced(self, token: int, followed: bool) -> str | None:
        """A token that does not end the sequence was taken by the matcher (followed), or refused. Returns why
        it does not follow."""
        self.tokens += followed
        self.ended = followed and self.matcher.is_stopped()
        if followed:
            return None
        if self.matcher.is_error():
            return self._failed(self._why())
        return self._failed(f"token {token} does not follow the grammar after {self.tokens} tokens")

    def followable(self, draft: Sequence[int]) -> list[int]:
        """A draft as far as none of its tokens ends the sequence. An end is no step of the matcher: taking it
        back would take a real token off."""
        ends = (self._end_id, self._eos_id)
        return list(takewhile(lambda token: token not in ends, draft))

    def forced(self, most: int) -> list[int]:
        """Up to `most` tokens that are likely to come next, since the grammar allows one text alone: drafts
        that cost no model. Of the tokens that spell it the longest, which is a guess: others can follow as
        well. Some 0.03 ms a token. The masks must be those of the current state, and no other thread may use
        the grammar meanwhile."""
        found: list[int] = []
        masks, mask = self.masks, self.masks[0]
        while len(found) < most and (token := self._only(mask)) is not None:
            if not self.matcher.try_consume_tokens([token]):
                break
            found.append(token)
            mask = np.empty_like(masks[0])
            self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if found:
            self.matcher.rollback(len(found))
        return found

    def _only(self, mask: np.ndarray) -> int | None:
        """The longest of the allowed tokens where all others are beginnings of it."""
        if len(np.flatnonzero(mask)) > FORCED_WORDS or _bit(mask, self._eos_id):
            return None
        bits = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        if not bits or self._end_id in bits:
            return None
        texts = {self._tokenizer.decode_bytes([token]): token for token in bits}
        longest = max(texts, key=len)
        return texts[longest] if all(map(longest.startswith, texts)) else None

    def without(self, suppressed: int) -> np.ndarray:
        """The masks without token `suppressed` (-1: none), unless it is the only one; `masks`' shape."""
        if suppressed < 0 or not any(_bit(mask, suppressed) for mask in self.masks):
            return self.masks
        masks = self.masks.copy()
        for mask, whole in zip(masks, self.masks, strict=True):
            _set_bit(mask, suppressed, False)
            if not mask.any():
                mask[:] = whole
        return masks

    def _failed(self, problem: str) -> str:
        self.problem = problem
        return problem

    def _why(self) -> str:
        reason = matcher_error(self.matcher)
        if reason.startswith("NoExtension"):
            return NO_TOKEN.format(self.tokens)
        return AT_A_LIMIT.format(self.tokens, reason)


def is_of_the_guide(problem: str) -> bool:
    """Whether a sequence cannot go on because of what its client sent as a guide."""
    return problem.startswith(tuple(words.partition("{")[0] for words in (NO_TOKEN, AT_A_LIMIT)))


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
