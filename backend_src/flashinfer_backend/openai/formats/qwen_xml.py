# SPDX-License-Identifier: Apache-2.0
"""Tool calls as Qwen3-Coder writes them: a tag for the function and one for each parameter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flashinfer_backend.openai.formats.calls import MarkedReader
from flashinfer_backend.openai.formats.events import ARGUMENTS, CALL, CONTENT, Event, held

FUNCTION, PARAMETER = "<function=", "<parameter="
END_PARAMETER, END_FUNCTION, END_CALL = "</parameter>", "</function>", "</tool_call>"


class QwenXmlReader(MarkedReader):
    """<tool_call><function=name><parameter=key>value</parameter></function></tool_call>.

    A value is text between two line breaks. It becomes a JSON string where the function's schema says so,
    else whatever JSON it is.
    """

    mark = "<tool_call>"

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """schemas: the JSON schema of each function's parameters."""
        super().__init__()
        self._schemas = schemas

    def _begin_call(self) -> None:
        self._state = "function"
        self._parameters = 0
        self._is_string = False
        self._value = ""
        self._name = ""

    def _read_call(self, events: list[Event]) -> bool:
        while self._in_call:
            before = (self._state, self._text)
            getattr(self, f"_in_{self._state}")(events)
            if self._in_call and before == (self._state, self._text):
                return False
        return True

    def _in_function(self, events: list[Event]) -> None:
        name = self._tag(FUNCTION)
        if name is None:
            begin = self._text.lstrip()
            if begin and not (FUNCTION.startswith(begin) or begin.startswith(FUNCTION)):
                raw, self._text = self._text, ""
                self._not_a_call(events, "")
                self._text = raw
            return
        self._name, self._state = name, "between"
        events.append(Event(CALL, name))

    def _in_between(self, events: list[Event]) -> None:
        """Before a parameter or the end of the function."""
        begin = self._text.lstrip()
        key = self._tag(PARAMETER)
        if key is not None:
            schema = self._schemas.get(self._name, {}).get("properties", {}).get(key)
            self._is_string = _is_string(schema)
            comma = ", " if self._parameters else "{"
            self._parameters += 1
            events.append(Event(ARGUMENTS, f"{comma}{json.dumps(key, ensure_ascii=False)}: "))
            if self._is_string:
                events.append(Event(ARGUMENTS, '"'))
            self._state, self._value = "begin", ""
        elif begin.startswith((END_FUNCTION, END_CALL)):
            self._close_arguments(events)
            self._state = "end"
        elif begin and not _may_begin(begin, PARAMETER, END_FUNCTION, END_CALL):
            self._text = begin[1:]  # what stands between two parameters says nothing

    def _in_begin(self, events: list[Event]) -> None:
        if self._text:
            self._text = self._text.removeprefix("\n")
            self._state = "value"

    def _in_value(self, events: list[Event]) -> None:
        value, close, rest = self._text.partition(END_PARAMETER)
        if close:
            self._text, self._state = rest, "between"
            value = value.removesuffix("\n")
        else:
            # The line break before the end is no part of the value.
            cut = len(value) - held(value, END_PARAMETER)
            if value[:cut].endswith("\n"):
                cut -= 1
            value, self._text = value[:cut], value[cut:]
        if self._is_string:
            if value:
                events.append(Event(ARGUMENTS, _inside_string(value)))
            if close:
                events.append(Event(ARGUMENTS, '"'))
            return
        self._value += value
        if close:
            events.append(Event(ARGUMENTS, _json_or_string(self._value)))

    def _in_end(self, events: list[Event]) -> None:
        begin = self._text.lstrip()
        if begin.startswith(END_FUNCTION):
            self._text = begin[len(END_FUNCTION) :]
        elif begin.startswith(END_CALL):
            self._text = begin[len(END_CALL) :]
            self._leave_call()
        elif begin and not _may_begin(begin, END_FUNCTION, END_CALL):
            self._leave_call()

    def _end_in_call(self, events: list[Event]) -> None:
        if self._state == "function":
            events.append(Event(CONTENT, self.mark + self._text))
        elif self._state == "between":
            self._close_arguments(events)
        elif self._state in ("begin", "value") and self._is_string:
            if self._text:
                events.append(Event(ARGUMENTS, _inside_string(self._text)))
        elif self._state in ("begin", "value"):
            events.append(Event(ARGUMENTS, self._value + self._text))

    def _close_arguments(self, events: list[Event]) -> None:
        events.append(Event(ARGUMENTS, "}" if self._parameters else "{}"))

    def _tag(self, begin: str) -> str | None:
        """What a tag that the text begins with names, taken off the text; None while it is not there."""
        text = self._text.lstrip()
        name, close, rest = text.removeprefix(begin).partition(">")
        if not text.startswith(begin) or not close:
            return None
        self._text = rest
        return name.strip()


def _may_begin(text: str, *tags: str) -> bool:
    return any(tag.startswith(text) or text.startswith(tag) for tag in tags)


def _is_string(schema: Any) -> bool:
    """Whether a value is text for sure; without a schema it is what it looks like."""
    return isinstance(schema, Mapping) and schema.get("type") == "string"


def _inside_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_or_string(value: str) -> str:
    try:
        json.loads(value)
    except ValueError:
        python = {"True": "true", "False": "false", "None": "null"}.get(value.strip())
        return python or json.dumps(value, ensure_ascii=False)
    return value
