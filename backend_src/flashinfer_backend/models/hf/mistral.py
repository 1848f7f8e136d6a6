# SPDX-License-Identifier: Apache-2.0
"""Mistral 7B and its relatives: https://arxiv.org/abs/2310.06825. Llama with a window in every layer."""

from dataclasses import replace

from flashinfer_backend.models.hf.config import Config
from flashinfer_backend.models.spec import ModelSpec


def mistral(config: Config) -> ModelSpec:
    config.refuse_unsupported(attention_bias=False)
    config.layer_types()  # which do not change the windows
    attention, mlp = replace(config.attention(kv_heads=8), window=config.window()), config.gated()
    return config.model([(attention, mlp)] * config.num_layers)
