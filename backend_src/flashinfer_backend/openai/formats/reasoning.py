# SPDX-License-Identifier: Apache-2.0
"""Reasoning between <think> and </think>, at the beginning of an answer."""

import secrets
from collections.abc import Callable

from flashinfer_backend.openai.formats.events import CALL, CONTENT, REASONING, Event, Reader, split_held

OPEN, CLOSE = "<think>", "</think>"


class ThinkReader:
    """Splits the reasoning off and hands the rest to another reader. Blanks around the two are dropped.

    A call in reasoning that is never closed is a call. So text from a call's mark on is held back until the
    reasoning is closed, or the text ends.
    """

    def __init__(self, rest: Reader, inside: bool, marks: tuple[str, ...]) -> None:
        """inside: the prompt has opened the reasoning, so the text begins with it. marks: those of calls."""
        self._rest, self._marks = rest, marks
        self._state = "opened" if inside else "before"
        self._text = ""  # held back
        self._called = False  # it begins with a call's mark, or with blanks in front of one
        self._seen = 0  # characters of it in which the reasoning's end does not begin

    def feed(self, text: str) -> list[Event]:
        if self._state == "rest":
            return self._rest.feed(text)
        self._text += text
        events: list[Event] = []
        if self._state == "before":
            begin = self._text.lstrip()
            if begin.startswith(OPEN):
                self._state, self._text = "opened", begin[len(OPEN) :]
            elif not OPEN.startswith(begin):
                return self._hand_over(self._text)
        if self._state == "opened":
            self._text = self._text.lstrip()
            if self._text:
                self._state = "inside"
        if self._state == "inside":
            end = self._text.find(CLOSE, self._seen)
            if end >= 0:
                events.append(Event(REASONING, self._text[:end].rstrip()))
                self._state, self._text = "closed", self._text[end + len(CLOSE) :]
            else:
                if not self._called:
                    events.append(Event(REASONING, self._take_safe()))
                self._seen = max(0, len(self._text) - len(CLOSE) + 1)
        if self._state == "closed":
            self._text = self._text.lstrip()
            if self._text:
                events += self._hand_over(self._text)
        return [event for event in events if event.text or event.kind not in (REASONING, CONTENT)]

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._state == "before" and self._text:
            events += self._rest.feed(self._text)
        elif self._state == "inside" and self._text:
            at = self._call()
            found = [*self._rest.feed(self._text[at:]), *self._rest.finish()]
            if any(event.kind == CALL for event in found):
                return [event for event in found if event.kind != CONTENT or event.text.strip()]
            return [Event(REASONING, self._text)]
        return events + self._rest.finish()

    def _take_safe(self) -> str:
        """Takes the text off up to a call's mark, or to what may begin one."""
        at = self._call()
        self._called = at < len(self._text)
        marks = () if self._called else (CLOSE, *self._marks)
        safe, held = split_held(self._text[:at], *marks)
        self._text = held + self._text[at:]
        return safe

    def _call(self) -> int:
        """Index of a call's mark in the text held back, or its length."""
        found = [at for mark in self._marks if (at := self._text.find(mark)) >= 0]
        return min(found, default=len(self._text))

    def _hand_over(self, text: str) -> list[Event]:
        self._state, self._text = "rest", ""
        return self._rest.feed(text)


def is_opened(prompt: str, asked: str, with_other: Callable[[str], str]) -> bool:
    """Whether a prompt opens reasoning and leaves it open. asked: the last message that is not the answer's
    beginning; marks in it and before it do not count. with_other: the prompt with another text in its place,
    for a message that is also found elsewhere, as "hi" is in the mark itself."""
    at = prompt.rfind(OPEN)
    if prompt.rstrip().endswith(OPEN):
        return True
    if at <= prompt.rfind(CLOSE) or not asked:
        return False
    before, behind = asked in prompt[:at], prompt.rfind(asked) + len(asked) > at
    if not (before and behind):
        return before
    mark = secrets.token_hex(16)
    other = with_other(mark)
    place = other.rfind(mark)
    return 0 <= place < other.rfind(OPEN) and other.rfind(OPEN) > other.rfind(CLOSE)
