# SPDX-License-Identifier: Apache-2.0
"""Requests with an adapter, until that is on the device."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from flashinfer_backend.core.deadlines import Waiting
from flashinfer_backend.core.request import Request
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.models.adapters import Adapter, AdapterError, State, adapter_state

log = logging.getLogger(__name__)

PATIENCE_S = 1.0  # for which requests that wait for a place are overtaken by those whose adapter is there

# An adapter: its folder, and the state of its files. One that is replaced makes it another adapter.
Key = tuple[str, State]


@dataclass(eq=False)
class Place:
    """key: names what it holds or will hold; future: until it is there; used: when a request last took it;
    root: in front of tokens in the keys of blocks, by the files as they were read."""

    number: int
    key: Key | None = None
    future: Future[Adapter] | None = None
    used: float = 0.0
    root: bytes = b""


class AdapterPreparation(Waiting[tuple[float, Key | str]]):
    """Requests with an adapter, from their submission until it has a place on the device. An adapter keeps
    its place while a request has it; then the one that was used longest ago makes room.

    A request whose adapter has no place yet is overtaken by those whose adapter has one, but only for
    PATIENCE_S: then it comes first. `entries` say since when each waits, and for which adapter, or what is
    wrong with that."""

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
        super().__init__()
        self._load, self._open_requests = load, open_requests
        self._places = [Place(number) for number in range(count)]
        self.loads = 0

    @property
    def waiting(self) -> list[str]:
        """Folders of the adapters that requests wait for."""
        return sorted({request.params.adapter for request, _ in self.entries})

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
        self.add(request, (time.monotonic(), key))

    def ready(self) -> Iterator[tuple[Request, str | None]]:
        """Requests whose adapter is on the device, or with what is wrong with it."""
        now, full, impatient = time.monotonic(), False, False
        earlier: set[Key] = set()
        for request, (since, key) in self.entries:
            if isinstance(key, str):
                self.cancel(request.handle)
                yield request, _why(request.params, key)
                continue
            place = self._place_of(key)
            if place is None:
                if not full:  # else there is no place for later ones either
                    self._begin(key, earlier)
                    full = self._place_of(key) is None
                    impatient = full and now - since > PATIENCE_S
                earlier.add(key)
                continue
            if impatient or (place.future is not None and not place.future.done()):
                earlier.add(key)
                continue
            self.cancel(request.handle)
            problem = self._settle(place)
            if problem is None:
                place.used = now
                request.adapter = place.number
                request.cache_root = place.root
            yield request, problem and _why(request.params, problem)

    def _place_of(self, key: Key) -> Place | None:
        return next((place for place in self._places if place.key == key), None)

    def _settle(self, place: Place) -> str | None:
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
            if not any(key == other for _, (_, other) in self.entries):
                place.key = place.future = None

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


def _why(params: SamplingParams, problem: str) -> str:
    """What to tell of an adapter that could not be loaded."""
    if Path(params.adapter).is_dir():
        return problem
    return (
        f"the adapter {params.adapter_name or params.adapter} was removed before the request could run. Send"
        " the request again, with lora_weights if it has a lora_task_id: lora_cache_host_memory_bytes bounds"
        " the weights that are kept"
    )
