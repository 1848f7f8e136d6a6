# SPDX-License-Identifier: Apache-2.0
"""Apertus: https://arxiv.org/abs/2509.14233. Llama with a norm of each head's queries and keys, and an MLP
without a gate, whose activation has numbers of each layer (xIELU: https://arxiv.org/abs/2411.13010)."""

from flashinfer_backend.models.hf.config import ORIGINAL, Config, normed
from flashinfer_backend.models.spec import ModelSpec

THETA = 12e6
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": THETA,
    "factor": 8.0,
    ORIGINAL: 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
NORMS = {"input_norm": "attention_layernorm", "post_norm": "feedforward_layernorm"}


def apertus(config: Config) -> ModelSpec:
    config.refuse_unsupported(hidden_act="xielu")
    if config.raw.get("rope_scaling") is None and config.raw.get("rope_parameters") is None:
        config = config.changed(rope_parameters=LLAMA3)
    attention = normed(config.attention(theta=THETA, bias=config.flag("attention_bias")), "head")
    mlp = config.gated("xielu", gate=False)
    return config.model([(attention, mlp)] * config.num_layers, NORMS)
