# SPDX-License-Identifier: Apache-2.0
"""Arcee's AFM: https://huggingface.co/arcee-ai/AFM-4.5B. Llama with an MLP without a gate, whose activation
is the square of ReLU: https://arxiv.org/abs/2109.08668."""

from flashinfer_backend.models.hf.config import ANY, Config
from flashinfer_backend.models.spec import ModelSpec


def arcee(config: Config) -> ModelSpec:
    config.refuse_unsupported(mlp_bias=ANY, hidden_act="relu2")
    attention = config.attention(bias=config.flag("attention_bias"))
    mlp = config.gated("relu2", bias=config.flag("mlp_bias"), gate=False)
    return config.model([(attention, mlp)] * config.num_layers)
