# SPDX-License-Identifier: Apache-2.0
"""Granite 3, the dense models: https://arxiv.org/abs/2405.04324. Llama with multipliers of the embedding, of
scores, of what layers add and of logits."""

from dataclasses import replace

from flashinfer_backend.models.hf.config import ANY, Config
from flashinfer_backend.models.spec import ModelSpec


def granite(config: Config) -> ModelSpec:
    config.refuse_unsupported(mlp_bias=ANY)

    def multiplier(key: str) -> float:
        return config.number(key) or 1.0

    bias = config.flag("attention_bias")
    attention = replace(config.attention(bias=bias), scale=multiplier("attention_multiplier"))
    model = config.model(
        [(attention, config.gated(bias=config.flag("mlp_bias")))] * config.num_layers,
        final_scale=1 / multiplier("logits_scaling"),
        residual_scale=multiplier("residual_multiplier"),
    )
    return replace(model, embedding_scale=multiplier("embedding_multiplier"))
