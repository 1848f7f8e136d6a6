# SPDX-License-Identifier: Apache-2.0
"""Gemma 3's text models: https://arxiv.org/abs/2503.19786. Norms around attention and MLP, windows in five of
six layers, a rotary embedding for each kind of layer, an MLP gated by GELU."""

from dataclasses import replace
from typing import Any

from flashinfer_backend.models.errors import UnsupportedModelError
from flashinfer_backend.models.hf.config import ANY, Config, normed
from flashinfer_backend.models.spec import ModelSpec

NORMS = {
    "input_norm": "input_layernorm",
    "mixer_norm": "post_attention_layernorm",
    "post_norm": "pre_feedforward_layernorm",
    "mlp_norm": "post_feedforward_layernorm",
}
KINDS = {True: "sliding_attention", False: "full_attention"}


def gemma3_text(config: Config) -> ModelSpec:
    """Norms multiply by 1 plus their weight, embeddings by the root of their length."""
    config.refuse_unsupported(
        hidden_act=ANY,
        hidden_activation="gelu_pytorch_tanh",
        use_bidirectional_attention=False,
        attn_logit_softcapping=None,
    )
    bias, mlp = config.flag("attention_bias"), config.gated("gelu_tanh")
    windows = config.windows(config.window(), every=config.count_or("sliding_window_pattern", 6))
    ropes = ropes_by_kind(config)
    kinds = {
        name: normed(
            config.attention(kv_heads=4, head_dim=256, theta=theta, rope=ropes[name], bias=bias),
            "head",
            offset=1.0,
        )
        for name, theta in {"sliding_attention": 1e4, "full_attention": 1e6}.items()
    }
    scale = (config.number("query_pre_attn_scalar") or 256) ** -0.5
    layers = [(replace(kinds[KINDS[own is not None]], window=own, scale=scale), mlp) for own in windows]
    model = config.model(layers, norms=NORMS, norm_offset=1.0, tied=True)
    return replace(
        model,
        embedding_scale=config.hidden_size**0.5,
        logits_soft_cap=config.number("final_logit_softcapping"),
    )


def ropes_by_kind(config: Config) -> dict[str, dict[str, Any]]:
    """The rotary embedding's keys of layers with a window and without: those of rope_parameters, or of
    the older rope_scaling and rope_theta for those without, and rope_local_base_freq for the others."""
    given, older = config.raw.get("rope_parameters") or {}, config.raw.get("rope_scaling") or {}
    found = {kind: dict(given.get(kind) or {}) for kind in ("sliding_attention", "full_attention")}
    if other := given.keys() - found.keys():
        raise UnsupportedModelError(
            f"rope_parameters has {', '.join(sorted(other))}, which is not supported; supported: keys of"
            f" {' and '.join(found)}"
        )
    found["full_attention"] |= older
    thetas = {"sliding_attention": "rope_local_base_freq", "full_attention": "rope_theta"}
    for kind, key in thetas.items():
        if found[kind].get("rope_theta") is None:
            found[kind]["rope_theta"] = config.raw.get(key)
    return found
