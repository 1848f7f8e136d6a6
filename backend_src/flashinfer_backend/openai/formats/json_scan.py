# SPDX-License-Identifier: Apache-2.0
"""JSON read piece by piece: where a value ends, and calls written as JSON objects."""

import json
import re
from collections.abc import Collection

from flashinfer_backend.core.values import encodable
from flashinfer_backend.openai.formats.events import ARGUMENTS, CALL, Event

_STRUCTURE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[\s,}\]:]")
_BLANKS = " \t\r\n"


class ValueScanner:
    """Finds the end of one JSON value after any blanks. It looks only at brackets and strings and does not
    check the text between them. A number or a word ends at the next character that is not part of it."""

    def __init__(self) -> None:
        self.complete = False
        self._depth = 0
        self._in_string = self._escaped = self._scalar = False

    @property
    def in_brackets(self) -> bool:
        """Whether an object or a list has begun and not ended."""
        return self._depth > 0

    def feed(self, text: str, at: int) -> int:
        """Index after the part of text[at:] that belongs to the value."""
        size = len(text)
        while at < size and not self.complete:
            if self._escaped:
                self._escaped, at = False, at + 1
            elif self._in_string:
                found = _IN_STRING.search(text, at)
                if found is None:
                    return size
                at = found.end()
                if found[0] == "\\":
                    self._escaped = True
                else:
                    self._in_string, self.complete = False, self._depth == 0
            elif self._depth:
                found = _STRUCTURE.search(text, at)
                if found is None:
                    return size
                at = found.end()
                if found[0] == '"':
                    self._in_string = True
                else:
                    self._depth += 1 if found[0] in "{[" else -1
                    self.complete = self._depth == 0
            elif self._scalar:
                found = _SCALAR_END.search(text, at)
                if found is None:
                    return size
                self.complete = True
                return found.start()
            elif text[at] in _BLANKS:
                at += 1
            elif text[at] == '"':
                self._in_string, at = True, at + 1
            elif text[at] in "{[":
                self._depth, at = 1, at + 1
            else:
                self._scalar = True
        return at


class CallScanner:
    """One call as an object with a name and, under `arguments` or `parameters`, its arguments; other members
    are skipped.

    done: the object has ended. failed: it is no call. A call is given out once its name is known, and
    from then on its arguments, as the model wrote them. Until then `raw` has the object's text.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        """names: the functions' names; an object with another name is no call. None: any name."""
        self.done = self.failed = False
        self.raw = ""
        self.begun = False  # the call was given out
        self._names = names
        self._state = "open"
        self._value: ValueScanner | None = None
        self._key = self._collected = ""
        self._arguments: str | None = None
        self._streams = False

    def feed(self, text: str, at: int, events: list[Event]) -> int:
        """Reads text[at:], appends its events and returns the index after the object, or after the text."""
        begin = at
        while at < len(text) and not self.done and not self.failed:
            if self._value is not None:
                at = self._feed_value(text, at, events)
            elif text[at] in _BLANKS:
                at += 1
            else:
                at = self._punctuation(text, at, events)
        if not self.begun:
            self.raw += text[begin:at]
        return at

    def _punctuation(self, text: str, at: int, events: list[Event]) -> int:
        char, state = text[at], self._state
        if state == "open" and char == "{":
            self._state = "key"
        elif state in ("key", "next") and char == "}":
            self._end(events)
        elif state == "key" and char == '"':
            self._begin_value()
            return at
        elif state == "colon" and char == ":":
            self._state = "value"
        elif state == "value" and char not in ",:}]":
            self._begin_value()
            self._streams = self._is_arguments and self.begun and char in "{["
            return at
        elif state == "next" and char == ",":
            self._state = "key"
        else:
            self.failed = True
            return at
        return at + 1

    @property
    def _is_arguments(self) -> bool:
        return self._key in ("arguments", "parameters") and self._arguments is None

    def _begin_value(self) -> None:
        self._value, self._collected, self._streams = ValueScanner(), "", False

    def _feed_value(self, text: str, at: int, events: list[Event]) -> int:
        assert self._value is not None
        end = self._value.feed(text, at)
        if self._streams:
            events.append(Event(ARGUMENTS, text[at:end]))
        else:
            self._collected += text[at:end]
        if self._value.complete:
            self._value = None
            self._take_value(events)
        return end

    def _take_value(self, events: list[Event]) -> None:
        if self._state == "key":
            key = _loads(self._collected)
            self.failed = not isinstance(key, str)
            self._key, self._state = str(key), "colon"
            return
        self._state = "next"
        if self._streams:
            self._arguments = ""
        elif self._is_arguments:
            value = _loads(self._collected)
            # Some models write the JSON into a string, or nothing.
            self._arguments = value if isinstance(value, str) else self._collected
            if self._collected in ("null", '""'):
                self._arguments = "{}"
            if self.begun:
                events.append(Event(ARGUMENTS, self._arguments))
        elif self._key == "name" and not self.begun:
            name = _loads(self._collected)
            if not isinstance(name, str) or not name or (self._names is not None and name not in self._names):
                self.failed = True
                return
            self.begun = True
            events.append(Event(CALL, name))
            if self._arguments is not None:
                events.append(Event(ARGUMENTS, self._arguments))

    def _end(self, events: list[Event]) -> None:
        self.done, self.failed = self.begun, not self.begun
        if self.begun and self._arguments is None:
            events.append(Event(ARGUMENTS, "{}"))


class CallListScanner:
    """Calls in a JSON array, read like CallScanner."""

    def __init__(self) -> None:
        self.done = self.failed = self.begun = False
        self.raw = ""
        self._state = "open"
        self._call: CallScanner | None = None

    def feed(self, text: str, at: int, events: list[Event]) -> int:
        begin = at
        while at < len(text) and not self.done and not self.failed:
            if self._call is not None:
                at = self._call.feed(text, at, events)
                self.begun |= self._call.begun
                if self._call.failed:
                    self.failed = True
                elif self._call.done:
                    self._call, self._state = None, "next"
            elif text[at] in _BLANKS:
                at += 1
            elif self._state in ("open", "item") and text[at] == ("[" if self._state == "open" else "{"):
                if self._state == "item":
                    self._call = CallScanner()
                else:
                    self._state, at = "item", at + 1
            elif self._state == "next" and text[at] in ",]":
                self.done, self._state, at = text[at] == "]", "item", at + 1
            else:
                self.failed = True
        if not self.begun:
            self.raw += text[begin:at]
        return at


def _loads(text: str) -> object:
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    # Half a surrogate pair, which no answer can hold, stays the escape that the model wrote.
    return encodable(value) if isinstance(value, str) else value
