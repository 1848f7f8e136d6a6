# SPDX-License-Identifier: Apache-2.0
"""Mixtral: https://arxiv.org/abs/2401.04088. Mistral with experts, two of eight a token."""

from dataclasses import replace

from flashinfer_backend.models.hf.config import Config
from flashinfer_backend.models.spec import ModelSpec


def mixtral(config: Config) -> ModelSpec:
    """The weights of a token's experts always add up to 1."""
    config.refuse_unsupported(attention_bias=False)
    config.layer_types()  # which do not change the windows
    experts = config.experts("intermediate_size", "block_sparse_moe", ("w1", "w3", "w2"), norm_topk=True)
    attention = replace(config.attention(kv_heads=8, theta=1e6), window=config.window(otherwise=None))
    return config.model([(attention, experts)] * config.num_layers)
