# SPDX-License-Identifier: Apache-2.0
"""Guided decoding: which tokens a request's guide allows next, by xgrammar's matcher on the host.

A guide's next mask needs the token before it, so the engine samples guided rows only after it has
read the step before; the model runs ahead of that as always.
"""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch


class GrammarError(ValueError):
    """A guide that cannot be used; the message is for the client."""


class SlowGrammarError(GrammarError):
    """A guide that costs too much, and would again: it is refused when it comes back."""


# Of CPU time for a token, and over about how many: a string that reaches its limit ends in some 12 slow ones.
MOST_SECONDS, AVERAGED = 0.03, 16
MOST_STEP_SECONDS = 0.1  # of CPU time for one token, or for the first mask: all sequences wait meanwhile
STEP_POLL_SECONDS = 0.02  # how often that is looked at
ADVICE = "repetitions within repetitions are ambiguous, write it with fewer of them"

Moves = list[tuple["Grammar", int]]  # guides and the token that each is to follow


class Grammar:
    """The state of one sequence's guide. `allowed`: int32 [ceil(V / 32)], token t is bit t % 32 of word
    t // 32."""

    def __init__(self, compiled: Any, end_id: int, vocab_size: int) -> None:
        """compiled: xgrammar.CompiledGrammar. end_id: what ends the sequence, or -1: then the sequence
        ends where the guide lets nothing follow.

        Raises GrammarError when no token can begin what the guide describes, or when telling which can takes
        so long that following the guide would, too.
        """
        import xgrammar

        began = time.thread_time()
        self.grammar = compiled
        self._end_id = end_id
        self._stop_ids = compiled.tokenizer_info.stop_token_ids if end_id < 0 else [end_id]
        self._matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=self._stop_ids or None)
        self._mask = torch.zeros((1, -(-vocab_size // 32)), dtype=torch.int32)
        self._words = self._mask.numpy()[0]
        self._tokens = 0
        self._seconds = 0.0  # of CPU time for a token, lately
        self._advance()
        took = time.thread_time() - began
        if took > MOST_STEP_SECONDS:
            raise SlowGrammarError(
                f"finding the tokens that can begin the guide takes {took * 1e3:.0f} ms; it should take at"
                f" most {MOST_STEP_SECONDS * 1e3:.0f} ms: {ADVICE}"
            )
        if self.exhausted:
            raise GrammarError("guided_decoding_guide allows no token of this model's vocabulary")

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
            raise GrammarError(f"token {token} does not follow the guide after {self._tokens} tokens")
        self._tokens += 1
        self._advance()
        took = time.thread_time() - began
        self._seconds += (took - self._seconds) / AVERAGED
        if took > MOST_STEP_SECONDS:
            raise self.too_slow(took)
        if self._seconds > MOST_SECONDS:  # of an ambiguous guide, and it grows
            raise GrammarError(
                f"following the guide takes {self._seconds * 1e3:.0f} ms a token after {self._tokens} tokens;"
                f" {ADVICE}"
            )

    def too_slow(self, seconds: float) -> SlowGrammarError:
        return SlowGrammarError(
            f"following the guide by one token, after {self._tokens}, takes {seconds * 1e3:.0f} ms or more;"
            f" it should take at most {MOST_STEP_SECONDS * 1e3:.0f} ms: {ADVICE}"
        )

    def mask_without(self, suppressed: int) -> np.ndarray:
        """The allowed tokens, int32 [ceil(V / 32)], without token `suppressed` (-1: none) unless it is the
        only one."""
        if suppressed < 0:
            return self._words
        mask = self._words.copy()
        mask.view(np.uint32)[suppressed >> 5] &= ~np.uint32(1 << (suppressed & 31))
        return mask if mask.any() else self._words

    def problem(self) -> str:
        """Why an exhausted guide that is not complete cannot go on."""
        return f"the guide allows no token of this model's vocabulary after {self._tokens} tokens"


class Follower:
    """Moves guides on in a thread, so that none holds up the engine's loop for much more than
    MOST_STEP_SECONDS.

    What xgrammar does for a token cannot be interrupted: the thread of a guide that exceeds them is left
    behind, and ends when it comes back from there.
    """

    def __init__(self) -> None:
        self._thread: _FollowingThread | None = None
        self._left: list[_FollowingThread] = []

    @property
    def left_behind(self) -> int:
        """Threads that still work on what nobody waits for."""
        self._left = [thread for thread in self._left if thread.is_alive()]
        return len(self._left)

    def follow(self, moves: Moves) -> list[GrammarError | None]:
        """Why each guide cannot follow its token, or None where it did. A guide with an error is of no more
        use: a thread may still be at work on it."""
        errors: list[GrammarError | None] = [None] * len(moves)
        pending = list(range(len(moves)))
        while pending:
            if self._thread is None:
                self._thread = _FollowingThread()
            done = self._thread.follow([moves[i] for i in pending])
            for i, error in zip(pending, done, strict=False):
                errors[i] = error
            pending = pending[len(done) :]
            if pending:
                self._left.append(self._thread)
                self._thread = None
                slow = moves[pending[0]][0]
                for i in pending:
                    if moves[i][0].grammar is slow.grammar:  # others may take as long
                        errors[i] = slow.too_slow(MOST_STEP_SECONDS)
                pending = [i for i in pending if errors[i] is None]
        return errors


class _FollowingThread(threading.Thread):
    def __init__(self) -> None:
        super().__init__(name="guide-follower", daemon=True)
        self._rounds: SimpleQueue[_Round] = SimpleQueue()
        self.start()

    def run(self) -> None:
        while self._rounds.get().run():
            pass

    def follow(self, moves: Moves) -> list[GrammarError | None]:
        """The outcomes of the first moves: of all, or of those before one that exceeds its limit. Then the
        thread takes no more rounds."""
        assert self.ident is not None
        work, clock = _Round(moves), time.pthread_getcpuclockid(self.ident)
        self._rounds.put(work)
        while not work.done.wait(STEP_POLL_SECONDS):
            if work.leave_if_slow(clock):
                break
        return work.errors


class _Round:
    """The guided rows of a step, as far as one thread gets with them."""

    def __init__(self, moves: Moves) -> None:
        self._moves = moves
        self._lock = threading.Lock()
        self._left = False
        self._began: float | None = None  # the thread's CPU time when it came to the move at work
        self.errors: list[GrammarError | None] = []
        self.done = threading.Event()

    def run(self) -> bool:
        """False where it was left."""
        self._began = time.thread_time()
        for guide, token in self._moves:
            error = _accept(guide, token)
            with self._lock:
                if self._left:
                    return False
                self.errors.append(error)
                self._began = time.thread_time()
        self.done.set()
        return True

    def leave_if_slow(self, clock: int) -> bool:
        """Leave the round if the move at work exceeds its limit; `errors` stays as it is from then on.
        clock: of the CPU time of the thread that runs the round."""
        with self._lock:
            if self._began is not None and len(self.errors) < len(self._moves):
                self._left = time.clock_gettime(clock) - self._began > MOST_STEP_SECONDS
            return self._left


def _accept(guide: Grammar, token: int) -> GrammarError | None:
    try:
        guide.accept(token)
    except GrammarError as error:
        return error
    except Exception as error:  # the loop waits for this thread, whatever goes wrong
        return GrammarError(f"following the guide failed: {error}")
    return None
