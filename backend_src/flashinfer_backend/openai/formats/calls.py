# SPDX-License-Identifier: Apache-2.0
"""Tool calls written as JSON: Hermes and Qwen, Llama 3, Mistral, and those that a grammar forced."""

from __future__ import annotations

from collections.abc import Collection

from flashinfer_backend.openai.formats.events import (
    ARGUMENTS,
    CALL,
    CONTENT,
    Event,
    PlainReader,
    Reader,
    split_held,
)
from flashinfer_backend.openai.formats.json_scan import CallListScanner, CallScanner, ValueScanner


class MarkedReader:
    """Content up to a mark, then a call, then content again. Blanks around a call are dropped, unless they
    separate two pieces of content: then the second one begins with them.

    A subclass reads the text after the mark (`_read_call`). `slip`: text with which some models begin a call
    instead of the mark; it is part of the call.
    """

    mark: str
    slip = ""

    def __init__(self) -> None:
        self._text = ""  # held back, or not read yet
        self._in_call = False
        self._after_call = False  # only blanks have come since
        self._said = False  # there was content
        self._mark = self.mark  # of the latest call
        self._blanks = ""  # since the latest content, the calls in between left out

    def feed(self, text: str) -> list[Event]:
        self._text += text
        events: list[Event] = []
        while True:
            if self._in_call:
                if not self._read_call(events):
                    return events
                continue
            if self._after_call:
                begin = self._text.lstrip()
                if self._said:
                    self._blanks += self._text[: len(self._text) - len(begin)]
                self._text, self._after_call = begin, not begin
            marks = [mark for mark in (self.mark, self.slip) if mark and mark in self._text]
            if not marks:
                safe, self._text = split_held(self._text, self.mark, *filter(None, [self.slip]))
                self._say(events, safe)
                return events
            self._mark = min(marks, key=self._text.index)
            content, _, rest = self._text.partition(self._mark)
            rest = self._mark + rest if self._mark == self.slip else rest
            said = content.rstrip()
            self._say(events, said)
            self._blanks += content[len(said) :]
            self._text, self._in_call = rest, True
            self._begin_call()

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._in_call:
            self._end_in_call(events)
        elif not self._after_call:
            self._say(events, self._text)
        return events

    def begins(self, text: str) -> bool | None:
        """Whether a guided answer that begins with this text begins with a call; None if it is still open."""
        return _begins(text, self.mark)

    def _begin_call(self) -> None:
        """The mark was read."""
        raise NotImplementedError

    def _read_call(self, events: list[Event]) -> bool:
        """Reads on in self._text; whether anything else may follow in it (not in_call, or another state)."""
        raise NotImplementedError

    def _end_in_call(self, events: list[Event]) -> None:
        """The text ended within a call."""
        raise NotImplementedError

    def _leave_call(self) -> None:
        self._in_call, self._after_call = False, True
        if not self._said:
            self._blanks = ""

    def _not_a_call(self, events: list[Event], raw: str) -> None:
        """The text after the mark is no call: it is content, with the mark and the blanks before it."""
        self._say(events, raw if self._mark == self.slip else self._mark + raw)
        self._in_call = False

    def _say(self, events: list[Event], text: str) -> None:
        if text:
            events.append(Event(CONTENT, self._blanks + text))
            self._said, self._blanks = True, ""


class HermesReader(MarkedReader):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Hermes, Qwen 2.5 and Qwen 3 write it."""

    mark, close = "<tool_call>", "</tool_call>"

    def _begin_call(self) -> None:
        self._scanner = CallScanner()

    def _read_call(self, events: list[Event]) -> bool:
        scanner = self._scanner
        at = scanner.feed(self._text, 0, events)  # none, once the object has ended
        self._text = self._text[at:]
        if scanner.failed and not scanner.begun:
            self._not_a_call(events, scanner.raw)
            return True
        if not scanner.done and not scanner.failed:
            return False
        if scanner.done:
            rest = self._text.lstrip()
            if rest != self.close and self.close.startswith(rest):
                return False
            if rest.startswith(self.close):  # some models leave it out
                self._text = rest.removeprefix(self.close)
        else:  # the rest of a call that broke off is dropped
            _, close, rest = self._text.partition(self.close)
            if not close:
                return False
            self._text = rest
        self._leave_call()
        return True

    def _end_in_call(self, events: list[Event]) -> None:
        if not self._scanner.begun:
            self._not_a_call(events, self._scanner.raw)


class MistralReader(MarkedReader):
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name[ARGS]{...} for each call,
    with [CALL_ID]id before [ARGS] in some versions."""

    mark = "[TOOL_CALLS]"
    parts = ("[CALL_ID]", "[ARGS]", "{")

    def _begin_call(self) -> None:
        self._list: CallListScanner | None = None
        self._value: ValueScanner | None = None

    def _read_call(self, events: list[Event]) -> bool:
        if self._list is None and self._value is None:
            begin = self._text.lstrip()
            if not begin:
                return False
            if begin[0] == "[" and not any(part.startswith(begin[: len(part)]) for part in self.parts[:2]):
                self._list = CallListScanner()
            elif not self._read_name(events):
                return not self._in_call
        if (scanner := self._list) is not None:
            at = scanner.feed(self._text, 0, events)
            self._text = self._text[at:]
            if scanner.failed and not scanner.begun:
                self._not_a_call(events, scanner.raw)
            elif scanner.done or scanner.failed:
                self._leave_call()
            return scanner.done or scanner.failed
        assert self._value is not None
        at = self._value.feed(self._text, 0)
        events.append(Event(ARGUMENTS, self._text[:at]))
        self._text = self._text[at:]
        if self._value.complete:
            self._leave_call()
        return self._value.complete

    def _read_name(self, events: list[Event]) -> bool:
        """Takes `name[CALL_ID]id[ARGS]`, once the `{` of the arguments is there."""
        head, brace, _ = self._text.partition("{")
        if not brace:
            return False
        name, _, call_id = head.partition("[ARGS]")[0].partition("[CALL_ID]")
        if not name.strip():
            self._text = self._text[len(head) :]
            self._not_a_call(events, head)
            return False
        events.append(Event(CALL, name.strip(), call_id.strip()))
        self._text, self._value = self._text[len(head) :], ValueScanner()
        return True

    def _end_in_call(self, events: list[Event]) -> None:
        if self._list is not None:
            if not self._list.begun:
                self._not_a_call(events, self._list.raw)
        elif self._value is None:
            self._not_a_call(events, self._text)


class CallsOrContentReader:
    """Calls from the first word on, or only content: the answer's guide ensures that."""

    def __init__(self, calls: MarkedReader | Llama3Reader) -> None:
        self._calls = calls
        self._reader: Reader | None = None
        self._text = ""

    def feed(self, text: str) -> list[Event]:
        if self._reader is None:
            self._text += text
            is_call = self._calls.begins(self._text)
            if is_call is None:
                return []
            self._reader = self._calls if is_call else PlainReader()
            text = self._text
        return self._reader.feed(text)

    def finish(self) -> list[Event]:
        if self._reader is None:
            self._reader = PlainReader()
            return self._reader.feed(self._text)
        return self._reader.finish()


class Llama3Reader:
    """{"name": ..., "parameters": {...}} as the whole answer, several of them separated by ;, perhaps after
    <|python_tag|>. Anything else is content, including objects that name no given function."""

    mark = "<|python_tag|>"

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._state = "begin"
        self._text = self._prefix = ""
        self._scanner = CallScanner(names)

    def begins(self, text: str) -> bool | None:
        """Whether a guided answer that begins with this text begins with a call; None if it is still open.
        Other JSON can also have a name: a guide's calls have it first, followed by their parameters."""
        heads = [("{", '"name"', ":", f'"{name}"', ",", '"parameters"', ":", "{") for name in self._names]
        found = [_begins(text, self.mark), *(_begins(text, *head) for head in heads)]
        return True if True in found else None if None in found else False

    def feed(self, text: str) -> list[Event]:
        if self._state == "content":
            return [Event(CONTENT, text)] if text else []
        self._text += text
        events: list[Event] = []
        while self._state != "content":
            if self._state == "call":
                if not self._read_call(events):
                    return events
                continue
            may_be_mark = self._state == "begin"
            begin = self._text.lstrip(" \t\r\n" if may_be_mark else " \t\r\n;")
            if begin.startswith("{"):
                self._begin_call(begin)
            elif may_be_mark and begin.startswith(self.mark):
                self._prefix += self._text[: -len(begin)] + self.mark
                self._text, self._state = begin[len(self.mark) :], "marked"
            elif not begin or (may_be_mark and self.mark.startswith(begin)):
                return events
            else:
                self._to_content(events, begin if self._state == "between" else self._prefix + self._text)
        return events

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._state in ("begin", "marked"):
            _append(events, self._prefix + self._text)
        elif self._state == "call" and not self._scanner.begun:
            _append(events, self._prefix + self._scanner.raw)
        return events

    def _begin_call(self, begin: str) -> None:
        self._prefix += self._text[: len(self._text) - len(begin)]
        self._text, self._state, self._scanner = begin, "call", CallScanner(self._names)

    def _read_call(self, events: list[Event]) -> bool:
        at = self._scanner.feed(self._text, 0, events)
        self._text = self._text[at:]
        if self._scanner.failed and not self._scanner.begun:
            self._to_content(events, self._prefix + self._scanner.raw + self._text)
        elif self._scanner.done or self._scanner.failed:
            self._state, self._prefix = "between", ""
        return self._state != "call"

    def _to_content(self, events: list[Event], text: str) -> None:
        self._state, self._text = "content", ""
        _append(events, text)


class NamedReader:
    """The arguments of one function, all of the text: a grammar saw to that."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def feed(self, text: str) -> list[Event]:
        if not text:
            return []
        return [*self.finish(), Event(ARGUMENTS, text)]

    def finish(self) -> list[Event]:
        name, self._name = self._name, None
        return [] if name is None else [Event(CALL, name)]


class ListReader:
    """A JSON array of calls, all of the text: a grammar saw to that."""

    def __init__(self) -> None:
        self._scanner = CallListScanner()

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        self._scanner.feed(text, 0, events)
        return events

    def finish(self) -> list[Event]:
        return []


def _begins(text: str, *parts: str) -> bool | None:
    """Whether these parts come first, with any blanks before each; None where the text ends before that."""
    for part in parts:
        text = text.lstrip()
        if not text.startswith(part):
            return None if part.startswith(text) else False
        text = text[len(part) :]
    return True


def _append(events: list[Event], text: str) -> None:
    if text:
        events.append(Event(CONTENT, text))
