# SPDX-License-Identifier: Apache-2.0
"""Qwen3's mixtures of experts: https://arxiv.org/abs/2505.09388. Qwen3 with experts in place of MLPs."""

from dataclasses import replace

from flashinfer_backend.core.values import shown
from flashinfer_backend.models.hf.config import Config, normed
from flashinfer_backend.models.hf.qwen2 import used_window
from flashinfer_backend.models.spec import Experts, Gated, ModelSpec

NAMES = "gate_proj", "up_proj", "down_proj"


def qwen3_moe(config: Config) -> ModelSpec:
    config.refuse_unsupported(attention_bias=False)
    config.layer_types()  # which do not change the windows
    experts = config.experts(
        "moe_intermediate_size",
        "mlp",
        NAMES,
        config.flag("norm_topk_prob"),
        stack="transposed" if config.aliases else "",  # Qwen3-VL's
    )
    attention = replace(normed(config.attention(kv_heads=4), "head"), window=used_window(config))
    return config.model([(attention, mlp) for mlp in with_dense_layers(config, experts)])


def with_dense_layers(config: Config, experts: Experts) -> list[Gated]:
    """Each layer's MLP: the experts, or another where mlp_only_layers names the layer (as in
    transformers, it can name layers that the model does not have) or decoder_sparse_step leaves it
    out."""
    dense, step = config.raw.get("mlp_only_layers") or [], config.count_or("decoder_sparse_step", 1)
    if type(dense) is not list or any(type(layer) is not int for layer in dense):
        raise ValueError(f"mlp_only_layers is {shown(dense)}; it should be a list of layers' numbers")
    sparse = [index not in dense and (index + 1) % step == 0 for index in range(config.num_layers)]
    return [experts if each else config.gated() for each in sparse]
