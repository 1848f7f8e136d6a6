# SPDX-License-Identifier: Apache-2.0
"""Phi-3 and Phi-4: https://arxiv.org/abs/2404.14219, https://arxiv.org/abs/2412.08905. Llama with one matrix
of queries, keys and values, and one of the gate and the up projection."""

from dataclasses import replace

from flashinfer_backend.models.hf.config import ANY, Config, fused
from flashinfer_backend.models.spec import ModelSpec


def phi3(config: Config) -> ModelSpec:
    """transformers takes its rope types "su" and "yarn", names of before, for "longrope"."""
    config.refuse_unsupported(partial_rotary_factor=ANY, attention_bias=False)
    keys = config.rope_keys()
    if keys.get("rope_type", keys.get("type")) in ("su", "yarn"):
        config = config.changed(rope_scaling=keys | {"rope_type": "longrope"})
    attention, mlp = config.attention(partial=1.0), config.gated()
    qkv = fused(attention.qkv, "self_attn.qkv_proj")
    attention = replace(attention, qkv=qkv, window=config.window(otherwise=None))
    mlp = replace(mlp, gate_up=fused(mlp.gate_up, "mlp.gate_up_proj"))
    return config.model([(attention, mlp)] * config.num_layers)
