# SPDX-License-Identifier: Apache-2.0
"""Which adapters requests can ask for: names, and TensorRT-LLM's task ids, with their folders.

All processes of a server that take requests share them, in files of the model's run directory.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from flashinfer_backend.core.bounds import MOST_TASKS
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.paths import resolve_model_dir
from flashinfer_backend.core.values import shown
from flashinfer_backend.models.adapters import PREFIX, WEIGHTS, AdapterError, read_adapter
from flashinfer_backend.models.checkpoint_kind import ADAPTER_CONFIG
from flashinfer_backend.models.hf import read_spec
from flashinfer_backend.models.spec import ModelSpec
from flashinfer_backend.transport import rundir

MOST_NAMES = 4096  # that can be loaded at a time
NAMES_FILE, TASKS_FOLDER = "adapters.json", "adapters"
# TensorRT-LLM's numbers of modules (LoraManager.LORA_MODULE_IDS), and what a checkpoint calls these. Its
# hf_lora_convert.py gives gate_up_proj the number of gate_proj, with the halves of its rows exchanged.
_MODULES = {
    0: ("qkv_proj",),
    1: ("q_proj",),
    2: ("k_proj",),
    3: ("v_proj",),
    4: ("o_proj",),
    5: ("gate_proj", "gate_up_proj"),
    6: ("down_proj",),
    7: ("up_proj",),
}


class NameTakenError(AdapterError):
    """A name that a new adapter cannot have."""


class AdapterNames:
    """The names of an engine's adapters: those in lora_modules, and those loaded since."""

    def __init__(self, config: EngineConfig, run_dir: Path) -> None:
        """Raises ValueError for a folder in lora_modules that holds no adapter for the model."""
        self._config, self._run_dir = config, run_dir
        self._fixed = {} if config.lora_modules == "none" else config.lora_modules
        self._state: tuple[int, int, int] | None = None  # of the file of names, when it was read
        self._names: dict[str, str] = {}
        for folder in self._fixed.values():
            self._check(Path(folder))

    @cached_property
    def _spec(self) -> ModelSpec:
        config = self._config
        folder = resolve_model_dir(config.model_dir)
        return read_spec(folder, resolve_model_dir(config.tokenizer_dir) if config.tokenizer_dir else folder)

    def _check(self, folder: Path) -> None:
        read_adapter(folder, self._spec, self._config.max_lora_rank, self._config.lora_vocabulary)

    @property
    def folders(self) -> dict[str, str]:
        """Name -> folder of every adapter."""
        return {**self._fixed, **self._loaded()}

    def folder(self, name: str) -> str | None:
        """An adapter's folder; None where no adapter has this name."""
        return self._fixed.get(name) or self._loaded().get(name)

    def load(
        self, name: str, folder: Path, replace: bool = False, others: Sequence[AdapterNames] = ()
    ) -> None:
        """Let requests ask for the adapter in a folder. others: of the server's other models, none of which
        may have an adapter of this name. Raises AdapterError."""
        if not name or len(name) > 256:
            raise NameTakenError("the adapter's name should have 1 to 256 characters")
        if not name.isprintable():  # logs and metrics have it
            raise NameTakenError(f"the adapter's name {shown(name)} should have printable characters only")
        if "," in name:  # lora_modules and vllm:lora_requests_info have commas between names
            raise NameTakenError(f"the adapter's name {shown(name)} should have no comma")
        self._check(folder)
        with ExitStack() as locks:
            # Loads for all models take the first one's lock, so that no two of them take the same name.
            for run_dir in sorted({self._run_dir, min(each._run_dir for each in (self, *others))}):
                locks.enter_context(rundir.locked(run_dir))
            if any(other.folder(name) is not None for other in others):
                raise NameTakenError(f"{shown(name)} is an adapter of another model; take another name")
            loaded = self._loaded()
            if name in self._fixed or (name in loaded and not replace):
                raise NameTakenError(
                    f"there is an adapter {shown(name)} already; unload it, or take another name"
                )
            if len({*loaded, name}) > MOST_NAMES:
                raise AdapterError(f"there are {len(loaded)} adapters already; unload some")
            self._write({**loaded, name: str(folder)})

    def unload(self, name: str) -> None:
        """Take no more requests for an adapter; those that are open go on. Raises AdapterError."""
        with rundir.locked(self._run_dir):
            loaded = dict(self._loaded())
            if loaded.pop(name, None) is None:
                fixed = " that was loaded while the server ran" if name in self._fixed else ""
                raise AdapterError(f"there is no adapter {shown(name)}{fixed}")
            self._write(loaded)

    def _loaded(self) -> Mapping[str, str]:
        """Read again when the file was replaced: a request has several lookups, and a list of models one for
        each name."""
        file = self._run_dir / NAMES_FILE
        try:
            found = os.stat(file)
            state = found.st_ino, found.st_mtime_ns, found.st_size
            if state != self._state:
                self._state, self._names = state, json.loads(file.read_bytes())
        except FileNotFoundError:
            return {}
        return self._names

    def _write(self, loaded: Mapping[str, str]) -> None:
        new = self._run_dir / f"{NAMES_FILE}.new"
        new.write_text(json.dumps(loaded))
        new.replace(self._run_dir / NAMES_FILE)

    def task(self, number: int) -> str:
        """The folder of a task id whose weights have come. Raises AdapterError."""
        task = self._run_dir / TASKS_FOLDER / str(number)
        try:
            folder = task.parent / task.read_text()
            os.utime(task)
            return str(folder)
        except FileNotFoundError:
            raise AdapterError(
                f"lora_task_id is {number}, whose weights this server does not have: send lora_weights and"
                " lora_config with the first request of an adapter"
            ) from None

    def keep_task(self, number: int, weights: np.ndarray, config: np.ndarray) -> str:
        """Store the weights of a task id and return their folder. weights: float16 [modules, n], in each row
        `in` [r, K] and `out` [N, r], flattened, and padding; config: int32 [modules, 3], module, layer and r,
        as TensorRT-LLM's hf_lora_convert.py writes them. Raises AdapterError."""
        most = self._config.lora_cache_host_memory_bytes
        if weights.nbytes > most:
            raise AdapterError(
                f"lora_weights has {weights.nbytes} bytes for one adapter; it should have at most {most} (the"
                " knob lora_cache_host_memory_bytes)"
            )
        digest = blake2b(f"{config.shape} {weights.shape}".encode(), digest_size=16)
        for array in (config, weights):
            digest.update(np.ascontiguousarray(array).data)
        name = digest.hexdigest()
        tasks = self._run_dir / TASKS_FOLDER
        # Without the lock another process may forget the folder before the id names it.
        with rundir.locked(self._run_dir):
            tasks.mkdir(exist_ok=True)
            if not (tasks / name).is_dir():
                new = Path(tempfile.mkdtemp(dir=tasks))
                try:
                    self._convert(new, weights, config)
                    self._check(new)
                    new.rename(tasks / name)
                finally:
                    shutil.rmtree(new, ignore_errors=True)
            file = tasks / f"{number}.new"
            file.write_text(name)
            file.replace(tasks / str(number))
            self._forget_tasks(tasks)
        return str(tasks / name)

    def _forget_tasks(self, tasks: Path) -> None:
        """Keep the MOST_TASKS used last, within lora_cache_host_memory_bytes. The run directory is locked."""
        numbers = [file for file in tasks.iterdir() if file.is_file() and file.name.isdigit()]
        numbers.sort(key=lambda file: file.stat().st_mtime_ns, reverse=True)
        kept: set[str] = set()
        held = 0
        for place, file in enumerate(numbers):
            name = file.read_text()
            if name not in kept:
                held += (tasks / name / WEIGHTS).stat().st_size
            if (held > self._config.lora_cache_host_memory_bytes and kept) or place >= MOST_TASKS:
                file.unlink()
            else:
                kept.add(name)
        for folder in tasks.iterdir():
            if folder.is_dir() and folder.name not in kept and re.fullmatch("[0-9a-f]{32}", folder.name):
                # At once: an engine that is about to read the weights finds all or nothing.
                shutil.rmtree(folder.replace(tempfile.mkdtemp(dir=tasks)), ignore_errors=True)

    def _convert(self, folder: Path, weights: np.ndarray, config: np.ndarray) -> None:
        """Write a folder as PEFT does."""
        places = {
            (index, source.module.rpartition(".")[2]): (f"{layer.prefix}.{source.module}", source.part.whole)
            for index, layer in enumerate(self._spec.layers)
            for product in layer.adaptable
            for source in product.sources
        }
        tensors: dict[str, np.ndarray] = {}
        usual, *_ = config[:, 2].tolist()
        alphas: dict[str, int] = {}
        for row, (number, layer, rank) in zip(weights, config.tolist(), strict=True):
            names = [name for name in _MODULES.get(number, ()) if (layer, name) in places]
            if not names:
                raise AdapterError(
                    f"lora_config names module {number} of layer {layer}, which this model lacks"
                )
            module, (rows, columns) = places[layer, names[0]]
            if f"{PREFIX}{module}.lora_A.weight" in tensors:
                raise AdapterError(f"lora_config names module {number} of layer {layer} more than once")
            said = f"lora_config says that {module} has rank {rank}"
            if not 0 < rank <= self._config.max_lora_rank:
                most = f"{self._config.max_lora_rank} (the knob max_lora_rank)"
                raise AdapterError(f"{said}; it should be 1 to {most}")
            if rank * (rows + columns) > len(row):
                raise AdapterError(
                    f"{said}, and lora_weights has {len(row)} numbers for it; they should be at least"
                    f" {rank * (rows + columns)}"
                )
            if not np.isfinite(row[: rank * (rows + columns)]).all():
                raise AdapterError("lora_weights holds NaN or infinity; it should hold numbers")
            down, up = np.split(row[: rank * (rows + columns)], [rank * columns])
            up = up.reshape(rows, rank)
            if names[0] == "gate_up_proj":
                up = np.concatenate(np.split(up, 2)[::-1])
            tensors[f"{PREFIX}{module}.lora_A.weight"] = np.ascontiguousarray(down.reshape(rank, columns))
            tensors[f"{PREFIX}{module}.lora_B.weight"] = np.ascontiguousarray(up)
            if rank != usual:
                alphas[re.escape(module)] = rank
        save_file(tensors, folder / WEIGHTS)
        # The weights are scaled already: each module's alpha is its rank.
        text = json.dumps({"peft_type": "LORA", "lora_alpha": usual, "alpha_pattern": alphas})
        (folder / ADAPTER_CONFIG).write_text(text)
