# SPDX-License-Identifier: Apache-2.0
"""config.json's keys, checked, and the parts of a spec that families share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

from flashinfer_backend.core.checkpoint_json import Kind, check_kinds
from flashinfer_backend.core.shard import Part
from flashinfer_backend.core.values import INT32_MAX, shown
from flashinfer_backend.models.errors import UnsupportedModelError
from flashinfer_backend.models.hf.multimodal import ALIASES, IGNORED, text_part
from flashinfer_backend.models.quantization import read_quantization
from flashinfer_backend.models.spec import (
    Activation,
    Experts,
    FullAttention,
    Gated,
    LayerSpec,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    Mixer,
    ModelSpec,
    Norm,
    Product,
    Rope,
    Source,
    Stack,
    YarnScaling,
)

ROPE_TYPES = ("default", "linear", "llama3", "dynamic", "yarn", "longrope")
ORIGINAL = "original_max_position_embeddings"
DTYPES = ("float32", "bfloat16", "float16")
ROPE_THETA = 10000.0  # where config.json names none
KINDS: dict[str, Kind] = {
    "architectures": "texts", "model_type": "text", "dtype": "text", "torch_dtype": "text",
    "rope_scaling": "object", "rope_parameters": "object", "rope_theta": "number", "rms_norm_eps": "number",
    "initializer_range": "number", "tie_word_embeddings": "flag", "use_sliding_window": "flag",
    "layer_types": "texts", "max_window_layers": "integer", "bos_token_id": "integer", "eos_token_id": "ids",
    "norm_topk_prob": "flag",
}  # fmt: skip
ROPE_KINDS: dict[str, Kind] = {
    "rope_theta": "number", "factor": "number", "low_freq_factor": "number", "high_freq_factor": "number",
    "original_max_position_embeddings": "integer", "type": "text", "rope_type": "text",
    "attention_factor": "number", "beta_fast": "number", "beta_slow": "number", "mscale": "number",
    "mscale_all_dim": "number", "truncate": "flag", "partial_rotary_factor": "number", "alpha": "number",
}  # fmt: skip
ANY: Any = object()  # of Config.refuse_unsupported
# Keys that change what every family computes, each with the one value that is implemented.
IMPLEMENTED: dict[str, Any] = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "is_causal": True,  # false in some models that embed texts
}
# Keys of any model_type by which transformers computes something else: their values that change nothing, and
# what would be right.
NOT_HONOURED: dict[str, tuple[tuple[Any, ...], str]] = {
    "transformers_weights": (
        ("model.safetensors",),
        "weights are read from model.safetensors, or from the files that model.safetensors.index.json names;"
        " give the file that is meant one of these names, and take the key out",
    ),
    "attention_chunk_size": ((), "every token attends to all before it"),
    "per_layer_config": (({},), "all layers have the same sizes and options"),
    "kv_sharing_modes": ((), "every layer has keys and values of its own"),
}
# Norms of a layer, and the modules that have their weights.
PRE_NORMS = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}
OUTER_NORMS = {"mixer_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"}
# The window where a family has one and config.json does not say how long; a sliding_window of null is none.
WINDOW = 4096


class Config:
    """One checkpoint's config.json (`raw`), generation_config.json and hf_quant_config.json, and the ids that
    end a text by its tokenizer. Methods raise ValueError for wrong values, UnsupportedModelError for what is
    not computed, and KeyError for a key that is missing."""

    def __init__(
        self,
        raw: dict[str, Any],
        generation: dict[str, Any],
        hf_quant: dict[str, Any],
        end_ids: Sequence[int] = (),
    ) -> None:
        raw, part = text_part(raw)
        check_kinds(raw, KINDS)
        self.raw, self._end_ids = raw, end_ids
        self.aliases = ALIASES if part else ()
        self.ignored = IGNORED if part else ()
        self._generation, self._hf_quant = generation, hf_quant

    def changed(self, **keys: Any) -> Config:
        """The same with other values in config.json."""
        other = Config(self.raw | keys, self._generation, self._hf_quant, self._end_ids)
        other.aliases, other.ignored = self.aliases, self.ignored
        return other

    def refuse_unsupported(self, **supported: Any) -> None:
        """Raise UnsupportedModelError for a key with another value than the one that is given here, or in
        IMPLEMENTED or NOT_HONOURED where it is not given. A key that is missing or null passes; so does every
        value of one that is given as ANY, as the family reads it or transformers ignores it there."""
        for key, value in (IMPLEMENTED | supported).items():
            found = self.raw.get(key)
            if value is not ANY and found is not None and found != value:
                raise UnsupportedModelError(
                    f"{key} {shown(found)} is not supported; supported: {shown(value)} or absent"
                )
        for key, (harmless, instead) in NOT_HONOURED.items():
            if supported.get(key) is not ANY and self.raw.get(key) not in (None, *harmless):
                raise UnsupportedModelError(
                    f"{key} is {shown(self.raw[key])}, which is not supported: {instead}"
                )

    def count(self, key: str) -> int:
        """A number of things. Raises KeyError without it."""
        value = self.raw[key]
        if type(value) is not int or not 1 <= value <= INT32_MAX:
            raise ValueError(f"{key} is {shown(value)}; it should be an integer of at least 1, in 31 bits")
        return value

    def count_or(self, key: str, otherwise: int) -> int:
        """The same; `otherwise` where the key is not there or is null."""
        return otherwise if self.raw.get(key) is None else self.count(key)

    def flag(self, key: str, otherwise: bool = False) -> bool:
        """`otherwise` where it is not there."""
        return bool(self.raw.get(key, otherwise))

    def number(self, key: str, otherwise: float | None = None) -> float | None:
        """A number greater than 0; `otherwise` where the key is not there or is null."""
        value = self.raw.get(key)
        if value is None:
            return otherwise
        if not _positive(value):
            raise ValueError(f"{key} is {shown(value)}; it should be a number greater than 0")
        return float(value)

    @property
    def num_layers(self) -> int:
        return self.count("num_hidden_layers")

    @property
    def hidden_size(self) -> int:
        return self.count("hidden_size")

    def attention(
        self,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        theta: float = ROPE_THETA,
        partial: float | None = None,
        rope: dict[str, Any] | None = None,
        bias: bool = False,
        o_bias: bool | None = None,
    ) -> FullAttention:
        """Llama's attention of a layer, without a window; `normed`, `interleaved`, `fused` and
        FullAttention's own fields make other ones of it. kv_heads (default: as many as heads), head_dim
        (default: hidden_size over heads), theta and partial, the part of a head that is rotated, are what
        transformers takes where the keys are missing. rope: the rotary embedding's keys (default: those of
        config.json). bias: of queries, keys and values. o_bias: of their result's product (default: as bias).
        """
        hidden, heads = self.hidden_size, self.count("num_attention_heads")
        if kv_heads is None or "num_key_value_heads" in self.raw:
            kv_heads = self.count_or("num_key_value_heads", heads)
        if head_dim is None or "head_dim" in self.raw:
            head_dim = self.count_or("head_dim", hidden // heads)
        if heads % kv_heads:
            raise UnsupportedModelError(
                f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )
        if head_dim % 2:
            raise UnsupportedModelError(f"head_dim {head_dim} is odd; rotary embedding pairs its halves")
        counts = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
        qkv = tuple(whole(f"self_attn.{name}", n * head_dim, hidden) for name, n in counts.items())
        o = whole("self_attn.o_proj", hidden, heads * head_dim)
        return FullAttention(
            heads, kv_heads, head_dim,
            self.rope(head_dim, theta, partial) if rope is None else self.rope_of(rope, head_dim, theta),
            Product("qkv", qkv, "rows", "qkv", grain=head_dim, bias=bias),
            Product("o", (o,), "columns", "o", bias=bias if o_bias is None else o_bias),
        )  # fmt: skip

    def gated(
        self,
        activation: Activation = "silu",
        bias: bool = False,
        gate: bool = True,
        size_key: str = "intermediate_size",
        block: str = "mlp",
    ) -> Gated:
        """An MLP as Llama's. gate: whether it has one. block: the module that has it."""
        mlp = self._gated(size_key, [block], ("gate_proj", "up_proj", "down_proj"))
        gate_up, down = replace(mlp.gate_up, bias=bias), replace(mlp.down, bias=bias)
        if not gate:
            gate_up = replace(gate_up, sources=gate_up.sources[1:], role="qkv")
        return replace(mlp, gate_up=gate_up, down=down, activation=activation)

    def experts(
        self,
        size_key: str,
        block: str,
        names: tuple[str, str, str],
        norm_topk: bool,
        stack: Literal["", "plain", "transposed"] = "",
        router: str = "gate",
    ) -> Experts:
        """block: the module that has the router and the experts. names: of an expert's gate, up and down.
        stack: some checkpoints have all experts in one tensor (spec.Stack), of matrices as they are or
        transposed."""
        count, per_token = self.expert_counts()
        mlps = self._gated(size_key, [f"{block}.experts.{index}" for index in range(count)], names, count)
        if stack:
            mlps = mlps.map(
                lambda product: replace(
                    product, stack=Stack(f"{block}.experts.{product.name}_proj", stack == "transposed")
                )
            )
        chosen_by = Product("router", (whole(f"{block}.{router}", count, self.hidden_size),), None, "")
        return Experts(mlps.size, size_key, mlps.gate_up, mlps.down, chosen_by, count, per_token, norm_topk)

    def shared_expert(self, size_key: str, block: str) -> tuple[Gated, Product]:
        """An MLP that all tokens share, and its gate. block: the module that has them."""
        names = "gate_proj", "up_proj", "down_proj"
        mlp = self._gated(size_key, [f"{block}.shared_expert"], names)
        gate_up, down = replace(mlp.gate_up, name="shared_gate_up"), replace(mlp.down, name="shared_down")
        gate = Product("shared_gate", (whole(f"{block}.shared_expert_gate", 1, self.hidden_size),), None, "")
        return replace(mlp, gate_up=gate_up, down=down), gate

    def expert_counts(self) -> tuple[int, int]:
        """How many experts there are, and how many a token has."""
        keys = "num_experts", "num_local_experts"
        found = {key: self.raw[key] for key in keys if self.raw.get(key) is not None}
        if len(found) > 1 and found["num_experts"] != found["num_local_experts"]:
            raise ValueError("num_experts and num_local_experts differ; they are two names of one number")
        if not found:
            raise ValueError("it has neither num_experts nor num_local_experts")
        count, per_token = self.count(next(iter(found))), self.count("num_experts_per_tok")
        if per_token > count:
            raise ValueError(
                f"num_experts_per_tok is {per_token}; it should be at most the number of experts, {count}"
            )
        return count, per_token

    def _gated(
        self, size_key: str, mlps: Sequence[str], names: tuple[str, str, str], experts: int = 0
    ) -> Gated:
        size, hidden, (gate, up, down) = self.count(size_key), self.hidden_size, names
        gate_up = tuple(whole(f"{mlp}.{name}", size, hidden) for mlp in mlps for name in (gate, up))
        downs = tuple(whole(f"{mlp}.{down}", hidden, size) for mlp in mlps)
        return Gated(
            size,
            size_key,
            Product("gate_up", gate_up, "rows", "gate_up", experts=experts),
            Product("down", downs, "columns", "down", experts=experts),
        )

    def window(self, otherwise: int | None = WINDOW) -> int | None:
        """sliding_window in tokens, or `otherwise` where the key is missing; null is no window."""
        found = self.raw.get("sliding_window", otherwise)
        return None if found is None else self.count_or("sliding_window", found)

    def windows(self, window: int | None, first: int = 0, every: int = 0) -> list[int | None]:
        """Each layer's by layer_types, or without them from layer `first` on, but for each layer whose number
        is a multiple of `every` (0: none)."""
        types, numbers = self.layer_types(), range(1, self.num_layers + 1)
        if types is None:
            return [window if n > first and not (every and n % every == 0) else None for n in numbers]
        if "sliding_attention" in types and window is None:
            raise ValueError(
                "layer_types has sliding_attention, but sliding_window is not set or not used; set it"
                " (and use_sliding_window), or name full_attention for every layer"
            )
        if len(types) != self.num_layers:
            raise ValueError(
                f"layer_types names {len(types)} layers; it should name num_hidden_layers, {self.num_layers}"
            )
        return [window if name == "sliding_attention" else None for name in types]

    def layer_types(self, other: str = "sliding_attention") -> list[str] | None:
        """What each layer's mixer is, full_attention or the `other`; None where config.json does not say
        so."""
        types = self.raw.get("layer_types")
        if wrong := set(types or ()) - {"full_attention", other}:
            raise UnsupportedModelError(
                f"layer_types has {', '.join(map(repr, sorted(wrong)))}; supported: full_attention and"
                f" {other}"
            )
        return types

    def model(
        self,
        layers: Iterable[tuple[Mixer, Gated]],
        norms: dict[str, str] = PRE_NORMS,
        norm_offset: float = 0.0,
        final_scale: float = 1.0,
        residual_scale: float = 1.0,
        tied: bool = False,
        centred: bool = False,
        place: str = "model.layers",
    ) -> ModelSpec:
        """A model of these layers' mixers and MLPs, with these norms (PRE_NORMS), in the formats that the
        checkpoint names. norm_offset: of all norms of the residual stream. final_scale: of what the head
        reads. residual_scale: of what layers add to the residual stream. tied: whether the embedding is the
        head where no key says so. centred: the norms are LayerNorms. place: the module that has the
        layers."""
        hidden, vocab = self.hidden_size, self.count("vocab_size")
        quantization = read_quantization(self.raw, self._hf_quant).renamed(self.aliases)
        own = tuple(Norm(name, module, hidden, offset=norm_offset) for name, module in norms.items())
        if residual_scale != 1 and not {"mixer_norm", "mlp_norm"}.isdisjoint(norms):
            raise ValueError("what is normed before it is added cannot be scaled by its weights")

        def layer(index: int, mixer: Mixer, mlp: Gated) -> LayerSpec:
            prefix = f"{place}.{index}"

            def stored(product: Product) -> Product:
                format = quantization.format_of(f"{prefix}.{module}" for module in product.modules)
                scale = residual_scale if product.adds else 1.0
                zeroed = centred and product.adds
                if (format, scale, zeroed) == (product.format, product.scale, product.centred):
                    return product
                return replace(product, format=format, scale=scale, centred=zeroed)

            return LayerSpec(prefix, mixer, mlp, own).map(stored)

        eps = self.raw["rms_norm_eps"]
        if not eps or eps < 0:
            raise ValueError(f"rms_norm_eps is {shown(eps)}; it should be a number greater than 0")
        ends = self._generation.get("eos_token_id"), self.raw.get("eos_token_id"), list(self._end_ids)
        eos = [token for found in ends for token in _ids(found) if 0 <= token < vocab]  # some say -1 for none
        return ModelSpec(
            layers=tuple(layer(index, *parts) for index, parts in enumerate(layers)),
            vocab_size=vocab,
            hidden_size=hidden,
            norm_eps=float(eps),
            final_norm=Norm("final_norm", "norm", hidden, scale=final_scale, offset=norm_offset),
            tie_word_embeddings=self.flag("tie_word_embeddings", tied),
            max_position_embeddings=self._positions(),
            eos_token_ids=tuple(dict.fromkeys(eos)),
            dtype=self._dtype(),
            centred=centred,
            initializer_range=float(self.raw.get("initializer_range") or 0.02),
            format=quantization.format,
            aliases=self.aliases,
            ignored=self.ignored,
        )

    def _positions(self) -> int:
        """max_position_embeddings; with YaRN, of which some checkpoints give those before the stretching, at
        least what it stretches them to."""
        found, rope = self.count("max_position_embeddings"), self.rope_keys()
        if _rope_type(rope) != "yarn":
            return found
        original = self.raw.get(ORIGINAL, rope.get(ORIGINAL, found))
        return max(found, int(original * rope["factor"])) if rope.get("factor") else found

    def rope_keys(self) -> dict[str, Any]:
        """transformers 5's rope_parameters or the older rope_scaling. Where both are there, transformers
        takes rope_scaling, whatever the other says. Of a text, the positions of all sections of mrope are the
        same, so that it is the usual rope."""
        given = self.raw.get("rope_scaling") or self.raw.get("rope_parameters") or {}
        types = {key: "default" for key in ("type", "rope_type") if given.get(key) == "mrope"}
        return {key: value for key, value in given.items() if not key.startswith("mrope_")} | types

    def rope(self, head_dim: int, theta: float, partial: float | None) -> Rope:
        """That of all layers. theta, partial: where no key says so. partial None: all of a head is
        rotated."""
        found = self.rope_keys()
        for key, value in found.items():
            if isinstance(value, dict):
                raise UnsupportedModelError(
                    f"rotary embedding by kind of layer ({key!r}) is not supported; supported: one for all"
                    " layers"
                )
        if partial is not None and found.get("partial_rotary_factor") is None:
            found["partial_rotary_factor"] = self.number("partial_rotary_factor", partial)
        if found.get("rope_theta") is None:
            found["rope_theta"] = self.raw.get("rope_theta")
        return self.rope_of(found, head_dim, theta, partial is not None)

    def rope_of(self, found: dict[str, Any], head_dim: int, otherwise: float, parts: bool = False) -> Rope:
        """By the keys of one kind of layer. otherwise: theta where there is none. parts: whether a part of a
        head can be what is rotated."""
        raw, place = self.raw, "rope_scaling" if self.raw.get("rope_scaling") else "rope_parameters"
        check_kinds(found, ROPE_KINDS, f"{place}.")
        theta = float(otherwise if found.get("rope_theta") is None else found["rope_theta"])
        rope_type = _rope_type(found)
        if rope_type == "dynamic" and found.get("alpha"):
            theta *= found["alpha"] ** (head_dim / (head_dim - 2))
        if rope_type not in ROPE_TYPES:
            raise UnsupportedModelError(
                f"rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
            )
        if other := found.keys() - ROPE_KINDS.keys() - {"short_factor", "long_factor", "finetuned"}:
            raise UnsupportedModelError(f"{place} has {', '.join(sorted(other))}, which is not supported")
        if theta <= 0:
            raise ValueError(f"rope_theta is {theta:g}; it should be greater than 0")
        partial = found.get("partial_rotary_factor") or 1.0
        if partial != 1 and not parts:
            raise UnsupportedModelError(
                f"partial_rotary_factor {shown(partial)} is not supported; supported: 1.0"
            )
        dim = int(head_dim * partial)
        if not 0 < dim <= head_dim or dim % 2:
            raise UnsupportedModelError(
                f"partial_rotary_factor {shown(partial)} of head_dim {head_dim} rotates {dim} values of a"
                " head; it should be an even number of them"
            )
        if ORIGINAL in raw:  # takes precedence in transformers
            found = found | {ORIGINAL: raw[ORIGINAL]}

        def positive(key: str) -> Any:
            if found.get(key) is None:
                raise ValueError(f"rope scaling of type {rope_type!r} has no {key!r}")
            if not _positive(found[key]):
                raise ValueError(
                    f"{place}.{key} is {shown(found[key])}; it should be a number greater than 0"
                )
            return found[key]

        if rope_type == "linear":
            return Rope(theta, dim, LinearScaling(positive("factor")))
        if rope_type == "llama3":
            keys = "factor", "low_freq_factor", "high_freq_factor", ORIGINAL
            return Rope(theta, dim, Llama3Scaling(*map(positive, keys)))
        if rope_type in ("yarn", "longrope"):
            found = {ORIGINAL: self.count("max_position_embeddings")} | found
            stretched = self.count("max_position_embeddings") / positive(ORIGINAL)
            factor = stretched if found.get("factor") is None else positive("factor")
            magnitude = None if found.get("attention_factor") is None else positive("attention_factor")
            if rope_type == "yarn":
                return Rope(theta, dim, _yarn(found, factor, magnitude))
            short, long = (_factors(found, key, dim // 2) for key in ("short_factor", "long_factor"))
            magnitude = magnitude or _long(factor, found)
            return Rope(theta, dim, LongScaling(short, long, found[ORIGINAL], magnitude))
        # "dynamic" begins to differ from the default beyond max_position_embeddings.
        return Rope(theta, dim)

    def _dtype(self) -> str:
        dtype = str(self.raw.get("dtype") or self.raw.get("torch_dtype") or "float32").removeprefix("torch.")
        if dtype not in DTYPES:
            raise UnsupportedModelError(f"dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
        return dtype


def _rope_type(found: dict[str, Any]) -> Any:
    return found.get("rope_type", found.get("type") or "default")


def _yarn(found: dict[str, Any], factor: float, magnitude: float | None) -> YarnScaling:
    def stretched(by: float) -> float:
        return 0.1 * by * math.log(factor) + 1 if factor > 1 else 1.0

    if magnitude is None:
        by, of_all = found.get("mscale"), found.get("mscale_all_dim")
        magnitude = stretched(by) / stretched(of_all) if by and of_all else stretched(1)
    bounds = float(found.get("beta_fast") or 32), float(found.get("beta_slow") or 1)
    return YarnScaling(factor, found[ORIGINAL], magnitude, *bounds, bool(found.get("truncate", True)))


def _long(factor: float, found: dict[str, Any]) -> float:
    """The magnitude of LongScaling where none is given."""
    return math.sqrt(1 + math.log(factor) / math.log(found[ORIGINAL])) if factor > 1 else 1.0


def _positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < float("inf")


def _factors(found: dict[str, Any], key: str, count: int) -> tuple[float, ...]:
    values = found.get(key)
    if type(values) is not list or len(values) != count or not all(map(_positive, values)):
        raise ValueError(f"{key} is {shown(values)}; it should be a list of {count} numbers greater than 0")
    return tuple(float(value) for value in values)


def normed(
    attention: FullAttention,
    what: Literal["head", "all", "rotated"],
    modules: tuple[str, str] = ("q_norm", "k_norm"),
    offset: float = 0.0,
) -> FullAttention:
    """The same with norms of queries and keys, by FullAttention.qk_norm. offset: as Norm's."""
    head_dim, grain = attention.head_dim, attention.head_dim if what == "all" else 0
    sizes = [source.rows if grain else head_dim for source in attention.qkv.sources]
    norms = [
        Norm(name, f"self_attn.{module}", size, grain, offset=offset)
        for name, module, size in zip(("q_norm", "k_norm"), modules, sizes, strict=False)
    ]
    return replace(attention, qk_norm=what, norms=tuple(norms))


def interleaved(attention: FullAttention) -> FullAttention:
    """The same where the pairs of a head that are rotated are neighbours in the checkpoint, not of its
    halves: rows are stored in an order that has one of each pair in either half."""
    assert attention.rope is not None
    head_dim, rotated = attention.head_dim, attention.rope.dim
    order = (*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, head_dim))
    queries, keys, values = attention.qkv.sources
    sources = queries._replace(order=order), keys._replace(order=order), values
    return replace(attention, qkv=replace(attention.qkv, sources=sources))


def fused(product: Product, module: str) -> Product:
    """The same where one module has the rows of all sources."""
    rows = [source.rows for source in product.sources]
    return replace(product, sources=tuple(parts([module] * len(rows), rows, product.shape[1])))


def parts(modules: Sequence[str], rows: Sequence[int], columns: int) -> list[Source]:
    """Consecutive rows of one matrix, which `modules` all name."""
    ends = list(itertools.accumulate(rows))
    whole = ends[-1], columns
    spans = zip(modules, rows, ends, strict=True)
    return [Source(name, Part(whole, slice(end - n, end), slice(0, columns))) for name, n, end in spans]


def whole(module: str, rows: int, columns: int) -> Source:
    """All of a module's matrix."""
    return Source(module, Part((rows, columns), slice(0, rows), slice(0, columns)))


def _ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]
