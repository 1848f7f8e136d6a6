# SPDX-License-Identifier: Apache-2.0
"""GLM-4-0414, the dense models: https://arxiv.org/abs/2406.12793. Norms around attention and MLP, a rotary
embedding of neighbours in half of each head, and one matrix of the gate and the up projection."""

from __future__ import annotations

from flashinfer_backend.models.hf.config import ANY, Config
from flashinfer_backend.models.spec import ModelSpec

NORMS = {
    "input_norm": "input_layernorm",
    "mixer_norm": "post_self_attn_layernorm",
    "post_norm": "post_attention_layernorm",
    "mlp_norm": "post_mlp_layernorm",
}


def glm4(config: Config) -> ModelSpec:
    config.refuse_unsupported(partial_rotary_factor=ANY)
    attention = config.attention(
        kv_heads=2, head_dim=128, bias=config.flag("attention_bias", True), neighbours=True, partial=0.5
    )
    mlp = config.gated(fused="gate_up_proj")
    return config.model([(attention, mlp)] * config.num_layers, norms=NORMS)
