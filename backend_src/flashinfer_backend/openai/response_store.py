# SPDX-License-Identifier: Apache-2.0
"""Responses that a process keeps in memory, for requests that go on from them or refer to their items."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Protocol
from weakref import WeakValueDictionary

import msgspec

from flashinfer_backend.core.bounds import MOST_STORED
from flashinfer_backend.openai.errors import ApiError


class _Output(msgspec.Struct):
    """What is read of a response for references to its items."""

    output: list[dict[str, Any]] = []


class Unfinished(Protocol):
    """A response that is being made. store: where it will be kept, if it will."""

    store: ResponseStore | None


class ResponseStore:
    """At most MOST_STORED responses, and `most` bytes of their JSON; the one unused for the longest time goes
    first. A response that takes more than all of it is not kept. For any thread."""

    def __init__(self, most: int) -> None:
        self._most, self._held = most, 0
        self._kept: OrderedDict[str, tuple[bytes, bytes]] = OrderedDict()
        self._makers: dict[str, str] = {}  # the response of each item of a kept one's output
        self._unfinished = WeakValueDictionary[str, Unfinished]()
        self._lock = threading.Lock()

    def begin(self, name: str, response: Unfinished) -> None:
        """Remember that this response is being made: until put() or delete(), or until it is dropped."""
        with self._lock:
            self._unfinished[name] = response

    def put(self, name: str, items: bytes, response: dict[str, Any]) -> None:
        """items: the conversation so far, as a JSON list; the response's output comes last."""
        kept = items, msgspec.json.encode(response)
        size = sum(map(len, kept))
        with self._lock:
            self._unfinished.pop(name, None)
            if size > self._most:
                return
            while self._kept and (self._held + size > self._most or len(self._kept) >= MOST_STORED):
                self._drop(next(iter(self._kept)))
            self._kept[name] = kept
            self._held += size
            self._makers |= dict.fromkeys((item["id"] for item in response.get("output", ())), name)

    def _drop(self, name: str) -> None:
        kept = self._kept.pop(name)
        self._held -= sum(map(len, kept))
        for item in msgspec.json.decode(kept[1], type=_Output).output:
            del self._makers[item["id"]]

    def _get(self, name: str, param: str | None, drop: bool = False) -> tuple[bytes, bytes]:
        with self._lock:
            if name not in self._kept:
                raise ApiError(
                    f"Response with id '{name[:100]}' has not ended: ask for it once its stream has"
                    if name in self._unfinished
                    else f"Response with id '{name[:100]}' not found: it was not stored, was deleted, or gave"
                    " way to newer ones (--store-mib). Send the whole conversation as input",
                    404 if param is None else 400,
                    param,
                    "previous_response_not_found" if param else None,
                )
            self._kept.move_to_end(name)
            kept = self._kept[name]
            if drop:
                self._drop(name)
        return kept

    def outputs(self, ids: Iterable[str]) -> dict[str, dict[str, Any]]:
        """The kept items of these ids, and all others of their responses, by id."""
        with self._lock:
            names = dict.fromkeys(self._makers[each] for each in ids if each in self._makers)
            for name in names:
                self._kept.move_to_end(name)
            kept = [self._kept[name][1] for name in names]
        return {item["id"]: item for each in kept for item in msgspec.json.decode(each, type=_Output).output}

    def items(self, name: str, param: str) -> bytes:
        """The conversation of a response, its output last, as a JSON list. Raises ApiError that names
        `param`."""
        return self._get(name, param)[0]

    def input(self, name: str) -> list[dict[str, Any]]:
        """The conversation that a response was made of. Raises ApiError."""
        kept, response = self._get(name, None)
        items: list[dict[str, Any]] = msgspec.json.decode(kept)
        return items[: len(items) - len(msgspec.json.decode(response, type=_Output).output)]

    def response(self, name: str) -> bytes:
        return self._get(name, None)[1]

    def delete(self, name: str) -> None:
        """Also one that is being made: it will not be kept. Raises ApiError."""
        with self._lock:
            unfinished = self._unfinished.pop(name, None)
        if unfinished is None:
            self._get(name, None, drop=True)
        else:
            unfinished.store = None
