# SPDX-License-Identifier: Apache-2.0
"""InternLM3: https://huggingface.co/internlm/internlm3-8b-instruct. Llama, whose biases, if there are any,
are in all products."""

from flashinfer_backend.models.hf.config import ANY, Config
from flashinfer_backend.models.spec import ModelSpec


def internlm3(config: Config) -> ModelSpec:
    """Some checkpoints call attention_bias qkv_bias, and mlp_bias bias."""
    config.refuse_unsupported(mlp_bias=ANY)
    bias = {name: config.flag(other, config.flag(name)) for name, other in OTHER_NAMES.items()}
    qkv, mlp = bias["attention_bias"], bias["mlp_bias"]
    attention = config.attention(head_dim=128, bias=qkv)
    return config.model([(attention, config.gated(bias=mlp))] * config.num_layers)


OTHER_NAMES = {"attention_bias": "qkv_bias", "mlp_bias": "bias"}
