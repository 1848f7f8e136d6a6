# SPDX-License-Identifier: Apache-2.0
"""Hunyuan's dense models: https://huggingface.co/tencent/Hunyuan-7B-Instruct. Llama with norms of each head's
queries and keys behind the rotary embedding."""

from flashinfer_backend.models.hf.config import Config, normed
from flashinfer_backend.models.spec import ModelSpec


def hunyuan_v1_dense(config: Config) -> ModelSpec:
    """With an `alpha`, its rope type "dynamic" is NTK's: a theta that does not depend on the length."""
    config.refuse_unsupported()
    bias = config.flag("attention_bias")
    attention = normed(config.attention(bias=bias), "rotated", ("query_layernorm", "key_layernorm"))
    return config.model([(attention, config.gated())] * config.num_layers)
