# SPDX-License-Identifier: Apache-2.0
"""Guided decoding: which tokens a request's guide allows next, by xgrammar's matcher on the host.

A guide's next mask needs the token before it, so the engine samples guided rows only after it has
read the step before; the model runs ahead of that as always.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch


class GuideError(ValueError):
    """A guide that cannot be used; the message is for the client."""


MOST_SECONDS, AVERAGED = 0.03, 8  # of CPU time for a token, and over about how many


class Guide:
    """The state of one sequence's guide. `allowed`: int32 [ceil(V / 32)], token t is bit t % 32 of word
    t // 32."""

    def __init__(self, compiled: Any, end_id: int, vocab_size: int) -> None:
        """compiled: xgrammar.CompiledGrammar. end_id: what ends the sequence, or -1: then the sequence
        ends where the guide lets nothing follow.

        Raises GuideError when no token can begin what the guide describes.
        """
        import xgrammar

        self._end_id = end_id
        self._stop_ids = compiled.tokenizer_info.stop_token_ids if end_id < 0 else [end_id]
        self._matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=self._stop_ids or None)
        self._mask = torch.zeros((1, -(-vocab_size // 32)), dtype=torch.int32)
        self._words = self._mask.numpy()[0]
        self._tokens = 0
        self._seconds = 0.0  # of CPU time for a token, lately
        self._advance()
        if self.exhausted:
            raise GuideError("guided_decoding_guide allows no token of this model's vocabulary")

    def _advance(self) -> None:
        self._matcher.fill_next_token_bitmask(self._mask, 0)
        if self._end_id < 0:
            for token in self._stop_ids:
                self._words.view(np.uint32)[token >> 5] &= ~np.uint32(1 << (token & 31))
        self.exhausted = not self._words.any()
        self.complete = self._matcher.is_completed()

    def accept(self, token: int) -> None:
        """Follow the sequence by one token (other than the end id).

        Afterwards `exhausted` tells that nothing may follow, `complete` that nothing need follow.
        """
        began = time.thread_time()
        if not self._matcher.accept_token(token):
            raise GuideError(f"token {token} does not follow the guide after {self._tokens} tokens")
        self._tokens += 1
        self._advance()
        self._seconds += (time.thread_time() - began - self._seconds) / AVERAGED
        if self._seconds > MOST_SECONDS:  # of an ambiguous guide, and it grows; all sequences wait meanwhile
            raise GuideError(
                f"following the guide takes {self._seconds * 1e3:.0f} ms a token after {self._tokens} tokens;"
                " repetitions within repetitions are ambiguous, write it with fewer of them"
            )

    def mask_without(self, banned: int) -> np.ndarray:
        """The allowed tokens, int32 [ceil(V / 32)], without token `banned` (-1: none) unless it is the
        only one."""
        if banned < 0:
            return self._words
        mask = self._words.copy()
        mask.view(np.uint32)[banned >> 5] &= ~np.uint32(1 << (banned & 31))
        return mask if mask.any() else self._words

    def problem(self) -> str:
        """Why an exhausted guide that is not complete cannot go on."""
        return f"the guide allows no token of this model's vocabulary after {self._tokens} tokens"
