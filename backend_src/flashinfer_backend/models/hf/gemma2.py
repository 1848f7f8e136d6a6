# SPDX-License-Identifier: Apache-2.0
"""Gemma 2: https://arxiv.org/abs/2408.00118. Gemma 3 with soft caps in place of the norms of queries and
keys, and a window in every other layer."""

from dataclasses import replace

from flashinfer_backend.models.hf.config import ANY, Config
from flashinfer_backend.models.hf.gemma3 import NORMS
from flashinfer_backend.models.spec import ModelSpec


def gemma2(config: Config) -> ModelSpec:
    config.refuse_unsupported(
        hidden_act=ANY, hidden_activation="gelu_pytorch_tanh", use_bidirectional_attention=False
    )
    bias, mlp, window = config.flag("attention_bias"), config.gated("gelu_tanh"), config.window()
    attention = replace(
        config.attention(kv_heads=4, head_dim=256, bias=bias),
        scale=(config.number("query_pre_attn_scalar") or 256) ** -0.5,
        soft_cap=_capped(config, "attn_logit_softcapping", 50.0),
    )
    layers = [(replace(attention, window=own), mlp) for own in config.windows(window, every=2)]
    model = config.model(layers, norms=NORMS, norm_offset=1.0, tied=True)
    return replace(
        model,
        embedding_scale=config.hidden_size**0.5,
        logits_soft_cap=_capped(config, "final_logit_softcapping", 30.0),
    )


def _capped(config: Config, key: str, otherwise: float) -> float | None:
    """A soft cap; null is none."""
    return config.number(key) if key in config.raw else otherwise
