# SPDX-License-Identifier: Apache-2.0
"""Stop words found in the text of one sequence, however its tokens cut it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flashinfer_backend.text.delta import CONTEXT_IDS, DeltaDecoder


class StopMatch(NamedTuple):
    """word: index of the stop word. begin, end: its first and one-past-last character, counted from
    the start of the chunk's text; begin is negative when the word began in text already sent.
    text_begin, text_end: the same, counted from the start of the sequence's text. ids: how many of
    the ids fed last it took to complete the word."""

    word: int
    begin: int
    end: int
    text_begin: int
    text_end: int
    ids: int


class StopWordMatcher:
    """Follows the text of one sequence, token by token.

    A chunk is what the caller sends after a `feed`: the ids held before and those just fed, less the
    last `held` ones. Without `hold_back`, `held` is always 0. With it, as many trailing ids are held
    as may show the beginning of a stop word, so that `begin` is never negative: a caller that cuts
    the chunk at `begin` never shows any of the word. When the sequence ends without a match, the
    held ids are to be sent.

    The word that is complete first wins; of several that end at the same character, the longest.
    """

    def __init__(
        self,
        words: Sequence[str],
        decoder: DeltaDecoder,
        context_ids: Sequence[int] = (),
        hold_back: bool = False,
    ) -> None:
        """words: stop words, empty ones are ignored. context_ids: the prompt, where the text follows
        it in one decode, else empty (a sequence's first token may lose its leading space)."""
        self._words = [(index, word) for index, word in enumerate(words) if word]
        self._longest = max((len(word) for _, word in self._words), default=0)
        self._decoder = decoder
        self._context = list(context_ids[-CONTEXT_IDS:])
        self._hold_back = hold_back
        self._tail = ""  # the end of the text, long enough to hold the beginning of any word
        self._length = 0  # characters of the whole text
        self._held_ends: list[int] = []  # per held id, the text's length after it
        self._sent = 0  # characters of the ids that are not held

    @property
    def held(self) -> int:
        """How many of the last ids must not be sent yet."""
        return len(self._held_ends)

    def feed(self, new_ids: Sequence[int]) -> StopMatch | None:
        """Take the next ids; the first match, or None. Not to be called after a match."""
        before = self._length
        ends = []
        for token in new_ids:
            piece = self._decoder.delta(self._context, [token], last=False)
            self._context = [*self._context[1 - CONTEXT_IDS :], token]
            self._tail += piece
            self._length += len(piece)
            ends.append(self._length)
        match = self._find(before)
        if match is not None:
            begin, end, word = match
            ids = next(n for n, reached in enumerate(ends, start=1) if reached >= end)
            return StopMatch(word, begin - self._sent, end - self._sent, begin, end, ids)
        self._tail = self._tail[max(0, len(self._tail) - self._longest) :]
        self._update_held(ends)
        return None

    def _find(self, before: int) -> tuple[int, int, int] | None:
        """(begin, end, word) of the first word that ends after character `before`."""
        offset = self._length - len(self._tail)
        found = []
        for index, word in self._words:
            at = self._tail.find(word, max(0, before - offset - len(word) + 1))
            if at >= 0:
                found.append((at + offset, at + offset + len(word), index))
        return min(found, key=lambda match: (match[1], match[0]), default=None)

    def _update_held(self, ends: list[int]) -> None:
        pending = [*self._held_ends, *ends]
        # Characters up to here can be part of no stop word any more.
        safe = self._length - self._beginning() if self._hold_back else self._length
        released = next((n for n, end in enumerate(pending) if end > safe), len(pending))
        if released:
            self._sent = pending[released - 1]
        self._held_ends = pending[released:]

    def _beginning(self) -> int:
        """Length of the longest end of the text that is the beginning of a stop word."""
        longest = 0
        for _, word in self._words:
            at = len(self._tail) - min(len(word) - 1, len(self._tail))
            while (at := self._tail.find(word[0], at)) >= 0:
                if word.startswith(self._tail[at:]):
                    longest = max(longest, len(self._tail) - at)
                    break
                at += 1
        return longest


def stop_word_texts(words_ids: Sequence[Sequence[int]], decoder: DeltaDecoder) -> list[str]:
    """The text of each stop word given as ids. A word with ids that write no text (such as a skipped
    end-of-turn token) becomes "", which the matcher ignores: it can be matched by its ids only."""
    return [decoder.decode(ids) if decoder.writes_all(ids) else "" for ids in words_ids]
