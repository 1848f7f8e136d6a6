# SPDX-License-Identifier: Apache-2.0
"""ERNIE 4.5, the dense models: https://ernie.baidu.com/blog/publication/ERNIE_Technical_Report.pdf. Llama,
whose rotary embedding pairs neighbours."""

from flashinfer_backend.models.hf.config import Config, interleaved
from flashinfer_backend.models.spec import ModelSpec


def ernie4_5(config: Config) -> ModelSpec:
    config.refuse_unsupported(attention_bias=False)
    bias = config.flag("use_bias")
    attention = interleaved(config.attention(kv_heads=2, head_dim=128, theta=5e5, bias=bias))
    return config.model([(attention, config.gated(bias=bias))] * config.num_layers, tied=True)
