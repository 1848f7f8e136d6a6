# SPDX-License-Identifier: Apache-2.0
"""Adapters of a model (LoRA, https://arxiv.org/abs/2106.09685): a folder as PEFT writes it, checked against
the model that it was trained for. Read without torch; models/adapter_places.py puts them on the device.

What PEFT does with each key of adapter_config.json: https://huggingface.co/docs/peft/package_reference/lora.
"""

import json
import math
import re
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import regex

from flashinfer_backend.core.values import shown, some
from flashinfer_backend.models.checkpoint_kind import ADAPTER_CONFIG
from flashinfer_backend.models.safetensors_file import read_shapes, state
from flashinfer_backend.models.spec import ModelSpec, Product, Source

VOCABULARY = -1  # in place of a layer's number
WEIGHTS = "adapter_model.safetensors"
MOST_CONFIG = 1 << 20  # bytes of adapter_config.json
MOST_HEADER = 4 << 20  # bytes of the weights' header, 40 000 tensors; one of 27 MB took 1.3 s and 300 MB
PATTERNS_S = 2.0  # for which the patterns of one adapter are compared with its modules
PREFIX = "base_model.model."  # of PEFT's names in front of the model's own
# Keys that change what an adapter computes, with the values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
}
# Keys that say how it was trained or which modules it has, which the file of weights also says.
_TOLD = {
    *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying"),
    *("eva_config", "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern"),
    *("layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config"),
    *("megatron_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r"),
    *("rank_pattern", "revision", "runtime_config", "target_modules", "task_type", "use_rslora"),
}
# They change the base model's weights before training.
_CHANGED_BASES = "pissa", "olora", "loftq", "corda", "lora_ga"
# Of alpha_pattern: names, which take no time to compare.
_NAME_PATTERN = re.compile(r"(?:[\w.-]|\\[.-])*")
_TENSOR = re.compile(r"(.+)\.lora_(?:([AB])\.weight|embedding_([AB]))")
_COPY = ".base_layer.weight"  # the model's own, which PEFT saves next to adapters of the vocabulary


class AdapterError(ValueError):
    """A folder that holds no adapter for the model; the message names folder and reason."""


class Piece(NamedTuple):
    """What an adapter has for one module of one product, of a rank's share. part: which of the product's
    modules; rows: its rows of the product; source: of these and of the columns. down, up: names of the
    tensors, [rank, K] and [N, rank] of the whole module. scale: what `up` is multiplied by. centred: whether
    the mean of its rows is taken from them."""

    layer: int
    product: str
    part: int
    rows: slice
    source: Source
    down: str
    up: str
    scale: float
    centred: bool


# Of an adapter's two files: what changes when one is replaced or written to.
State = tuple[tuple[int, int], tuple[int, int]]


class Adapter(NamedTuple):
    """state: the state of its files when they were read. rank: the largest of its modules."""

    folder: Path
    state: State
    rank: int
    pieces: tuple[Piece, ...]

    @property
    def file(self) -> Path:
        return self.folder / WEIGHTS


def read_adapter(folder: Path, spec: ModelSpec, most_rank: int, vocabulary: bool) -> Adapter:
    """Read what a rank's share `spec` of the model takes from a folder with adapter_config.json and
    adapter_model.safetensors. vocabulary: whether the adapter can have matrices of the embedding and the
    head. Raises AdapterError."""
    path = folder / WEIGHTS
    try:
        found_state = adapter_state(folder)
    except OSError:
        found_state = (0, 0), (0, 0)  # one is missing, which is said below
    config = _config(folder)
    alphas = _Alphas(folder, config)
    try:
        _check_kind(path)
        tensors = read_shapes(path, MOST_HEADER)
    except FileNotFoundError:
        raise AdapterError(
            f"{folder} has no {WEIGHTS}; save the adapter with PEFT's save_pretrained (safetensors)"
        ) from None
    except (OSError, ValueError) as error:
        raise AdapterError(f"{path} cannot be read: {error}") from None
    places, pieces, rank = _places(spec, vocabulary), [], 0
    for module, named in _modules(folder, _without_copies(folder, spec, tensors)).items():
        shapes = {letter: shape for letter, (_, shape) in named.items()}
        found = places.get(_known(spec, module))
        if found is None:
            raise AdapterError(_no_place(folder, module, spec))
        down, up, whole = shapes["A"], shapes["B"], found[0][3].part.whole
        own = down[0] if down else 0
        if down != (own, whole[1]) or up != (whole[0], own):
            raise AdapterError(
                f"{folder} was made for another model: {module} has lora_A {list(down)} and lora_B"
                f" {list(up)}, where this model wants [r, {whole[1]}] and [{whole[0]}, r]"
            )
        if not 0 < own <= most_rank:
            raise AdapterError(
                f"{folder} has rank {own} at {module}; it should be 1 to {most_rank} (the knob max_lora_rank)"
            )
        rank = max(rank, own)
        scale = alphas.of(module) / (math.sqrt(own) if config.get("use_rslora") else own)
        names = [named[letter][0] for letter in "AB"]
        for layer, product, part, source, rows in found:
            place, times = (layer, product.name, part, rows, source), scale * product.scale
            pieces.append(Piece(*place, names[0], names[1], times, product.centred))
    return Adapter(folder, found_state, rank, tuple(pieces))


def _config(folder: Path) -> dict[str, Any]:
    path = folder / ADAPTER_CONFIG
    try:
        _check_kind(path)
        with path.open("rb") as file:
            text = file.read(MOST_CONFIG + 1)
        config = json.loads(text) if len(text) <= MOST_CONFIG else None
    except FileNotFoundError:
        raise AdapterError(
            f"{folder} has no {ADAPTER_CONFIG}; it should be a folder as PEFT writes it"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise AdapterError(f"{path} should hold a JSON object of at most {MOST_CONFIG} bytes")
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"{path} has peft_type {shown(config.get('peft_type'))}; only LORA is supported")
    for key, value in config.items():
        if key in _NEUTRAL and value not in _NEUTRAL[key]:
            raise AdapterError(f"{path} has {key} {shown(value)}, which is not supported; merge the adapter")
        if key not in _NEUTRAL and key not in _TOLD and value:
            raise AdapterError(f"{path} has {key} {shown(value)}, an unknown key; merge the adapter")
    begun = config.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGED_BASES):
        raise AdapterError(
            f"{path} has init_lora_weights {shown(begun)}, which changes the base model: save the adapter"
            " again with path_initial_model_for_weight_conversion"
        )
    return config


def _check_kind(path: Path) -> None:
    """Raises OSError for what is no file: a pipe would be waited for without end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it should be a regular file")


class _Alphas:
    """lora_alpha of each module: PEFT takes the first key of alpha_pattern, a regular expression, that the
    module's name ends with, from a dot on."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._path = path = folder / ADAPTER_CONFIG
        patterns = config.get("alpha_pattern") or {}
        if not isinstance(patterns, dict):
            raise AdapterError(f"{path} has alpha_pattern {shown(patterns)}; it should be an object")
        self._default = _number(path, config.get("lora_alpha", 8))
        self._until = time.monotonic() + PATTERNS_S
        self._patterns: list[tuple[Callable[[str], Any], float]] = []
        for pattern, value in patterns.items():
            self._left_s()
            self._patterns.append((self._matches(pattern), _number(path, value)))

    def of(self, module: str) -> float:
        return next((value for matches, value in self._patterns if matches(module)), self._default)

    def _matches(self, pattern: str) -> Callable[[str], Any]:
        whole = rf"(.*\.)?({pattern})$"
        if _NAME_PATTERN.fullmatch(pattern):
            return re.compile(whole).match
        try:
            compiled = regex.compile(whole, cache_pattern=False)
        except (regex.error, RecursionError, OverflowError, ValueError):
            raise AdapterError(
                f"{self._path} has in alpha_pattern {shown(pattern)}, which is no regular expression"
            ) from None

        def matches(module: str) -> Any:
            try:  # concurrent: other threads run meanwhile
                return compiled.match(module, timeout=self._left_s(), concurrent=True)
            except TimeoutError:
                self._refuse()

        return matches

    def _left_s(self) -> float:
        left = self._until - time.monotonic()
        if left <= 0:
            self._refuse()
        return left

    def _refuse(self) -> NoReturn:
        raise AdapterError(
            f"{self._path} has an alpha_pattern that takes longer than {PATTERNS_S:.0f} s to compare with the"
            " adapter's modules; name the modules in it"
        )


def _number(path: Path, value: Any) -> float:
    try:
        if not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    except (TypeError, OverflowError):
        pass
    raise AdapterError(f"{path} has lora_alpha {shown(value)}; it should be a finite number")


def _without_copies(
    folder: Path, spec: ModelSpec, tensors: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """tensors without the model's own."""
    kept, own = {}, {spec.embedding.modules[0], spec.head.modules[0]}
    for name, shape in tensors.items():
        module = name.removeprefix(PREFIX).removesuffix(_COPY)
        if not name.endswith(_COPY) or _known(spec, module) not in own:
            kept[name] = shape
        elif shape != (spec.vocab_size, spec.hidden_size):
            raise AdapterError(
                f"{folder} was made for another vocabulary: {name} is {list(shape)}, where this model has"
                f" [{spec.vocab_size}, {spec.hidden_size}]"
            )
    return kept


def _known(spec: ModelSpec, module: str) -> str:
    return spec.known_name(f"{module}.").removesuffix(".")


def _modules(
    folder: Path, tensors: Mapping[str, tuple[int, ...]]
) -> dict[str, dict[str, tuple[str, tuple[int, ...]]]]:
    """Module of the model -> names and shapes of its two matrices. tensors: shapes by name."""
    modules: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    for name, shape in tensors.items():
        found = _TENSOR.fullmatch(name.removeprefix(PREFIX))
        if found is None or not name.startswith(PREFIX):
            raise AdapterError(
                f"{folder} has the tensor {name}; {_WHY.get(name.rpartition('.')[2], _WHY[''])}"
            )
        modules.setdefault(found[1], {})[found[2] or found[3]] = name, shape
    for module, named in modules.items():
        if len(named) < 2:
            raise AdapterError(f"{folder} has one matrix of {module}; it should have lora_A and lora_B")
    if not modules:
        raise AdapterError(f"{folder / WEIGHTS} is empty")
    return modules


_WHY = {
    "": "only lora_A and lora_B of modules are supported",
    "lora_magnitude_vector": "DoRA is not supported; merge the adapter",
}


def _places(spec: ModelSpec, vocabulary: bool) -> dict[str, list[tuple[int, Product, int, Source, slice]]]:
    """Module -> layer, product, part, source and rows, of each product that has rows of it.
    The vocabulary's are of layer VOCABULARY."""
    places: dict[str, list[tuple[int, Product, int, Source, slice]]] = {}
    for index, layer in enumerate(spec.layers):
        for product in layer.adaptable:
            start = 0
            for part, run in enumerate(product.runs):
                for source in run:
                    rows = slice(start, start := start + source.rows)
                    place = index, product, part, source, rows
                    places.setdefault(f"{layer.prefix}.{source.module}", []).append(place)
    for product in spec.vocabulary if vocabulary else ():
        (source,) = product.sources
        place = VOCABULARY, product, 0, source, slice(0, source.rows)
        places[source.module] = [place]
    return places


def _no_place(folder: Path, module: str, spec: ModelSpec) -> str:
    known = sorted({source.module for layer in spec.layers for p in layer.adaptable for source in p.sources})
    why = "experts have no adapters" if "experts" in module else "this model has no such module for adapters"
    if any(_known(spec, module) in product.modules for product in spec.vocabulary):
        why = "the knob lora_vocabulary is off, which makes room for it"
    return (
        f"{folder} has an adapter of {module}: {why}; those that can have one are {some(known)} of its layers"
    )


def adapter_state(folder: Path) -> State:
    """Raises OSError."""
    return state(folder / ADAPTER_CONFIG), state(folder / WEIGHTS)


def replaced(adapter: Adapter) -> str:
    """What to tell where its files were not the same all the time."""
    return f"{adapter.file} was replaced or written to while it was read; send the request again"


def changed(adapter: Adapter) -> bool:
    """Whether one of its files was replaced or written to since they were read."""
    try:
        return adapter_state(adapter.folder) != adapter.state
    except OSError:
        return True
