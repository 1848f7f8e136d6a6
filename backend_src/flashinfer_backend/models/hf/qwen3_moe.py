# SPDX-License-Identifier: Apache-2.0
"""Qwen3's mixtures of experts: https://arxiv.org/abs/2505.09388. Qwen3 with experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from flashinfer_backend.core.values import shown
from flashinfer_backend.models.errors import UnsupportedModelError
from flashinfer_backend.models.hf.config import Config
from flashinfer_backend.models.spec import ModelSpec

NAMES = "gate_proj", "up_proj", "down_proj"


def qwen3_moe(config: Config) -> ModelSpec:
    config.only(attention_bias=False)
    config.layer_types()  # which do not change the windows
    _refuse_dense_layers(config)
    experts = config.experts("moe_intermediate_size", "mlp", NAMES, config.flag("norm_topk_prob"))
    attention = replace(config.attention(kv_heads=4, qk_norm="head"), window=config.used_window())
    return config.model([(attention, experts)] * config.num_layers)


def _refuse_dense_layers(config: Config) -> None:
    """Refuse a layer without experts; as in transformers, mlp_only_layers can name layers that the model does
    not have."""
    dense, step = config.raw.get("mlp_only_layers") or [], config.count_or("decoder_sparse_step", 1)
    if type(dense) is not list or any(type(layer) is not int for layer in dense):
        raise ValueError(f"mlp_only_layers is {shown(dense)}; it should be a list of layers' numbers")
    layers = range(config.num_layers)
    found = {"mlp_only_layers": any(layer in layers for layer in dense), "decoder_sparse_step": step > 1}
    for key in (key for key, there in found.items() if there):
        raise UnsupportedModelError(
            f"{key} is {shown(config.raw[key])}: some layers have no experts. Only models with experts in"
            " every layer are supported, and another value here would not make this one"
        )
