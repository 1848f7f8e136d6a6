# SPDX-License-Identifier: Apache-2.0
"""Qwen1.5's and Qwen2's mixtures of experts: https://arxiv.org/abs/2407.10671. Qwen2 with experts, and next
to them an MLP of every token, whose gate is a sigmoid."""

from dataclasses import replace

from flashinfer_backend.models.hf.config import Config
from flashinfer_backend.models.hf.qwen2 import FULL_LAYERS, used_window
from flashinfer_backend.models.hf.qwen3_moe import NAMES, with_dense_layers
from flashinfer_backend.models.spec import ModelSpec


def qwen2_moe(config: Config) -> ModelSpec:
    """Without layer_types, every other one of the first layers has the window."""
    config.refuse_unsupported()
    experts = config.experts("moe_intermediate_size", "mlp", NAMES, config.flag("norm_topk_prob"))
    shared, gate = config.shared_expert("shared_expert_intermediate_size", "mlp")
    mlps = with_dense_layers(config, replace(experts, shared=shared, shared_gate=gate))
    attention = config.attention(kv_heads=16, bias=config.flag("qkv_bias", True), o_bias=False)
    window, before = used_window(config), config.raw.get("max_window_layers", FULL_LAYERS)
    windows = (
        config.windows(window)
        if config.layer_types()
        else [None if index % 2 or index >= before else window for index in range(config.num_layers)]
    )
    own = zip(windows, mlps, strict=True)
    return config.model([(replace(attention, window=window), mlp) for window, mlp in own])
