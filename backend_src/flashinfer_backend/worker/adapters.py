# SPDX-License-Identifier: Apache-2.0
"""Brings adapters to a rank's device, in a thread next to its steps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.models.adapter_places import AdapterPlaces, AdapterWeights
from flashinfer_backend.models.adapters import Adapter, AdapterError, State, changed, read_adapter, replaced
from flashinfer_backend.models.transformer import Transformer


class AdapterLoader:
    """Loads adapters into places, one after the other, and keeps the latest ones on the host."""

    def __init__(self, model: Transformer, config: EngineConfig) -> None:
        self._model, self._config = model, config
        limits = config.max_loras, config.max_lora_rank, config.lora_vocabulary
        self._places = AdapterPlaces(model, *limits)
        self._thread = ThreadPoolExecutor(1, "adapters")
        self._cached: OrderedDict[str, AdapterWeights] = OrderedDict()  # by folder, the latest last

    def load(self, place: int, folder: str, others: Sequence[Future[State]] = ()) -> Future[Adapter]:
        """Put the adapter of a folder into a place that no later step names before it is there, on each rank;
        raises AdapterError in the future. others: the state of the files that each other rank has read."""
        after = None
        if self._model.device.type == "cuda":
            # A step in flight may still read the place, of a request that was cancelled: what it computes
            # can be in the prefix cache.
            (after := torch.cuda.Event()).record()
        return self._thread.submit(self._load, place, folder, after, others)

    def _load(
        self, place: int, folder: str, after: torch.cuda.Event | None, others: Sequence[Future[State]]
    ) -> Adapter:
        weights = self._cached.pop(folder, None)
        if weights is None or changed(weights.adapter):
            limits = self._config.max_lora_rank, self._config.lora_vocabulary
            adapter = read_adapter(Path(folder), self._model.spec, *limits)
            pin = self._model.device.type == "cuda"
            weights = AdapterWeights(adapter, self._model.dtype, pin)
        self._places.install(place, weights, after)
        self._cached[folder] = weights
        held = sum(each.nbytes for each in self._cached.values())
        while held > self._config.lora_cache_host_memory_bytes:
            held -= self._cached.popitem(last=False)[1].nbytes
        # The files can be removed or replaced after one rank has read them and before another one does.
        if any(other.result() != weights.adapter.state for other in others):
            raise AdapterError(replaced(weights.adapter))
        return weights.adapter
