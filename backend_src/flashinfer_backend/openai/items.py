# SPDX-License-Identifier: Apache-2.0
"""Answers that are lists of items, OpenAI's Responses and Anthropic's Messages: each run of events of one
kind is an item. A stream tells how the items change."""

from collections.abc import AsyncIterator
from typing import Any

from flashinfer_backend.openai.answer import Usage, encode
from flashinfer_backend.openai.chat import Answer, Turn
from flashinfer_backend.openai.formats.events import CALL, Event
from flashinfer_backend.serving.generation import Chunk

Change = dict[str, Any]  # an event of the stream, with its type


class Items:
    """The items of a turn's one sequence."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._top: int | None = None  # of Answer
        (self._stream,) = turn.streams.all
        self._usage = Usage(turn.streams)
        self._items: list[dict[str, Any]] = []
        self._open = False  # whether the last item still grows
        self._written = ""  # its text, or the JSON of its arguments, so far

    def _kind(self, each: Event) -> str:
        """The type of the item that an event belongs to."""
        raise NotImplementedError

    def _begin(self, kind: str, each: Event) -> list[Change]:
        """Appends an item of this type."""
        raise NotImplementedError

    def _grow(self, each: Event) -> list[Change]:
        """The last item gets more text, which `_written` has already."""
        raise NotImplementedError

    def _end(self, whole: bool) -> list[Change]:
        """The last item has all of its text. whole: nothing cut it off."""
        raise NotImplementedError

    async def _chunks(self) -> AsyncIterator[tuple[list[Change], Answer, Chunk]]:
        """What each chunk changes. With the last one the answer has its `finish`; its item is open still."""
        answer = Answer(self._turn, self._stream, self._top)
        async for _, chunk in self._turn.streams:
            self._usage.note(self._stream, chunk)
            events = answer.take(chunk, await answer.log_probs(chunk))
            changes = [change for each in events for change in self._take(each)]
            if answer.finish is not None:
                self._usage.reasoned(self._stream, await answer.reasoning_tokens())
            yield changes, answer, chunk

    def _take(self, each: Event) -> list[Change]:
        kind, changes = self._kind(each), list[Change]()
        if not self._open or self._items[-1]["type"] != kind or each.kind == CALL:
            if self._items and each.kind != CALL:  # blanks between two pieces of text, which are items here
                each = each._replace(text=each.text.lstrip())
                if not each.text:
                    return []
            changes = self._close() + self._begin(kind, each)
            self._open, self._written = True, ""
        if each.kind != CALL:
            self._written += each.text
            changes += self._grow(each)
        return changes

    def _close(self, whole: bool = True) -> list[Change]:
        if not self._open:
            return []
        self._open = False
        return self._end(whole)


def named_event(content: Change) -> bytes:
    """A server-sent event with its type as its name."""
    return b"event: " + content["type"].encode() + b"\ndata: " + encode(content) + b"\n\n"
