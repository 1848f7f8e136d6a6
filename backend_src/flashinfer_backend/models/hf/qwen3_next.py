# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next: gated delta nets (https://arxiv.org/abs/2412.06464) in three of four layers, attention with
an output gate (https://arxiv.org/abs/2505.06708) in the others, and experts next to one that all tokens
share."""

from collections.abc import Sequence
from dataclasses import replace

from flashinfer_backend.core.shard import Part
from flashinfer_backend.core.values import shown
from flashinfer_backend.models.errors import UnsupportedModelError
from flashinfer_backend.models.hf.config import ANY, Config, normed, parts, whole
from flashinfer_backend.models.hf.qwen3_moe import NAMES, with_dense_layers
from flashinfer_backend.models.spec import DeltaNet, Experts, FullAttention, Gated, ModelSpec, Product, Source

DRAFTER = "mtp."  # beginning of the names of a head that guesses further tokens


def qwen3_next(config: Config) -> ModelSpec:
    experts = shared_experts(config, config.flag("norm_topk_prob", True))
    return hybrid(config, with_dense_layers(config, experts), kv_heads=2, fused=True)


def shared_experts(config: Config, norm_topk: bool) -> Experts:
    experts = config.experts("moe_intermediate_size", "mlp", NAMES, norm_topk, stack="plain")
    shared, gate = config.shared_expert("shared_expert_intermediate_size", "mlp")
    return replace(experts, shared=shared, shared_gate=gate)


def hybrid(config: Config, mlps: list[Gated], kv_heads: int, fused: bool) -> ModelSpec:
    """A model with these MLPs. Norms multiply by 1 plus their weight, but for those of delta nets. fused: as
    of _delta_net."""
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
    delta_net = _delta_net(config, fused)
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


def _delta_net(config: Config, fused: bool) -> DeltaNet:
    """Linear attention. fused: one matrix has queries, keys, values and gate, another betas and decays;
    in both, all rows of a key head follow each other."""
    hidden, kernel = config.hidden_size, config.count_or("linear_conv_kernel_dim", 4)
    keys, values = (
        config.count_or(f"linear_num_{name}_heads", n) for name, n in (("key", 16), ("value", 32))
    )
    key_dim, value_dim = (config.count_or(f"linear_{name}_head_dim", 128) for name in ("key", "value"))
    if values % keys:
        raise UnsupportedModelError(
            f"linear_num_value_heads {values} is not a multiple of linear_num_key_heads {keys}"
        )
    share = values // keys
    if fused:
        rows = key_dim, key_dim, share * value_dim, share * value_dim
        qkvz = taking_turns("linear_attn.in_proj_qkvz", keys, rows, hidden)
        ba = taking_turns("linear_attn.in_proj_ba", keys, (share, share), hidden)
        sources = [[source for each in parts for source in each] for parts in (qkvz, ba)]
    else:
        wide = values * value_dim
        own = parts(["linear_attn.in_proj_qkv"] * 3, (keys * key_dim, keys * key_dim, wide), hidden)
        sources = [
            [*own, whole("linear_attn.in_proj_z", wide, hidden)],
            [whole(f"linear_attn.in_proj_{name}", values, hidden) for name in "ba"],
        ]
    first, second = (tuple(each) for each in sources)
    return DeltaNet(
        keys, values, key_dim, value_dim, kernel, Product("qkvz", first, "rows", "qkv"),
        Product("ba", second, "rows", "ba"),
        Product("o", (whole("linear_attn.out_proj", hidden, values * value_dim),), "columns", "o"),
    )  # fmt: skip


def taking_turns(module: str, turns: int, rows: Sequence[int], columns: int) -> list[list[Source]]:
    """The sources of each part of a matrix in which parts of `rows` rows alternate `turns` times."""
    found: list[list[Source]] = [[] for _ in rows]
    whole, start = (turns * sum(rows), columns), 0
    for turn in range(turns):
        for part, count in enumerate(rows):
            own = slice(start, start := start + count)
            found[part].append(Source(module, Part(whole, own, slice(0, columns)), turn=(turn, turns)))
    return found
