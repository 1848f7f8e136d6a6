# SPDX-License-Identifier: Apache-2.0
"""IQuest-Coder: https://huggingface.co/IQuestLab/IQuest-Coder-V1-40B-Instruct. Llama with other
sizes."""

from flashinfer_backend.models.hf.config import ANY, Config
from flashinfer_backend.models.spec import ModelSpec


def iquestcoder(config: Config) -> ModelSpec:
    config.refuse_unsupported(mlp_bias=ANY, clip_qkv=None, use_sliding_window=False)
    bias, mlp = config.flag("attention_bias"), config.gated(bias=config.flag("mlp_bias"))
    attention = config.attention(kv_heads=8, head_dim=128, bias=bias)
    return config.model([(attention, mlp)] * config.num_layers)
