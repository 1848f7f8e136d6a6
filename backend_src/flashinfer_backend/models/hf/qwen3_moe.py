# SPDX-License-Identifier: Apache-2.0
"""Qwen3's mixtures of experts: https://arxiv.org/abs/2505.09388. Qwen3 with experts in place of MLPs."""

from __future__ import annotations

from dataclasses import replace

from flashinfer_backend.models.hf.config import Config, normed
from flashinfer_backend.models.spec import ModelSpec

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
    attention = replace(normed(config.attention(kv_heads=4), "head"), window=config.used_window())
    return config.model([(attention, mlp) for mlp in config.with_dense_layers(experts)])
