# SPDX-License-Identifier: Apache-2.0
"""Fill a Transformer from the safetensors files of a checkpoint, or with random numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flashinfer_backend.core.checkpoint_json import shards
from flashinfer_backend.models.transformer import Layer, Transformer

# Tables that some checkpoints store and that are computed here from config.json.
_COMPUTED_SUFFIX = ".rotary_emb.inv_freq"
_FLOAT_DTYPES = ("F32", "F16", "BF16")


class WeightsError(ValueError):
    """The checkpoint's tensors do not fit the model that its config.json describes."""


def load_weights(model: Transformer, model_dir: str | Path, load_format: str = "auto", seed: int = 0) -> None:
    """Fill the model's weights in place.

    load_format "auto" reads model.safetensors, or the shards that model.safetensors.index.json names,
    one tensor at a time into the fused weights, converted to the model's dtype. "dummy" draws them from
    N(0, initializer_range) keyed by seed (norms 1, biases 0) and does not look at model_dir.
    Raises FileNotFoundError for a missing file and WeightsError for tensors that are missing,
    unexpected, of another shape or not floating point.
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
    generator = torch.Generator(device=model.device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("norm"):
            parameter.fill_(1.0)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            parameter.normal_(0.0, model.config.initializer_range, generator=generator)


def destinations(model: Transformer) -> dict[str, Tensor]:
    """Checkpoint name -> the (slice of a fused) weight that it fills, for every tensor but a tied lm_head."""
    config = model.config
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    targets: dict[str, Tensor] = {
        "model.embed_tokens.weight": model.embed_tokens,
        "model.norm.weight": model.final_norm,
    }
    if not config.tie_word_embeddings:
        targets["lm_head.weight"] = model.lm_head.data
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        prefix = f"model.layers.{index}"
        targets[f"{prefix}.input_layernorm.weight"] = layer.input_norm
        targets[f"{prefix}.post_attention_layernorm.weight"] = layer.post_norm
        targets[f"{prefix}.self_attn.o_proj.weight"] = layer.o.data
        targets[f"{prefix}.mlp.down_proj.weight"] = layer.down.data
        gate, up = layer.gate_up.data.chunk(2)
        targets[f"{prefix}.mlp.gate_proj.weight"] = gate
        targets[f"{prefix}.mlp.up_proj.weight"] = up
        for part, rows in zip("qkv", layer.qkv.data.split((q_rows, kv_rows, kv_rows)), strict=True):
            targets[f"{prefix}.self_attn.{part}_proj.weight"] = rows
        if layer.qkv_bias is not None:
            for part, rows in zip("qkv", layer.qkv_bias.split((q_rows, kv_rows, kv_rows)), strict=True):
                targets[f"{prefix}.self_attn.{part}_proj.bias"] = rows
        if layer.q_norm is not None and layer.k_norm is not None:
            targets[f"{prefix}.self_attn.q_norm.weight"] = layer.q_norm
            targets[f"{prefix}.self_attn.k_norm.weight"] = layer.k_norm
    return targets


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
    targets = destinations(model)
    unexpected: list[str] = []
    loaded: set[str] = set()
    tied_head: Tensor | None = None
    for path in _files(model_dir):
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 (not a dict: it cannot be iterated)
                if name.endswith(_COMPUTED_SUFFIX):
                    continue
                is_tied_head = name == "lm_head.weight" and model.config.tie_word_embeddings
                target = model.embed_tokens if is_tied_head else targets.get(name)
                if target is None:
                    unexpected.append(name)
                    continue
                if name in loaded:
                    raise WeightsError(f"{path}: {name} appears in more than one file")
                stored = file.get_slice(name)
                if tuple(stored.get_shape()) != tuple(target.shape):
                    raise WeightsError(
                        f"{path}: {name} has shape {list(stored.get_shape())}, config.json asks for "
                        f"{list(target.shape)}"
                    )
                if stored.get_dtype() not in _FLOAT_DTYPES:
                    raise WeightsError(
                        f"{path}: {name} is {stored.get_dtype()}; only {', '.join(_FLOAT_DTYPES)} are loaded"
                    )
                if is_tied_head:
                    tied_head = file.get_tensor(name)
                else:
                    target.copy_(file.get_tensor(name))
                loaded.add(name)
    if unexpected:
        raise WeightsError(
            f"{model_dir} has tensors that config.json does not account for: {_some(unexpected)}"
        )
    missing = sorted(targets.keys() - loaded)
    if missing:
        raise WeightsError(f"{model_dir} lacks tensors that config.json asks for: {_some(missing)}")
    if tied_head is not None and not torch.equal(tied_head.to(model.embed_tokens), model.embed_tokens):
        raise WeightsError(
            f"{model_dir}: config.json says tie_word_embeddings, but lm_head.weight differs from "
            "model.embed_tokens.weight; set tie_word_embeddings to false"
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
