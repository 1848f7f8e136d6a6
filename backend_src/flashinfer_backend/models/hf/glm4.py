# SPDX-License-Identifier: Apache-2.0
"""GLM-4-0414, the dense models: https://arxiv.org/abs/2406.12793. Norms around attention and MLP, a rotary
embedding of neighbours in half of each head, and one matrix of the gate and the up projection."""

from dataclasses import replace

from flashinfer_backend.models.hf.config import ANY, Config, fused, interleaved
from flashinfer_backend.models.spec import ModelSpec

NORMS = {
    "input_norm": "input_layernorm",
    "mixer_norm": "post_self_attn_layernorm",
    "post_norm": "post_attention_layernorm",
    "mlp_norm": "post_mlp_layernorm",
}


def glm4(config: Config) -> ModelSpec:
    config.refuse_unsupported(partial_rotary_factor=ANY)
    bias, mlp = config.flag("attention_bias", True), config.gated()
    attention = config.attention(kv_heads=2, head_dim=128, partial=0.5, bias=bias, o_bias=False)
    layer = interleaved(attention), replace(mlp, gate_up=fused(mlp.gate_up, "mlp.gate_up_proj"))
    return config.model([layer] * config.num_layers, norms=NORMS)
