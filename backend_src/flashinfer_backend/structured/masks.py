# SPDX-License-Identifier: Apache-2.0
"""The grammars of the sequences that are being sampled. A step's rows move on by their tokens, and their
masks are computed, while the model runs.

One thread gives all rows of a step to llguidance's own threads, without the interpreter lock. The limits of a
matcher bound what a row costs, and it fails alone. All rows of a step wait for the last mask. Where steps
go on to wait long, costly masks are looked for, and their sequences end.
"""

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from flashinfer_backend.structured.grammar import Grammar

MOST_THREADS = 16  # a mask takes 0.3 ms; the loop and the APIs also need some
SLOW_S = 0.05  # masks of a step that take longer are slow
MOST_SLOW_S = 1.0  # beyond that, over slow steps in a row: from then on costly masks are looked for
COSTLY_S = 0.005  # of a core, of one mask
LOOK_S = 0.25  # a step looks no longer, or as long as its masks took
PAUSE_STEPS = 512  # until the next look where none is costly twice: the machine is slow, or the rows are many


class Move(NamedTuple):
    """What a sequence's grammar is to follow, none of which ends the sequence, and guesses at what comes
    behind that."""

    grammar: Grammar
    tokens: Sequence[int]
    draft: Sequence[int] = ()


class SequenceGrammars:
    """The loop calls, for each step: advance() with the tokens that the step before came to, and with the
    drafts that the step's rows have; followed() where it has to know whether the texts go on; stacked() for
    the masks. A draft leaves no trace in a grammar: the next advance() gets the tokens that were accepted."""

    def __init__(self, vocab_size: int) -> None:
        self._made: dict[int, Grammar] = {}  # by handle
        self._words = -(-vocab_size // 32)
        self._threads = min(MOST_THREADS, max(1, len(os.sched_getaffinity(0)) - 2))
        self._runner: ThreadPoolExecutor | None = None
        self._executor: Any = None
        self._followed: Future[list[int]] | None = None
        self._filled: Future[None] | None = None
        self._last: tuple[list[Grammar], list[int], np.ndarray] | None = None
        self._slow_s = self._took_s = 0.0  # of slow steps in a row, beyond SLOW_S; of the last step's masks
        self._pause = 0  # steps until costly masks are looked for again
        self._suspected: set[Grammar] = set()  # whose mask was costly in the step before

    def put(self, handle: int, grammar: Grammar) -> None:
        """The grammar of a sequence that the next plan says is new."""
        self._made[handle] = grammar

    def take(self, handle: int) -> Grammar:
        """What was put for a sequence."""
        return self._made.pop(handle)

    def advance(self, moves: Sequence[Move]) -> None:
        """Begin to move grammars on, each at most once; no other thread may use them until wait()."""
        self.wait()
        if not moves:
            return
        if self._runner is None:
            import llguidance

            self._runner = ThreadPoolExecutor(1, "grammar-masks")
            self._executor = llguidance.LLExecutor(self._threads)
        self._followed = self._runner.submit(self._follow, moves)
        self._filled = self._runner.submit(self._fill, moves)

    def followed(self) -> list[int]:
        """How many of each move's tokens its grammar followed: all, or as many as there were when its text
        ended (Grammar.ended), or when one did not follow (Grammar.problem). Does not wait for masks."""
        return [] if self._followed is None else self._followed.result()

    def wait(self) -> None:
        """Until the grammars have their masks."""
        self._followed = None
        if self._filled is not None:
            filled, self._filled = self._filled, None
            filled.result()

    def stacked(self, rows: Sequence[tuple[Grammar, int]], counts: Sequence[int] | None = None) -> np.ndarray:
        """The masks of grammars, less a suppressed token each (-1: none); int32 [n, ceil(V / 32)]. counts: of
        each row's masks, one more than its draft has tokens (default: 1 each)."""
        self.wait()
        grammars = [grammar for grammar, _ in rows]
        wanted = [1] * len(rows) if counts is None else list(counts)
        if self._last is not None and self._last[:2] == (grammars, wanted) and all(t < 0 for _, t in rows):
            return self._last[2].view(np.int32)  # as they were computed, without a copy
        # A row whose sequence has failed or left gets the masks that it has; its tokens are dropped.
        found = [
            masks if len(masks) == count else np.resize(masks, (count, self._words))
            for masks, count in zip((grammar.without(token) for grammar, token in rows), wanted, strict=True)
        ]
        return np.concatenate(found).view(np.int32)

    def _follow(self, moves: Sequence[Move]) -> list[int]:
        followed, turn = [0] * len(moves), 0
        while going := [
            i
            for i, (grammar, tokens, _) in enumerate(moves)
            if followed[i] == turn < len(tokens) and not grammar.ended and grammar.problem is None
        ]:
            now = [(moves[i].grammar, moves[i].tokens[turn]) for i in going]
            taken = self._executor.consume_token_par([(grammar.matcher, token) for grammar, token in now])
            for i, (grammar, token), was_taken in zip(going, now, taken, strict=True):
                followed[i] += grammar.advanced(token, was_taken) is None
            turn += 1
        return followed

    def _fill(self, moves: Sequence[Move]) -> None:
        self._last = None
        going = [(grammar, draft) for grammar, _, draft in moves if grammar.problem is None]
        if not going:
            return
        counts = [1 + len(draft) for _, draft in going]
        ends = list(accumulate(counts))
        masks = np.zeros((ends[-1], self._words), np.uint32)
        plain, drafted = [], []
        for (grammar, draft), count, end in zip(going, counts, ends, strict=True):
            if follows := grammar.followable(draft):
                drafted.append((grammar.matcher, end - count, follows))
            else:
                plain.append((grammar.matcher, end - count))
        where, began = (masks.ctypes.data, masks[0].nbytes, len(masks)), time.monotonic()
        costly = self._look([grammar for grammar, _ in going])
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, *where)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *where)
        self._took_s = time.monotonic() - began
        self._slow_s = self._slow_s + self._took_s - SLOW_S if self._took_s > SLOW_S else 0.0
        for (grammar, _), count, end in zip(going, counts, ends, strict=True):
            grammar.take(masks[end - count : end])
        for grammar, cost in costly:
            takes = f"each token takes {cost * 1000:.0f} ms of a core"
            grammar.give_up(f"{takes}, and other requests wait for it")
        self._last = [grammar for grammar, _ in going], counts, masks

    def _look(self, grammars: Sequence[Grammar]) -> list[tuple[Grammar, float]]:
        """Where steps have been slow for long, those whose masks are costly now and were a step before, with
        their seconds, as far as it finds them in time. One mask alone can be costly in any grammar."""
        self._pause = max(0, self._pause - 1)
        suspected, self._suspected = self._suspected, set()
        if self._slow_s <= MOST_SLOW_S or self._pause:
            return []
        until, found = time.monotonic() + max(LOOK_S, self._took_s), []
        for grammar in grammars:
            if time.monotonic() > until:
                break
            if (cost := grammar.cost_s()) > COSTLY_S:
                self._suspected.add(grammar)
                if grammar in suspected:
                    found.append((grammar, cost))
        again = found or (self._suspected and not suspected)
        self._pause = 0 if again else PAUSE_STEPS
        return found
