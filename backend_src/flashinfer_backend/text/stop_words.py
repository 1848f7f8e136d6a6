# SPDX-License-Identifier: Apache-2.0
"""Stop words found in the text of one sequence, however its tokens cut it, or in its ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flashinfer_backend.text.delta import CONTEXT_IDS, DeltaDecoder


class StopMatch(NamedTuple):
    """word: index of the stop word, id words counted on from the others. begin, end: its first and
    one-past-last character, counted from the start of the chunk's text; begin is negative when the word
    began in text already sent.
    text_begin, text_end: the same, counted from the start of the sequence's text. ids: how many of
    the ids fed last it took to complete the word."""

    word: int
    begin: int
    end: int
    text_begin: int
    text_end: int
    ids: int


class StopWordMatcher:
    """Follows the text and the ids of one sequence, token by token.

    A chunk is what the caller sends after a `feed`: the ids held before and those just fed, less the
    last `held` ones. Without `hold_back`, `held` is always 0. With it, as many trailing ids are held
    as may show the beginning of a stop word, so that `begin` is never negative: a caller that cuts
    the chunk at `begin` never shows any of the word. When the sequence ends without a match, the
    held ids are to be sent.

    The word that is complete first wins; of several that end at the same character, or with the same id
    if one of them is an id word, the longest.
    """

    def __init__(
        self,
        words: Sequence[str],
        decoder: DeltaDecoder,
        context_ids: Sequence[int] = (),
        hold_back: bool = False,
        id_words: Sequence[Sequence[int]] = (),
    ) -> None:
        """words: stop words, empty ones are ignored. context_ids: the prompt, where the text follows
        it in one decode, else empty (a sequence's first token may lose its leading space). id_words:
        stop words that are exactly these ids, such as those with ids that write no text."""
        self._words = [(index, word) for index, word in enumerate(words) if word]
        self._id_words = [(len(words) + n, list(ids)) for n, ids in enumerate(id_words) if ids]
        self._longest_ids = max((len(ids) for _, ids in self._id_words), default=0)
        self._ids: list[int] = []  # the last ids, enough to hold the beginning of any id word
        self._starts: list[int] = []  # the text's length before each of them
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
            self._ids.append(token)
            self._starts.append(self._length)
            self._tail += piece
            self._length += len(piece)
            ends.append(self._length)
        found = [self._find_ids(ends)]
        match = self._find(before)
        if match is not None:
            begin, end, word = match
            ids = next(n for n, reached in enumerate(ends, start=1) if reached >= end)
            found.append(StopMatch(word, begin - self._sent, end - self._sent, begin, end, ids))
        first = min((m for m in found if m is not None), key=lambda m: (m.ids, m.begin), default=None)
        if first is not None:
            return first
        self._tail = self._tail[max(0, len(self._tail) - self._longest) :]
        useless = max(0, len(self._ids) - self._longest_ids)
        del self._ids[:useless], self._starts[:useless]
        self._update_held(ends)
        return None

    def _find_ids(self, ends: list[int]) -> StopMatch | None:
        """The first id word that ends within the ids fed last. ends: the text's length after each."""
        if not self._id_words:
            return None
        before = len(self._ids) - len(ends)
        for n, end in enumerate(ends, start=1):
            found = []
            for index, word in self._id_words:
                at = before + n - len(word)
                if at >= 0 and self._ids[at : before + n] == word:
                    found.append((self._starts[at], index))
            if found:
                begin, index = min(found)
                return StopMatch(index, begin - self._sent, end - self._sent, begin, end, n)
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
        if self._hold_back:
            released = min(released, len(pending) - self._beginning_ids())
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

    def _beginning_ids(self) -> int:
        """Number of the last ids that are the beginning of an id word: of the longest such one."""
        lengths = ((n, word) for _, word in self._id_words for n in range(1, len(word)))
        return max((n for n, word in lengths if self._ids[-n:] == word[:n]), default=0)


def stop_word_texts(words_ids: Sequence[Sequence[int]], decoder: DeltaDecoder) -> list[str]:
    """The text of each stop word given as ids. A word with ids that write no text (such as a skipped
    end-of-turn token) becomes "", which the matcher ignores: it can be matched by its ids only."""
    return [decoder.decode(ids) if decoder.writes_all(ids) else "" for ids in words_ids]
