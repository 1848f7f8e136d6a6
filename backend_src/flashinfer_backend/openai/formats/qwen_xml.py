# SPDX-License-Identifier: Apache-2.0
"""Tool calls as Qwen3-Coder writes them: a tag for the function and one for each parameter."""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from flashinfer_backend.openai.formats.calls import MarkedReader
from flashinfer_backend.openai.formats.events import ARGUMENTS, CALL, Event, held
from flashinfer_backend.openai.formats.json_scan import ValueScanner
from flashinfer_backend.openai.formats.text_schemas import Text, text_of

FUNCTION, PARAMETER = "<function=", "<parameter="
END_PARAMETER, END_FUNCTION, END_CALL = "</parameter>", "</function>", "</tool_call>"
LINE_END = f"\n{END_FUNCTION}"
MOST_HELD = 4096  # characters behind a function's end in a value, until it is taken for a part of the value

NULLS = ("null", "None")  # the template shows the model the second one


class QwenXmlReader(MarkedReader):
    """<tool_call><function=name><parameter=key>value</parameter></function></tool_call>.

    A value stands between two line breaks. It becomes a JSON string if the function's schema says so,
    otherwise it is read as JSON. For functions of a guide, `plain_text` decides whether a value is text or
    JSON, as in the guide (openai/strict.py).

    Without a guide, slips are read as well: a call of a known function without <tool_call>, several functions
    in one, and parameters without </parameter>, which end before the tag of another one of the function's
    parameters on a new line, or with the function.
    """

    mark, slip = "<tool_call>", FUNCTION

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]], guided: Collection[str]) -> None:
        """schemas: the JSON schema of each function's parameters. guided: functions that a guide holds to
        theirs."""
        super().__init__()
        self._schemas, self._guided = schemas, guided
        if guided:  # a call without the mark is not held to its schema
            self.slip = ""

    def _begin_call(self) -> None:
        self._state = "function"
        self._parameters = 0
        self._at_end = False  # of all text
        self._is_string = self._may_be_null = False
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
        text, name = self._text, self._tag(FUNCTION)
        if name is None:
            begin = self._text.lstrip()
            if not _may_begin(begin, FUNCTION):
                self._not_a_call(events, "")
            elif self._mark == self.slip and not any(
                _may_begin(begin, f"{FUNCTION}{known}>") for known in self._schemas
            ):
                self._not_a_slip(events, text)
            return
        if self._mark == self.slip and name not in self._schemas:
            self._not_a_slip(events, text)
            return
        self._name, self._state, self._given = name, "between", set[str]()
        events.append(Event(CALL, name))

    def _not_a_slip(self, events: list[Event], text: str) -> None:
        self._text = text[len(FUNCTION) :]
        self._not_a_call(events, FUNCTION)

    def _in_between(self, events: list[Event]) -> None:
        """Before a parameter or the end of the function."""
        begin = self._text.lstrip()
        key = self._tag(PARAMETER)
        if key is not None:
            comma = ", " if self._parameters else "{"
            self._parameters += 1
            events.append(Event(ARGUMENTS, f"{comma}{json.dumps(key, ensure_ascii=False)}: "))
            self._begin_value(key, events)
        elif begin.startswith((END_FUNCTION, END_CALL)):
            self._close_arguments(events)
            self._state = "end"
        elif begin and not _may_begin(begin, PARAMETER, END_FUNCTION, END_CALL):
            self._text = begin[1:]  # text between two parameters is dropped

    def _begin_value(self, key: str, events: list[Event]) -> None:
        parameters = self._schemas.get(self._name, {})
        properties = parameters.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        schema = properties.get(key)
        self._value = ""
        self._given.add(key)
        self._next_tags = [f"\n{PARAMETER}{other}>" for other in properties if other not in self._given]
        if self._name in self._guided:
            text = plain_text(schema, parameters)
            if text is None:
                self._state, self._scanner = "json", ValueScanner()
                return
        else:
            text = text_of(schema, parameters)
        self._state = "begin"
        self._is_string, self._may_be_null = text is not None, text is not None and text.null
        if self._is_string and not self._may_be_null:
            events.append(Event(ARGUMENTS, '"'))

    def _in_json(self, events: list[Event]) -> None:
        """The guide ensures that this is a JSON value, which can contain text like a tag."""
        if not self._value:
            self._text = self._text.lstrip()
        end = self._scanner.feed(self._text, 0)
        self._value = self._value or self._text[:end]
        if end:
            events.append(Event(ARGUMENTS, self._text[:end]))
        self._text = self._text[end:]
        if self._scanner.complete:
            self._state = "close"

    def _in_close(self, events: list[Event]) -> None:
        """Behind such a value."""
        _, close, rest = self._text.partition(END_PARAMETER)
        if close:
            self._text, self._state = rest, "between"

    def _in_begin(self, events: list[Event]) -> None:
        if self._text:
            self._text = self._text.removeprefix("\n")
            self._state = "value"

    def _in_value(self, events: list[Event]) -> None:
        value, close, rest = self._text.partition(END_PARAMETER)
        if self._name not in self._guided and (end := self._missing_end(value, not close)) is not None:
            value, close, rest = value[:end], END_PARAMETER, self._text[end:]
        if close:
            self._state = "between"
            self._give_value(value.removesuffix("\n"), close, rest, events)
            return
        # The line break before the end is no part of the value; a function's end may be: what follows tells.
        cut = len(value) - held(value, END_PARAMETER, LINE_END, *self._next_tags)
        at = value.find(LINE_END)
        if self._name not in self._guided and max(0, len(value) - MOST_HELD) <= at < cut:
            cut = at
        if value[:cut].endswith("\n"):
            cut -= 1
        self._give_value(value[:cut], "", value[cut:], events)

    def _missing_end(self, value: str, is_open: bool) -> int | None:
        """The end of a value whose </parameter> is missing. value: the text before the next one, or, if
        is_open, all of it."""
        tags = [at for tag in self._next_tags if (at := value.find(tag)) >= 0]
        limit = min(tags, default=len(value))
        ends = [found.start() for found in re.finditer(LINE_END, value[:limit])]
        for at in ends:
            if _begins_call(value[at + len(LINE_END) :]):
                return at
        if tags:
            return limit
        return ends[-1] if ends and is_open and self._at_end else None

    def _give_value(self, value: str, close: str, rest: str, events: list[Event]) -> None:
        self._text = rest
        if self._is_string:
            self._add_text(value, bool(close), events)
            return
        self._value += value
        if close:
            events.append(Event(ARGUMENTS, _json_or_string(self._value)))

    def _add_text(self, value: str, is_whole: bool, events: list[Event]) -> None:
        if self._may_be_null:
            self._value += value
            if is_whole and self._value in NULLS:
                events.append(Event(ARGUMENTS, "null"))
                return
            if not is_whole and any(null.startswith(self._value) for null in NULLS):
                return
            self._may_be_null, value, self._value = False, self._value, ""
            events.append(Event(ARGUMENTS, '"'))
        if value:
            events.append(Event(ARGUMENTS, _inside_string(value)))
        if is_whole:
            events.append(Event(ARGUMENTS, '"'))

    def _in_end(self, events: list[Event]) -> None:
        begin = self._text.lstrip()
        if begin.startswith(END_FUNCTION):
            self._text = begin[len(END_FUNCTION) :]
        elif begin.startswith(END_CALL):
            self._text = begin[len(END_CALL) :]
            self._leave_call()
        elif self.slip and begin.startswith(FUNCTION):  # another one in the same tag
            self._text = begin
            self._mark = self.slip
            self._begin_call()
        elif begin and not _may_begin(begin, END_FUNCTION, END_CALL, FUNCTION):
            self._leave_call()

    def _end_in_call(self, events: list[Event]) -> None:
        self._at_end = True
        if self._state == "value" and LINE_END in self._text and self._name not in self._guided:
            self._read_call(events)
            if not self._in_call:
                return
        if self._state == "function":
            self._not_a_call(events, self._text)
        elif self._state == "between":
            # Some models leave the ends out. What is cut off in a parameter's tag lacks that one.
            if not (left := self._text.strip()) or left.startswith("</"):
                self._close_arguments(events)
        elif self._state in ("begin", "value") and self._is_string:
            opening = '"' if self._may_be_null else ""
            if text := opening + _inside_string(self._value + self._text):
                events.append(Event(ARGUMENTS, text))
        elif self._state in ("begin", "value"):
            events.append(Event(ARGUMENTS, self._value + self._text))

    def _close_arguments(self, events: list[Event]) -> None:
        events.append(Event(ARGUMENTS, "}" if self._parameters else "{}"))

    def _tag(self, begin: str) -> str | None:
        """Removes a tag from the beginning of the text and returns its name; None while it is incomplete."""
        text = self._text.lstrip()
        name, close, rest = text.removeprefix(begin).partition(">")
        if not text.startswith(begin) or not close:
            return None
        self._text = rest
        return name.strip()


def _begins_call(text: str) -> bool:
    """Whether the text after a function's end begins the next call."""
    return text.lstrip().removeprefix(END_CALL).lstrip().startswith((QwenXmlReader.mark, FUNCTION))


def _may_begin(text: str, *tags: str) -> bool:
    return any(tag.startswith(text) or text.startswith(tag) for tag in tags)


def plain_text(schema: Any, root: Mapping[str, Any]) -> Text | None:
    """How a guided function's value is written: as text if all listed values, or without a list all texts
    without `</parameter>`, satisfy the schema; otherwise as JSON (None). root: the schema of all of the
    function's parameters."""
    text = text_of(schema, root)
    if text is None or text.bounded or any(END_PARAMETER in value for value in text.values or ()):
        return None
    return text


def _inside_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_or_string(value: str) -> str:
    try:
        json.loads(value, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        python = {"True": "true", "False": "false", "None": "null"}.get(value.strip())
        return python or json.dumps(value, ensure_ascii=False)
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
