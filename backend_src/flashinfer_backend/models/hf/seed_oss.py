# SPDX-License-Identifier: Apache-2.0
"""Seed-OSS: https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct. Llama with a bias of queries, keys
and values, and in some checkpoints of what attention adds."""

from flashinfer_backend.models.hf.config import Config
from flashinfer_backend.models.spec import ModelSpec


def seed_oss(config: Config) -> ModelSpec:
    config.refuse_unsupported()
    bias, o_bias = config.flag("attention_bias", True), config.flag("attention_out_bias")
    attention = config.attention(kv_heads=8, head_dim=128, bias=bias, o_bias=o_bias)
    return config.model([(attention, config.gated())] * config.num_layers)
