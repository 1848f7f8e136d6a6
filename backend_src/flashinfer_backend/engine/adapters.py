# SPDX-License-Identifier: Apache-2.0
"""Requests with an adapter, until that is on the device."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, takewhile
from pathlib import Path
from typing import NamedTuple

from flashinfer_backend.core.deadlines import Waiting
from flashinfer_backend.core.request import Request
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.models.adapters import Adapter, AdapterError, State, adapter_state

log = logging.getLogger(__name__)

PATIENCE_S = 1.0  # for which requests that wait for a place are overtaken by those whose adapter is there

# An adapter: its folder, and the state of its files. One that is replaced makes it another adapter.
Key = tuple[str, State]


@dataclass(eq=False)
class AdapterPlace:
    """key: names what it holds or will hold; future: until it is there; used: when a request last took it;
    root: in front of tokens in the keys of blocks, by the files as they were read."""

    number: int
    key: Key | None = None
    future: Future[Adapter] | None = None
    used: float = 0.0
    root: bytes = b""


class Entry(NamedTuple):
    """A request that waits: its number in the order of arrival, since when, and for which adapter, or what is
    wrong with that."""

    number: int
    since: float
    key: Key | str


Group = dict[int, tuple[Request, Entry]]  # requests with one `key`, by `number`, ascending


class AdapterPreparation(Waiting[Entry]):
    """Requests with an adapter, from their submission until it has a place on the device. An adapter keeps
    its place while a request has it; then the one that was used longest ago makes room.

    A request whose adapter has no place yet is overtaken by those whose adapter has one, but only for
    PATIENCE_S: then it comes first. Thousands can wait, so the loop looks at their adapters."""

    poll_ms = 2
    overtaken = True

    def __init__(
        self,
        load: Callable[[int, str], Future[Adapter]] | None,
        count: int,
        open_requests: Callable[[], Iterable[Request]],
    ) -> None:
        """load: as AdapterLoader.load, on every rank; None: the engine has no room for adapters.
        open_requests: those that have gone through here and have not ended."""
        super().__init__(self._forgotten)
        self._load, self._open_requests = load, open_requests
        self._places = [AdapterPlace(number) for number in range(count)]
        self._came = 0
        self._groups: dict[Key | str, Group] = {}  # of those that wait, by `key`; none is empty
        self.loads = 0

    @property
    def waiting(self) -> list[str]:
        """Folders of the adapters that requests wait for."""
        return sorted({request.params.adapter for request, _ in map(_first, self._groups.values())})

    def needed(self, params: SamplingParams) -> bool:
        return bool(params.adapter)

    def submit(self, request: Request) -> None:
        folder = request.params.adapter
        key: Key | str
        try:
            key = folder, adapter_state(Path(folder))
        except OSError as error:
            key = f"the adapter {folder} cannot be read: {error.strerror or error}"
        self._forget_failed(key)
        self._came += 1
        entry = Entry(self._came, time.monotonic(), key)
        self.add(request, entry)
        self._groups.setdefault(key, {})[entry.number] = request, entry

    def ready(self) -> Iterator[tuple[Request, str | None]]:
        """Requests whose adapter is on the device, or with what is wrong with it."""
        now = time.monotonic()
        for request, (_, _, key) in self._due(now):
            self.cancel(request.handle)
            if isinstance(key, str):
                yield request, _why(request.params, key)
                continue
            place = self._place_of(key)
            assert place is not None
            problem = self._settle(place)
            if problem is None:
                place.used = now
                request.adapter = place.number
                request.cache_root = place.root
            yield request, problem and _why(request.params, problem)

    def _due(self, now: float) -> list[tuple[Request, Entry]]:
        """Those that need not wait any more, in order of arrival. Begins to load adapters of others."""
        full, impatient = False, math.inf  # number of the request that none with a later one overtakes
        there: list[Group] = []
        earlier: set[Key] = set()
        for group in sorted(self._groups.values(), key=lambda group: _first(group)[1]):
            number, since, key = _first(group)[1]
            if isinstance(key, str):
                there.append(group)
                continue
            place = self._place_of(key)
            if place is None:
                if not full:  # else there is no place for later ones either
                    self._begin(key, earlier)
                    full = self._place_of(key) is None
                    if full and now - since > PATIENCE_S:
                        impatient = number
            elif place.future is None or place.future.done():
                there.append(group)
            earlier.add(key)
        due = [takewhile(lambda each: each[0] < impatient, group.items()) for group in there]
        return [waiting for _, waiting in sorted(chain(*due))]

    def _place_of(self, key: Key) -> AdapterPlace | None:
        return next((place for place in self._places if place.key == key), None)

    def _settle(self, place: AdapterPlace) -> str | None:
        """What went wrong with what has come to a place. It is free again then, once all that wait know."""
        future = place.future
        if future is None:
            return None
        error = future.exception()
        if error is None:
            adapter = future.result()
            read = str(adapter.folder), adapter.state
            place.future, place.root = None, blake2b(repr(read).encode(), digest_size=16).digest()
            return None
        assert place.key is not None
        self._forget_failed(place.key)
        if not isinstance(error, AdapterError):
            log.error("an adapter could not be loaded", exc_info=error)
        return str(error) or type(error).__name__

    def _forget_failed(self, key: Key | str) -> None:
        """Free the place of an adapter that could not be loaded, unless a request still waits for it."""
        for place in self._places:
            future = place.future
            if place.key != key or future is None or not future.done() or future.exception() is None:
                continue
            if key not in self._groups:
                place.key = place.future = None

    def _forgotten(self, entry: Entry) -> None:
        group = self._groups[entry.key]
        del group[entry.number]
        if not group:
            del self._groups[entry.key]

    def _begin(self, key: Key, earlier: set[Key]) -> None:
        """Load an adapter, if there is a place that no request has. earlier: what others came for before."""
        assert self._load is not None
        taken = {request.adapter for request in self._open_requests()}
        free = [
            place
            for place in self._places
            if place.number not in taken
            and place.key not in earlier
            and (place.future is None or place.future.done())
        ]
        if not free:
            return
        place = min(free, key=lambda place: (place.key is not None, place.used))
        place.key, place.future = key, self._load(place.number, key[0])
        self.loads += 1


def _first(group: Group) -> tuple[Request, Entry]:
    return next(iter(group.values()))


def _why(params: SamplingParams, problem: str) -> str:
    """What to tell of an adapter that could not be loaded."""
    if Path(params.adapter).is_dir():
        return problem
    return (
        f"the adapter {params.adapter_name or params.adapter} was removed before the request could run. Send"
        " the request again, with lora_weights if it has a lora_task_id: others with the same id replace"
        " them, and lora_cache_host_memory_bytes bounds those that are kept"
    )
