# SPDX-License-Identifier: Apache-2.0
"""OpenAI's Harmony format: messages with channels; the analysis channel is reasoning."""

import re

from flashinfer_backend.openai.formats.events import ARGUMENTS, CALL, CONTENT, REASONING, Event, held
from flashinfer_backend.openai.formats.json_scan import ValueScanner

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>", START)
_ENDS = re.compile("|".join(map(re.escape, ENDS)))
_NEXT = re.compile(rf"{re.escape(CHANNEL)}|{_ENDS.pattern}")  # reasoning may lack its end
_RECIPIENT = re.compile(r"\bto=(\S+?)(?=\s|<\||$)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")


def opened(prompt: str) -> str:
    """A prompt with the header of its answer, for one that a guide makes: the answer is content then."""
    begun = f"{START}assistant"
    return f"{prompt}{CHANNEL}final{MESSAGE}" if prompt.endswith(begun) else prompt


class HarmonyReader:
    """<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>..., with special
    tokens as text. A message to a function is a call. A line break separates two messages of one kind."""

    def __init__(self, calls: bool, whole_arguments: bool) -> None:
        """calls: there can be some; else what is for a function is content. whole_arguments: arguments are
        whole JSON, so that marks in their strings end no message."""
        self._calls, self._whole = calls, whole_arguments
        self._value: ValueScanner | None = None
        self._state = "begin"
        self._text = ""
        self._kind = CONTENT
        self._said: set[str] = set()  # kinds of text so far
        self._break = ""  # to write before the next text

    def feed(self, text: str) -> list[Event]:
        self._text += text
        events: list[Event] = []
        while True:
            before = (self._state, self._text)
            getattr(self, f"_in_{self._state}")(events)
            if before == (self._state, self._text):
                return events

    def finish(self) -> list[Event]:
        if self._state in ("begin", "body") and self._text:
            return [Event(self._kind, self._break + self._text)]
        return []

    def _in_begin(self, events: list[Event]) -> None:
        """An answer begins with a header, unless it goes on with a message that the prompt began."""
        begin = self._text.lstrip()
        marks = (CHANNEL, START, "to=", "assistant")
        if begin.startswith(marks):
            self._state = "header"
        elif begin and not any(mark.startswith(begin) for mark in marks):
            self._state = "body"

    def _in_header(self, events: list[Event]) -> None:
        header, message, rest = self._text.partition(MESSAGE)
        if not message:
            return
        self._text, self._state = rest, "body"
        channel = found[1] if (found := _CHANNEL.search(header)) else ""
        recipient = found[1] if (found := _RECIPIENT.search(header)) else ""
        if recipient and self._calls:
            self._kind = ARGUMENTS
            self._value = ValueScanner() if self._whole else None
            events.append(Event(CALL, recipient.removeprefix("functions.")))
        else:
            self._kind = REASONING if channel == "analysis" else CONTENT
        self._break = "\n" if self._kind in self._said else ""

    def _in_body(self, events: list[Event]) -> None:
        if self._value is not None:
            at = self._value.feed(self._text, 0)
            if self._text[:at]:
                events.append(Event(self._kind, self._text[:at]))
            self._text = self._text[at:]
            if not self._value.complete:
                return
            self._value = None
        is_reasoning = self._kind == REASONING
        found = (_NEXT if is_reasoning else _ENDS).search(self._text)
        if found is None:
            cut = len(self._text) - held(self._text, *ENDS, *((CHANNEL,) if is_reasoning else ()))
            body, self._text = self._text[:cut], self._text[cut:]
        else:
            end = found.start() if found[0] == CHANNEL else found.end()
            body, self._text, self._state = self._text[: found.start()], self._text[end:], "header"
        if body:
            events.append(Event(self._kind, self._break + body))
            self._break = ""
            if self._kind != ARGUMENTS:
                self._said.add(self._kind)
