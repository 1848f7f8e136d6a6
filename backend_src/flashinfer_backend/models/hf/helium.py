# SPDX-License-Identifier: Apache-2.0
"""Helium 1: https://huggingface.co/kyutai/helium-1-2b. Llama, whose rotary embedding pairs neighbours."""

from flashinfer_backend.models.hf.config import ANY, Config, interleaved
from flashinfer_backend.models.spec import ModelSpec


def helium(config: Config) -> ModelSpec:
    config.refuse_unsupported(mlp_bias=ANY)
    bias = config.flag("attention_bias")
    attention = config.attention(kv_heads=20, head_dim=128, theta=1e5, bias=bias, o_bias=False)
    return config.model(
        [(interleaved(attention), config.gated(bias=config.flag("mlp_bias")))] * config.num_layers
    )
