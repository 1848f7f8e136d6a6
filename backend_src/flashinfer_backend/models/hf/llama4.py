# SPDX-License-Identifier: Apache-2.0
"""Llama 4, text: https://ai.meta.com/blog/llama-4-multimodal-intelligence. Attention in chunks, with queries
and keys normed behind the rotation; in every fourth layer over all tokens, without rotation, with queries
that grow with their position; one expert for a token, and one that all tokens share."""

from dataclasses import replace

from flashinfer_backend.core.values import shown
from flashinfer_backend.models.errors import UnsupportedModelError
from flashinfer_backend.models.hf.config import ANY, Config, interleaved
from flashinfer_backend.models.hf.qwen3_moe import NAMES
from flashinfer_backend.models.hf.smollm3 import rotated_layers
from flashinfer_backend.models.spec import FullAttention, Gated, ModelSpec, Norm

BLOCK, CHUNK = "feed_forward", "attention_chunk_size"


def llama4_text(config: Config) -> ModelSpec:
    config.refuse_unsupported(attention_chunk_size=ANY)
    return config.model(zip(_attentions(config), _mlps(config), strict=True))


def _attentions(config: Config) -> list[FullAttention]:
    bias, rotated = config.flag("attention_bias"), rotated_layers(config)
    given = interleaved(config.attention(kv_heads=8, head_dim=128, theta=5e5, bias=bias))
    rope = given
    if config.flag("use_qk_norm", True):
        norms = tuple(Norm(name, "", given.head_dim) for name in ("q_norm", "k_norm"))
        rope = replace(given, qk_norm="rotated", norms=norms)
    plain = replace(given, rope=None)
    if config.flag("attn_temperature_tuning", True):
        beta, every = config.number("attn_scale", 0.1) or 0.0, config.count_or("floor_scale", 8192)
        plain = replace(plain, query_scaling=(beta, every, 1))
    types = config.layer_types("chunked_attention") or [
        "chunked_attention" if each else "full_attention" for each in rotated
    ]
    if len(types) != len(rotated):
        raise ValueError(f"layer_types names {len(types)} layers; it should name {len(rotated)}")
    chunk = config.changed(**{CHUNK: config.raw.get(CHUNK, 8192)}).count(CHUNK)
    lengths = (float(chunk),) * given.heads
    found = [rope if each else plain for each in rotated]
    return [
        replace(own, variant="chunked", variant_beyond=chunk, by_head=lengths)
        if kind == "chunked_attention"
        else own
        for own, kind in zip(found, types, strict=True)
    ]


def _mlps(config: Config) -> list[Gated]:
    experts = config.experts(
        "intermediate_size", BLOCK, NAMES, norm_topk=True, stack="transposed", router="router"
    )
    if experts.per_token != 1:
        raise UnsupportedModelError(
            f"num_experts_per_tok {experts.per_token} is not supported for Llama 4; supported: 1"
        )
    shared, _ = config.shared_expert("intermediate_size", BLOCK)
    experts = replace(experts, shared=shared, scaled_input=True)
    dense = config.gated(size_key="intermediate_size_mlp", block=BLOCK)
    step, layers = config.count_or("interleave_moe_layer_step", 1), config.raw.get("moe_layers")
    if layers is None:
        layers = range(step - 1, config.num_layers, step)
    elif type(layers) is not list or any(type(layer) is not int for layer in layers):
        raise ValueError(f"moe_layers is {shown(layers)}; it should be a list of layers' numbers")
    return [experts if index in layers else dense for index in range(config.num_layers)]
