# SPDX-License-Identifier: Apache-2.0
"""MPT: https://www.databricks.com/blog/mpt-7b. No biases, no positions but attention's (ALiBi), LayerNorms,
and an MLP without a gate."""

import math
from dataclasses import replace
from typing import Any

from flashinfer_backend.models.errors import UnsupportedModelError
from flashinfer_backend.models.hf.config import Config, fused
from flashinfer_backend.models.spec import ModelSpec, Product

STEEPEST = 8  # minus the exponent of 2 in the last slope
NAMES = {
    "num_attention_heads": "n_heads",
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "max_position_embeddings": "max_seq_len",
}
MODULES = {
    "self_attn.o_proj": "attn.out_proj",
    "mlp.up_proj": "ffn.up_proj",
    "mlp.down_proj": "ffn.down_proj",
}
ALIASES = (
    ("transformer.wte.", "model.embed_tokens."),
    ("transformer.blocks.", "model.layers."),
    ("transformer.norm_f.", "model.norm."),
)
# What transformers computes, whatever the keys say, or what they have to say.
ONLY = {"expansion_ratio": 4, "no_bias": True, "logit_scale": None, "norm_type": "low_precision_layernorm"}
ONLY_ATTENTION = {
    "attn_type": "multihead_attention",
    "alibi": True,
    "alibi_bias_max": 8,
    "qk_ln": False,
    "prefix_lm": False,
    "attn_uses_sequence_id": False,
    "clip_qkv": None,
    "qk_gn": False,
    "kv_n_heads": None,
    "rope": False,
    "sliding_window_size": -1,
}


def mpt(config: Config) -> ModelSpec:
    given = config.raw.get("attn_config") or {}
    config.changed(**_within(given)).refuse_unsupported(**ONLY, **_within(ONLY_ATTENTION))
    config = config.changed(**{ours: config.count(theirs) for ours, theirs in NAMES.items()})
    heads, hidden = config.count("num_attention_heads"), config.hidden_size
    if hidden % heads:
        raise UnsupportedModelError(f"d_model {hidden} is not a multiple of n_heads {heads}")
    config = config.changed(
        rms_norm_eps=config.number("layer_norm_epsilon", 1e-5),
        intermediate_size=4 * hidden,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        softmax_scale=given.get("softmax_scale"),
    )
    attention = config.attention()
    attention = replace(
        attention,
        rope=None,
        qkv=fused(attention.qkv, "attn.Wqkv"),
        o=_named(attention.o),
        scale=config.number("softmax_scale"),
        variant="alibi",
        by_head=slopes(heads),
    )
    mlp = config.gated("gelu", gate=False).map(_named)
    norms = {"input_norm": "norm_1", "post_norm": "norm_2"}
    model = config.model([(attention, mlp)] * config.num_layers, norms, tied=True, centred=True)
    return replace(model, aliases=ALIASES)


def slopes(heads: int) -> tuple[float, ...]:
    """ALiBi's slope of each head as in MPT's own code: the slopes of the next power of two, every second
    first."""
    count = 2 ** math.ceil(math.log2(heads))
    every = [2 ** (-STEEPEST * (index + 1) / count) for index in range(count)]
    return tuple(every if count == heads else [*every[1::2], *every[::2]][:heads])


def _within(keys: dict[str, Any]) -> dict[str, Any]:
    return {f"attn_config.{key}": value for key, value in keys.items()}


def _named(product: Product) -> Product:
    sources = [source._replace(module=MODULES[source.module]) for source in product.sources]
    return replace(product, sources=tuple(sources))
