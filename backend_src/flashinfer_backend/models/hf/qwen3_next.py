# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next: gated delta nets (https://arxiv.org/abs/2412.06464) in three of four layers, attention with
an output gate (https://arxiv.org/abs/2505.06708) in the others, and experts next to one that all tokens
share."""

from __future__ import annotations

from dataclasses import replace

from flashinfer_backend.core.values import shown
from flashinfer_backend.models.hf.config import ANY, Config, normed, taking_turns
from flashinfer_backend.models.hf.qwen3_moe import NAMES
from flashinfer_backend.models.spec import Experts, FullAttention, Gated, ModelSpec

DRAFTER = "mtp."  # beginning of the names of a head that guesses further tokens


def qwen3_next(config: Config) -> ModelSpec:
    experts = shared_experts(config, config.flag("norm_topk_prob", True))
    return hybrid(config, config.with_dense_layers(experts), kv_heads=2, fused=True)


def shared_experts(config: Config, norm_topk: bool) -> Experts:
    experts = config.experts("moe_intermediate_size", "mlp", NAMES, norm_topk, stack="plain")
    shared, gate = config.shared_expert("shared_expert_intermediate_size", "mlp")
    return replace(experts, shared=shared, shared_gate=gate)


def hybrid(config: Config, mlps: list[Gated], kv_heads: int, fused: bool) -> ModelSpec:
    """A model with these MLPs. Norms multiply by 1 plus their weight, but for those of delta nets. fused: as
    of Config.delta_net."""
    config.refuse_unsupported(partial_rotary_factor=ANY, attention_bias=False, attn_output_gate=True)
    count, every = config.num_layers, config.count_or("full_attention_interval", 4)
    types = config.layer_types("linear_attention") or [
        "linear_attention" if (index + 1) % every else "full_attention" for index in range(count)
    ]
    if len(types) != count or "full_attention" not in types:
        raise ValueError(
            f"layer_types is {shown(types)}; it should name num_hidden_layers, {count}, layers, and one of"
            " them at least full_attention"
        )
    attention = config.attention(kv_heads=kv_heads, head_dim=256, partial=0.25)
    attention = _gated(normed(attention, "head", offset=1.0), config.hidden_size)
    delta_net = config.delta_net(fused)
    mixers = [attention if each == "full_attention" else delta_net for each in types]
    model = config.model(zip(mixers, mlps, strict=True), norm_offset=1.0)
    mtp = None
    if config.raw.get("mtp_num_hidden_layers") in (None, 1):
        (mtp,) = config.model([(attention, mlps[-1])], norm_offset=1.0, place=f"{DRAFTER}layers").layers
    return replace(model, ignored=(*model.ignored, DRAFTER), mtp=mtp)


def _gated(attention: FullAttention, hidden: int) -> FullAttention:
    """The same where q_proj has behind each head's query its gate."""
    (module, *_), keys, values = attention.qkv.sources
    rows = attention.head_dim, attention.head_dim
    queries, gates = taking_turns(module, attention.heads, rows, hidden)
    qkv = replace(attention.qkv, sources=(*gates, *queries, keys, values))
    return replace(attention, qkv=qkv, gated=True)
