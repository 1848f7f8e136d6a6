# SPDX-License-Identifier: Apache-2.0
"""What readers of a model's text give out."""

from collections.abc import Iterable
from itertools import chain, groupby
from operator import attrgetter
from typing import NamedTuple, Protocol

from msgspec import Raw

REASONING, CONTENT, CALL, ARGUMENTS = "reasoning", "content", "call", "arguments"


class Event(NamedTuple):
    """A piece of the answer. REASONING, CONTENT: text. CALL: text is a function's name, and call_id the
    model's id of the call, if it writes one. ARGUMENTS: text is a piece of the JSON of the latest call.
    log_probs: of CONTENT, where they are wanted, those of its tokens."""

    kind: str
    text: str
    call_id: str = ""
    log_probs: tuple[Raw, ...] = ()


class Reader(Protocol):
    def feed(self, text: str) -> list[Event]:
        """What a further piece says."""

    def finish(self) -> list[Event]:
        """What was held back at the end of the text."""


class PlainReader:
    def feed(self, text: str) -> list[Event]:
        return [Event(CONTENT, text)] if text else []

    def finish(self) -> list[Event]:
        return []


class BlanksTogether:
    """Hands a reader blanks together with what follows them. Readers hold blanks back, and look with each
    piece at all that they hold: thousands of line breaks one by one would take the square of their number."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._blanks: list[str] = []

    def feed(self, text: str) -> list[Event]:
        self._blanks.append(text)
        if not text or text.isspace():
            return []
        return self._feed_all()

    def finish(self) -> list[Event]:
        return [*self._feed_all(), *self._reader.finish()]

    def _feed_all(self) -> list[Event]:
        text = "".join(self._blanks)
        self._blanks.clear()
        return self._reader.feed(text)


def merged(events: Iterable[Event]) -> list[Event]:
    """Neighbours of one kind joined; calls stay apart."""
    said = (event for event in events if event.text or event.kind == CALL)
    result: list[Event] = []
    for kind, group in groupby(said, key=attrgetter("kind")):
        same = list(group)
        if kind == CALL or len(same) == 1:
            result += same
        else:
            log_probs = tuple(chain.from_iterable(event.log_probs for event in same))
            result.append(Event(kind, "".join(event.text for event in same), log_probs=log_probs))
    return result


def held(text: str, *markers: str) -> int:
    """Length of the longest end of `text` that is the beginning of a marker, but not all of it."""
    longest = 0
    for marker in markers:
        for n in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:n]):
                longest = n
                break
    return longest


def split_held(text: str, *markers: str) -> tuple[str, str]:
    """(text to give out, text to hold back): the end that may begin a marker, and blanks before it."""
    cut = len(text) - held(text, *markers)
    safe = text[:cut].rstrip()
    return safe, text[len(safe) :]
