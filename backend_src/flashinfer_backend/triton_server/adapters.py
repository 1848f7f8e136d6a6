# SPDX-License-Identifier: Apache-2.0
"""Which adapter each row of a request has: by name, or as TensorRT-LLM's clients send it."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from flashinfer_backend.core.values import shown, some
from flashinfer_backend.serving.adapters import AdapterNames

INPUTS = ("lora_task_id", "lora_weights", "lora_config")


class TaskThread:
    """Takes requests with an adapter's weights, so that others do not wait while these are stored. Later
    requests of the same task id, and stops, stay behind them."""

    def __init__(self, most_bytes: int) -> None:
        """most_bytes: limit for the weights that wait, when several requests have some."""
        self._most_bytes, self._thread = most_bytes, ThreadPoolExecutor(1, "adapters")
        self._lock = threading.Lock()  # guards all below
        self._ids: Counter[int] = Counter()  # of the requests here
        self._bytes = 0

    def takes(self, tensors: Mapping[str, np.ndarray], stops: bool, accept: Callable[[], None]) -> bool:
        """Whether a request is for this thread, which then calls `accept`. stops: whether it stops another
        one. Raises ValueError where too much waits."""
        ids = tensors["lora_task_id"].reshape(-1).tolist() if "lora_task_id" in tensors else []
        size = tensors["lora_weights"].nbytes if "lora_weights" in tensors else 0
        with self._lock:
            behind = bool(self._ids) and (stops or any(number in self._ids for number in ids))
            if not behind and not (ids and size):
                return False
            if self._bytes and self._bytes + size > self._most_bytes:
                raise ValueError(
                    f"lora_weights has {size} bytes, and {self._bytes} of other adapters wait to be stored;"
                    f" together they should have at most {self._most_bytes} (the knob"
                    " lora_cache_host_memory_bytes). Send the request again later"
                )
            self._ids.update(ids)
            self._bytes += size
        self._thread.submit(self._run, ids, size, accept)
        return True

    def _run(self, ids: list[int], size: int, accept: Callable[[], None]) -> None:
        try:
            accept()
        finally:
            with self._lock:
                self._ids -= Counter(ids)
                self._bytes -= size

    def close(self) -> None:
        self._thread.shutdown()


def chosen_adapters(
    tensors: Mapping[str, np.ndarray], rows: int, name: str, adapters: AdapterNames | None
) -> list[tuple[str, str]]:
    """Folder and name of each row's adapter, both "" for none; a task id is its name. tensors: lora_task_id
    uint64 [rows, 1], and with the first request of an id lora_weights float16 [rows, modules, n] and
    lora_config int32 [rows, modules, 3]. name: the request's lora_name. adapters: None for a model without.
    Raises ValueError."""
    given = [each for each in INPUTS if each in tensors and tensors[each].size]
    if adapters is None:
        if given:
            raise ValueError(f"{given[0]} is not supported: this model has no LoRA; build it with max_loras")
        if name:
            raise ValueError(f"lora_name is {shown(name)}: this model has no LoRA; build it with max_loras")
        return [("", "")] * rows
    if name and given:
        raise ValueError(f"lora_name and {given[0]} both name an adapter; leave one of them out")
    if name:
        folder = adapters.folder(name)
        if folder is None:
            there = some(sorted(adapters.folders)) or "none"
            raise ValueError(f"lora_name is {shown(name)}; the adapters are: {there}")
        return [(folder, name)] * rows
    if not given:
        return [("", "")] * rows
    if "lora_task_id" not in given:
        raise ValueError(f"{given[0]} needs lora_task_id, by which later requests name the adapter")
    if len(given) == 2:
        missing = next(each for each in INPUTS if each not in given)
        raise ValueError(f"{given[1]} needs {missing}: the first request of an adapter has both")
    ids = tensors["lora_task_id"].reshape(-1).tolist()
    if len(ids) != rows:
        raise ValueError(f"lora_task_id has {len(ids)} values; it should have one for each of {rows} rows")
    if len(given) == 1:
        return [(adapters.task(number), str(number)) for number in ids]
    weights, config = (_by_row(each, tensors[each], rows) for each in INPUTS[1:])
    if config.shape[-1] != 3 or weights.shape[:2] != config.shape[:2]:
        raise ValueError(
            f"lora_weights {list(weights.shape)} and lora_config {list(config.shape)} should be"
            f" [{rows}, modules, n] and [{rows}, modules, 3]"
        )
    first = {number: row for row, number in reversed(list(enumerate(ids)))}
    for row, number in enumerate(ids):
        if any(
            not np.array_equal(each[row], each[first[number]], equal_nan=True) for each in (weights, config)
        ):
            raise ValueError(
                f"rows {first[number]} and {row} have different weights for lora_task_id {number}; an id"
                " should have one adapter"
            )
    folders = {number: adapters.keep_task(number, weights[row], config[row]) for number, row in first.items()}
    return [(folders[number], str(number)) for number in ids]


def _by_row(name: str, tensor: np.ndarray, rows: int) -> np.ndarray:
    if tensor.ndim == 2 and rows == 1:  # without a batch dimension
        tensor = tensor[None]
    if tensor.ndim != 3 or len(tensor) != rows:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; it should be [{rows}, modules, n]")
    return tensor
