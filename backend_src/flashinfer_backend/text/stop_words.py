# SPDX-License-Identifier: Apache-2.0
"""Stop words found in the text of one sequence, however its tokens cut it, or in its ids."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any, NamedTuple

import ahocorasick

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


class StopWords:
    """The words that sequences are searched for; immutable, and shared by sequences with the same words."""

    def __init__(self, words: Sequence[str], hold_back: bool, id_words: Sequence[Sequence[int]]) -> None:
        """words: stop words, empty ones are ignored. hold_back: whether their beginnings are held back.
        id_words: stop words that are exactly these ids, such as those with ids that write no text."""
        # Each automaton takes the same steps for any number of words.
        self.text_search = _search([(word, index) for index, word in enumerate(words)])
        self.id_search = _search([(_as_text(ids), len(words) + n) for n, ids in enumerate(id_words)])
        self.hold_back = hold_back
        self.sorted = sorted(filter(None, words)) if hold_back else []
        self.sorted_ids = sorted(tuple(ids) for ids in id_words if ids) if hold_back else []
        self.inside = frozenset("".join(word[:-1] for word in words)) if hold_back else frozenset()
        self.longest = max(map(len, words), default=0)
        self.longest_ids = max(map(len, id_words), default=0)


class StopWordMatcher:
    """Follows the text and the ids of one sequence, token by token.

    A chunk is what the caller sends after a `feed`: the ids held before and those just fed, less the
    last `held` ones. Without hold_back, `held` is always 0. With it, the trailing ids that may begin a
    stop word are held, so that `begin` is never negative: a caller that cuts the chunk at `begin` never
    shows any of the word. When the sequence ends without a match, send the held ids.

    The word that is complete first wins; of several that end at the same character, or with the same id
    if one of them is an id word, the longest.
    """

    def __init__(
        self, words: StopWords, decoder: DeltaDecoder, context_ids: Sequence[int] = (), free: int = 0
    ) -> None:
        """context_ids: the prompt or the end of it, where the text follows it in one decode, else empty (a
        sequence's first token may lose its leading space). free: how many of the sequence's first ids
        complete no stop word."""
        self._words = words
        self._ids: list[int] = []  # the last ids, enough to hold the beginning of any id word
        self._starts: list[int] = []  # the text's length before each of them
        self._begun = 0  # characters at the end of the text that are the beginning of a word
        self._begun_ids = 0  # ids at its end that are the beginning of an id word
        self._decoder = decoder
        self._context = list(context_ids[-CONTEXT_IDS:])
        self._free = free
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
        ends, pieces = [], []
        for token in new_ids:
            piece = self._decoder.delta(self._context, [token], last=False)
            self._context = [*self._context[1 - CONTEXT_IDS :], token]
            self._ids.append(token)
            self._starts.append(self._length)
            pieces.append(piece)
            self._length += len(piece)
            ends.append(self._length)
        text = "".join(pieces)
        self._tail += text
        free = min(self._free, len(new_ids))
        self._free -= free
        first = self._find_ids(new_ids, ends, free)
        match = self._find(text, ends[free - 1] if free else self._length - len(text))
        if match is not None:
            begin, end, word = match
            ids = next(n for n, reached in enumerate(ends, start=1) if reached >= end)
            other = StopMatch(word, begin - self._sent, end - self._sent, begin, end, ids)
            if first is None or (other.ids, other.begin) < (first.ids, first.begin):
                first = other
        if first is not None:
            return first
        self._tail = self._tail[max(0, len(self._tail) - self._words.longest) :]
        useless = max(0, len(self._ids) - self._words.longest_ids)
        del self._ids[:useless], self._starts[:useless]
        self._update_held(ends, len(text))
        return None

    def _find_ids(self, new_ids: Sequence[int], ends: list[int], free: int) -> StopMatch | None:
        """The first id word that ends within new_ids after the first `free` of them. ends: the text's length
        after each."""
        if self._words.id_search is None:
            return None
        recent = self._ids[-(len(new_ids) + self._words.longest_ids - 1) :]
        earlier = len(recent) - len(new_ids)
        found = self._words.id_search.iter(_as_text(recent))
        matches = [(at - earlier, size, index) for at, (index, size) in found if at >= earlier + free]
        if not matches:
            return None
        first = min(at for at, _, _ in matches)
        before = len(self._ids) - len(ends)
        begin, index = min(
            (self._starts[before + at + 1 - size], index) for at, size, index in matches if at == first
        )
        end = ends[first]
        return StopMatch(index, begin - self._sent, end - self._sent, begin, end, first + 1)

    def _find(self, text: str, after: int) -> tuple[int, int, int] | None:
        """(begin, end, word) of the first word that ends within `text`, the characters fed last, and not
        within the first `after` characters of all."""
        if self._words.text_search is None:
            return None
        recent = self._tail[-(len(text) + self._words.longest - 1) :]
        offset = self._length - len(recent)
        found = list(self._words.text_search.iter(recent))
        if not found:
            return None
        ends = ((offset + at + 1, index, size) for at, (index, size) in found)
        matches = ((end - size, end, index) for end, index, size in ends if end > after)
        return min(matches, key=lambda match: (match[1], match[0], match[2]), default=None)

    def _update_held(self, ends: list[int], new_chars: int) -> None:
        pending = [*self._held_ends, *ends]
        # Characters up to here can be part of no stop word any more.
        safe = self._length - self._beginning(new_chars) if self._words.hold_back else self._length
        released = next((n for n, end in enumerate(pending) if end > safe), len(pending))
        if self._words.hold_back:
            released = min(released, len(pending) - self._beginning_ids(len(ends)))
        if released:
            self._sent = pending[released - 1]
        self._held_ends = pending[released:]

    def _beginning(self, new_chars: int) -> int:
        """Length of the longest end of the text that begins a stop word; it grows by at most new_chars."""
        if self._tail[-1:] not in self._words.inside:
            self._begun = 0
            return 0
        longest = min(self._begun + new_chars, self._words.longest - 1, len(self._tail))
        ends = range(longest, 0, -1)
        self._begun = next((n for n in ends if _begins(self._words.sorted, self._tail[-n:])), 0)
        return self._begun

    def _beginning_ids(self, new_ids: int) -> int:
        """Number of the last ids that are the beginning of an id word: of the longest such one."""
        if not self._words.sorted_ids:
            return 0
        longest = min(self._begun_ids + new_ids, self._words.longest_ids - 1, len(self._ids))
        ends = range(longest, 0, -1)
        self._begun_ids = next((n for n in ends if _begins(self._words.sorted_ids, tuple(self._ids[-n:]))), 0)
        return self._begun_ids


def _search(words: list[tuple[str, int]]) -> Any:
    """An automaton that finds (last place, (index, length)) of all words in a text; None without any. Empty
    words are dropped, and of equal words the first counts. Never reuse its iterators: setting one to another
    text ends the process (pyahocorasick 2.3.1)."""
    automaton = ahocorasick.Automaton()
    for word, index in words:
        if word and word not in automaton:
            automaton.add_word(word, (index, len(word)))
    if not len(automaton):
        return None
    automaton.make_automaton()
    return automaton


def _as_text(ids: Sequence[int]) -> str:
    """A character for each id."""
    return "".join(map(chr, ids))


def _begins(words: list[Any], part: Any) -> bool:
    """Whether one of the sorted words is longer than `part` and begins with it."""
    at = bisect.bisect_right(words, part)
    return at < len(words) and words[at][: len(part)] == part


def stop_word_texts(words_ids: Sequence[Sequence[int]], decoder: DeltaDecoder) -> list[str]:
    """The text of each stop word given as ids. A word with ids that write no text (such as a skipped
    end-of-turn token) becomes "", which the matcher ignores: it can be matched by its ids only."""
    return [decoder.decode(ids) if decoder.writes_all(ids) else "" for ids in words_ids]
