# SPDX-License-Identifier: Apache-2.0
"""Stop words found in the text of one sequence, however its tokens cut it, or in its ids."""

import bisect
from collections.abc import Sequence
from functools import cached_property
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


class StopWords:
    """The words that sequences are searched for; immutable, and shared by sequences with the same words."""

    def __init__(self, words: Sequence[str], hold_back: bool, id_words: Sequence[Sequence[int]]) -> None:
        """words: stop words, empty ones are ignored. hold_back: whether their beginnings are held back.
        id_words: stop words that are exactly these ids, such as those with ids that write no text."""
        self.hold_back = hold_back
        self.texts = _Words(words, 0)
        self.ids = _Words([_as_text(ids) for ids in id_words], len(words))


class _Words:
    """Words of characters, which can stand for ids. index: of the first one."""

    def __init__(self, words: Sequence[str], index: int) -> None:
        self.longest = max(map(len, words), default=0)
        self._sorted = sorted(filter(None, words))
        self._inside = frozenset("".join(word[:-1] for word in words))
        self._last = frozenset(word[-1] for word in self._sorted)
        self._words, self._index = words, index

    @cached_property
    def _reversed(self) -> tuple[list[str], list[int], list[int], dict[str, int]]:
        """The words written backwards, sorted; for each the place of the longest other one that it begins
        with (-1: there is none) and of the shortest (its own: there is none); and the first number of each.
        They are made with the first text: thousands of sequences can wait for a slot, each with words of
        256 KiB."""
        numbers: dict[str, int] = {}
        for number, word in enumerate(self._words, self._index):
            numbers.setdefault(word[::-1], number)
        numbers.pop("", None)
        words, longer, shortest = sorted(numbers), list[int](), list[int]()
        for at, word in enumerate(words):
            other = at - 1
            while other >= 0 and not word.startswith(words[other]):
                other = longer[other]
            longer.append(other)
            shortest.append(at if other < 0 else shortest[other])
        return words, longer, shortest, numbers

    def find(self, text: str, new: int, free: int) -> tuple[int, int, int] | None:
        """(end, size, index) of the word that ends first within the last `new` characters, but not within the
        first `free` of these, from where `end` counts; of several the longest. A character costs a search
        among the sorted words, whatever the text has in common with them."""
        ends = [end for end in range(free + 1, new + 1) if text[end - new - 1] in self._last]
        if not ends:
            return None
        words, longer, shortest, numbers = self._reversed
        recent = text[: -(new + self.longest) : -1]
        for end in ends:
            before = recent[new - end : new - end + self.longest]
            # Whatever `before` begins with stands in front of it, and begins with its shortest one.
            at = bisect.bisect_right(words, before) - 1
            if at < 0 or not before.startswith(words[shortest[at]]):
                continue
            while not before.startswith(words[at]):
                at = longer[at]
            return end, len(words[at]), numbers[words[at]]
        return None

    def beginning(self, text: str, most: int) -> int:
        """Length of the longest end of a text, of at most `most` characters, that begins a word."""
        if text[-1:] not in self._inside:
            return 0
        ends = range(min(most, self.longest - 1, len(text)), 0, -1)
        return next((n for n in ends if self._begins(text[-n:])), 0)

    def _begins(self, part: str) -> bool:
        """Whether a word is longer than `part` and begins with it."""
        at = bisect.bisect_right(self._sorted, part)
        return at < len(self._sorted) and self._sorted[at].startswith(part)


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
        self._words, self._decoder, self._free = words, decoder, free
        self._context = list(context_ids[-CONTEXT_IDS:])
        # The ends of the text and of the ids, a character each, long enough for the beginning of any word.
        self._tail = self._ids = ""
        self._begun = self._begun_ids = 0  # characters at their ends that are the beginning of a word
        self._starts: list[int] = []  # the text's length before each of these ids
        self._length = 0  # characters of the whole text
        self._held_ends: list[int] = []  # per held id, the text's length after it
        self._sent = 0  # characters of the ids that are not held

    @property
    def held(self) -> int:
        """How many of the last ids must not be sent yet."""
        return len(self._held_ends)

    def feed(self, new_ids: Sequence[int]) -> StopMatch | None:
        """Take the next ids; the first match, or None. Not to be called after a match."""
        begun, ends, pieces = self._length, list[int](), list[str]()
        for token in new_ids:
            pieces.append(self._decoder.delta(self._context, [token], last=False))
            self._context = [*self._context[1 - CONTEXT_IDS :], token]
            self._starts.append(self._length)
            self._length += len(pieces[-1])
            ends.append(self._length)
        text = "".join(pieces)
        self._tail += text
        self._ids += _as_text(new_ids)
        free = min(self._free, len(new_ids))
        self._free -= free
        found: list[tuple[int, int, int, int]] = []  # ids fed last, the word's begin and end, its index
        if match := self._words.ids.find(self._ids, len(new_ids), free):
            end, size, index = match
            begin = self._starts[len(self._starts) - len(new_ids) + end - size]
            found.append((end, begin, ends[end - 1], index))
        if match := self._words.texts.find(self._tail, len(text), ends[free - 1] - begun if free else 0):
            end, size, index = match[0] + begun, match[1], match[2]
            ids = next(n for n, reached in enumerate(ends, start=1) if reached >= end)
            found.append((ids, end - size, end, index))
        if found:
            ids, begin, end, index = min(found, key=lambda each: each[:2])
            return StopMatch(index, begin - self._sent, end - self._sent, begin, end, ids)
        self._tail = self._tail[max(0, len(self._tail) - self._words.texts.longest) :]
        useless = max(0, len(self._ids) - self._words.ids.longest)
        self._ids, self._starts = self._ids[useless:], self._starts[useless:]
        self._update_held(ends, len(text))
        return None

    def _update_held(self, ends: list[int], new_chars: int) -> None:
        pending = [*self._held_ends, *ends]
        released = len(pending)
        if self._words.hold_back:
            # A beginning grows by what was fed. Characters before it can be part of no stop word any more.
            self._begun = self._words.texts.beginning(self._tail, self._begun + new_chars)
            self._begun_ids = self._words.ids.beginning(self._ids, self._begun_ids + len(ends))
            safe = self._length - self._begun
            released = next((n for n, end in enumerate(pending) if end > safe), released)
            released = min(released, len(pending) - self._begun_ids)
        if released:
            self._sent = pending[released - 1]
        self._held_ends = pending[released:]


def _as_text(ids: Sequence[int]) -> str:
    """A character for each id."""
    return "".join(map(chr, ids))


def stop_word_texts(words_ids: Sequence[Sequence[int]], decoder: DeltaDecoder) -> list[str]:
    """The text of each stop word given as ids. A word with ids that write no text (such as a skipped
    end-of-turn token) becomes "", which the matcher ignores: it can be matched by its ids only."""
    return [decoder.decode(ids) if decoder.writes_all(ids) else "" for ids in words_ids]
