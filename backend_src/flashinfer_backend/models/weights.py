# SPDX-License-Identifier: Apache-2.0
"""Fill a Transformer from the safetensors files of a checkpoint, or with random numbers."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flashinfer_backend.core.checkpoint_json import shards
from flashinfer_backend.models.transformer import Layer, Transformer
from flashinfer_backend.models.upload import Uploader
from flashinfer_backend.ops.weight import DENSE, FLOATS, Int4, Stored, Weight, positive

# Tables that some checkpoints store and that are computed here from config.json.
_COMPUTED_SUFFIX = ".rotary_emb.inv_freq"
# Of keys' and values' scales: compressed-tensors', ModelOpt's, and older ones of compressed-tensors.
KV_SCALE_NAMES = ("{0}_scale", "{0}_proj.{0}_scale", "{0}_proj.output_scale")

log = logging.getLogger(__name__)

PROGRESS_S = 5.0  # between two lines of progress


class WeightsError(ValueError):
    """The checkpoint's tensors do not fit the model that its config.json describes."""


def load_weights(model: Transformer, model_dir: str | Path, load_format: str = "auto", seed: int = 0) -> None:
    """Fill the model's weights in place.

    load_format "auto" reads model.safetensors, or the shards that model.safetensors.index.json names,
    one tensor at a time into the fused weights, converted to the model's dtype, or quantised where the
    weight's format says so. "dummy" draws them from
    N(0, initializer_range) keyed by seed and rank (norms 1, biases 0) and does not look at model_dir.
    Raises FileNotFoundError for a missing file and WeightsError for tensors that are missing,
    unexpected, of another shape or of another type than the format of their weight has.
    """
    if load_format == "dummy":
        _fill_randomly(model, seed)
    elif load_format == "auto":
        _load_safetensors(model, Path(model_dir))
    else:
        raise ValueError(f"load_format {load_format!r} is unknown; known: auto, dummy")


def _opened(path: Path) -> Any:
    """The open safetensors file; raises WeightsError naming a file that is cut short or none."""
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise WeightsError(f"{path} cannot be read ({error}): is its download complete?") from None


@torch.no_grad()
def _fill_randomly(model: Transformer, seed: int) -> None:
    rank, size = model.config.shard
    generator = torch.Generator(device=model.device).manual_seed(seed * size + rank)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, Weight) and module.format is not DENSE:
                continue
            if name.endswith("norm"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.normal_(0.0, model.config.initializer_range, generator=generator)
        if isinstance(module, Weight) and module.format is not DENSE:
            values = torch.empty(module.shape, dtype=model.dtype, device=model.device)
            values.normal_(0.0, model.config.initializer_range, generator=generator)
            module.format.fill(module, values)


def destinations(model: Transformer) -> dict[str, Stored]:
    """Checkpoint name -> what it fills (often a part of a fused weight), for all but a tied lm_head."""
    config = model.config
    targets = {
        "model.embed_tokens.weight": vocabulary(model, model.embed_tokens),
        "model.norm.weight": Stored.into(model.final_norm),
    }
    if not config.tie_word_embeddings:
        targets["lm_head.weight"] = vocabulary(model, model.lm_head.data)
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        prefix = f"model.layers.{index}"
        targets[f"{prefix}.input_layernorm.weight"] = Stored.into(layer.input_norm)
        targets[f"{prefix}.post_attention_layernorm.weight"] = Stored.into(layer.post_norm)
        for weight in (layer.qkv, layer.o, layer.gate_up, layer.down):
            start = 0
            for module, rows in config.parts(weight.role).items():
                own, part = slice(start, start + rows), config.part(weight.role, module)
                for name, stored in weight.format.reads(weight, own, part).items():
                    targets[f"{prefix}.{module}.{name}"] = stored
                if weight is layer.qkv and layer.qkv_bias is not None:
                    bias, shapes = layer.qkv_bias[own], (part.whole[:1],)
                    targets[f"{prefix}.{module}.bias"] = Stored(shapes, FLOATS, bias.copy_, part.rows)
                start += rows
        if layer.q_norm is not None and layer.k_norm is not None:
            targets[f"{prefix}.self_attn.q_norm.weight"] = Stored.into(layer.q_norm)
            targets[f"{prefix}.self_attn.k_norm.weight"] = Stored.into(layer.k_norm)
    return targets


def vocabulary(model: Transformer, target: Tensor) -> Stored:
    """The rank's rows of a matrix with one for each token. Rows of padding behind them are zeros."""
    config = model.config
    rows = config.local_vocab
    own = target[: rows.stop - rows.start]
    target[len(own) :] = 0
    return Stored(((config.vocab_size, config.hidden_size),), FLOATS, own.copy_, rows)


def _kv_scales(model: Transformer, found: dict[tuple[int, str], float]) -> dict[str, Stored]:
    """The checkpoint names of scales of keys and values -> where they go: found[layer, "k" or "v"]."""

    def stored(key: tuple[int, str]) -> Stored:
        return Stored(((), (1,)), FLOATS, lambda value: found.update({key: positive(value)}))

    return {
        f"model.layers.{index}.self_attn.{name.format(part)}": stored((index, part))
        for index in range(model.config.num_layers)
        for part in "kv"
        for name in KV_SCALE_NAMES
    }


def _files(model_dir: Path) -> list[Path]:
    index_path, single = model_dir / "model.safetensors.index.json", model_dir / "model.safetensors"
    if index_path.is_file():
        try:
            files = [model_dir / name for name in shards(index_path)]
        except ValueError as error:
            raise WeightsError(str(error)) from None
        absent = [path.name for path in files if not path.is_file()]
        if absent:
            raise FileNotFoundError(f"{index_path} names files that are not there: {_some(absent)}")
        return files
    if single.is_file():
        return [single]
    raise FileNotFoundError(
        f"{model_dir} has neither model.safetensors nor model.safetensors.index.json; "
        "only safetensors checkpoints are loaded"
    )


@torch.no_grad()
def _load_safetensors(model: Transformer, model_dir: Path) -> None:
    scales: dict[tuple[int, str], float] = {}
    targets, optional = destinations(model), _kv_scales(model, scales)
    says = model.config.quantization.format
    unexpected: list[str] = []
    loaded: set[str] = set()
    tied_head: Tensor | None = None
    size, began = 0, time.monotonic()
    told = began
    # On a CPU a tensor of the file is copied where it belongs.
    upload = Uploader(model.device) if model.device.type == "cuda" else None
    for path in _files(model_dir):
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 (not a dict: it cannot be iterated)
                if time.monotonic() - told > PROGRESS_S:
                    told = time.monotonic()
                    log.info("read %d of %d tensors, %.1f GB", len(loaded), len(targets), size / 1e9)
                if name.endswith(_COMPUTED_SUFFIX):
                    continue
                is_tied_head = name == "lm_head.weight" and model.config.tie_word_embeddings
                tied = targets["model.embed_tokens.weight"]
                target = tied if is_tied_head else targets.get(name) or optional.get(name)
                if target is None:
                    unexpected.append(name)
                    continue
                if name in loaded:
                    raise WeightsError(f"{path}: {name} appears in more than one file")
                stored = file.get_slice(name)
                shape = tuple(stored.get_shape())
                if shape not in target.shapes:
                    raise WeightsError(
                        f"{path}: {name} has shape {list(shape)}, config.json asks for "
                        f"{' or '.join(str(list(shape)) for shape in target.shapes)}"
                    )
                if stored.get_dtype() not in target.dtypes:
                    raise WeightsError(
                        f"{path}: {name} is {stored.get_dtype()}; only {', '.join(target.dtypes)} are loaded"
                        f"{'' if says == 'dense' else f' (by its quantization_config: {says})'}"
                    )
                cut = target.cut(shape)
                # get_slice takes no tensor of no dimensions
                value = file.get_tensor(name) if not cut else stored[cut]
                if is_tied_head:
                    tied_head = value
                else:
                    try:
                        target.take(upload(value) if upload else value)
                    except ValueError as error:
                        raise WeightsError(f"{path}: {name} {error}") from None
                loaded.add(name)
                size += value.nbytes
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.monotonic() - began
    log.info("read %.2f GB in %.2f s, %.1f GB/s", size / 1e9, seconds, size / 1e9 / seconds)
    if unexpected:
        raise WeightsError(
            f"{model_dir} has tensors that config.json does not account for: {_some(unexpected)}"
        )
    missing = sorted(name for name in targets.keys() - loaded if not targets[name].optional)
    if missing:
        raise WeightsError(f"{model_dir} lacks tensors that config.json asks for: {_some(missing)}")
    _finish(model, model_dir)
    _set_kv_scales(model, model_dir, scales)
    if tied_head is not None and not torch.equal(
        tied_head.to(model.embed_tokens), model.embed_tokens[: len(tied_head)]
    ):
        raise WeightsError(
            f"{model_dir}: config.json says tie_word_embeddings, but lm_head.weight differs from "
            "model.embed_tokens.weight; set tie_word_embeddings to false"
        )


def _finish(model: Transformer, model_dir: Path) -> None:
    """What a weight can do only when it has all of its tensors."""
    for index, layer in enumerate(model.layers):
        for weight in layer.children():
            if isinstance(weight, Weight) and isinstance(weight.format, Int4):
                try:
                    weight.format.finish(weight)
                except ValueError as error:
                    parts = ", ".join(model.config.parts(weight.role))
                    raise WeightsError(f"{model_dir}: g_idx of layer {index}'s {parts} {error}") from None


def _set_kv_scales(model: Transformer, model_dir: Path, found: dict[tuple[int, str], float]) -> None:
    """All layers' scales or none: without any, keys and values are stored as they are."""
    if not found:
        return
    for index, layer in enumerate(model.layers):
        missing = [part for part in "kv" if (index, part) not in found]
        if missing:
            raise WeightsError(
                f"{model_dir} has scales of some keys and values, but not self_attn.{missing[0]}_scale of "
                f"layer {index}"
            )
        assert isinstance(layer, Layer)
        layer.kv_scales = (found[index, "k"], found[index, "v"])


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
