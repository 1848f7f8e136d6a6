# SPDX-License-Identifier: Apache-2.0
"""config.json's keys, checked, and the parts of a spec that families share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from flashinfer_backend.core.checkpoint_json import Kind, check_kinds
from flashinfer_backend.core.shard import Part
from flashinfer_backend.core.values import INT32_MAX, shown
from flashinfer_backend.models.errors import UnsupportedModelError
from flashinfer_backend.models.quantization import read_quantization
from flashinfer_backend.models.spec import (
    Experts,
    FullAttention,
    Gated,
    LayerSpec,
    LinearScaling,
    Llama3Scaling,
    ModelSpec,
    Norm,
    Product,
    Rope,
    Source,
)

ROPE_TYPES = ("default", "linear", "llama3")
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
}  # fmt: skip
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
# The window where a family has one and config.json does not say how long; a sliding_window of null is none.
WINDOW = 4096


class Config:
    """One checkpoint's config.json (`raw`), generation_config.json and hf_quant_config.json, and the id that
    ends a text by its tokenizer. Methods raise ValueError for wrong values, UnsupportedModelError for what is
    not computed, and KeyError for a key that is missing."""

    def __init__(
        self, raw: dict[str, Any], generation: dict[str, Any], hf_quant: dict[str, Any], end_id: int | None
    ) -> None:
        check_kinds(raw, KINDS)
        self.raw, self._end_id = raw, end_id
        self._generation, self._hf_quant = generation, hf_quant

    def only(self, **implemented: Any) -> None:
        """Refuse keys that change the computation, where they have another value than the one implemented:
        these and those of all families."""
        for key, value in (IMPLEMENTED | implemented).items():
            found = self.raw.get(key)
            if found is not None and found != value:
                raise UnsupportedModelError(
                    f"{key} {shown(found)} is not supported; supported: {shown(value)} or absent"
                )
        for key, (harmless, instead) in NOT_HONOURED.items():
            if self.raw.get(key) not in (None, *harmless):
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

    def flag(self, key: str) -> bool:
        """False where it is not there."""
        return bool(self.raw.get(key, False))

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
        bias: bool = False,
        qk_norm: bool = False,
    ) -> FullAttention:
        """Of a layer without a window. kv_heads (default: as many as heads), head_dim (default: hidden_size
        over heads) and theta are what transformers takes where the keys are missing."""
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
        rows = heads * head_dim, kv_heads * head_dim, kv_heads * head_dim
        modules = zip(("q_proj", "k_proj", "v_proj"), rows, strict=True)
        qkv = tuple(whole(f"self_attn.{name}", count, hidden) for name, count in modules)
        o = whole("self_attn.o_proj", hidden, heads * head_dim)
        return FullAttention(
            heads,
            kv_heads,
            head_dim,
            self._rope(head_dim, theta),
            Product("qkv", qkv, "rows", "qkv", grain=head_dim, bias=bias),
            Product("o", (o,), "columns", "o"),
            qk_norm,
        )

    def gated(self) -> Gated:
        """An MLP as Llama's."""
        return self._gated("intermediate_size", ["mlp"], ("gate_proj", "up_proj", "down_proj"))

    def experts(self, size_key: str, block: str, names: tuple[str, str, str], norm_topk: bool) -> Experts:
        """block: the module that has the router and the experts. names: of an expert's gate, up and down."""
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
        mlps = self._gated(size_key, [f"{block}.experts.{index}" for index in range(count)], names, count)
        router = Product("router", (whole(f"{block}.gate", count, self.hidden_size),), None, "")
        return Experts(mlps.size, size_key, mlps.gate_up, mlps.down, router, count, per_token, norm_topk)

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

    def used_window(self) -> int | None:
        """The same of families that have one only where use_sliding_window says so."""
        return self.window() if self.flag("use_sliding_window") else None

    def windows(self, window: int | None, first: int = 0) -> list[int | None]:
        """Each layer's by layer_types, or without them from layer `first` on."""
        types = self.layer_types()
        if types is None:
            return [window if index >= first else None for index in range(self.num_layers)]
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

    def layer_types(self) -> list[str] | None:
        """What each layer's attention is; None where config.json does not say so."""
        types = self.raw.get("layer_types")
        if other := set(types or ()) - {"full_attention", "sliding_attention"}:
            raise UnsupportedModelError(
                f"layer_types has {', '.join(map(repr, sorted(other)))}; supported: full_attention and"
                " sliding_attention"
            )
        return types

    def model(self, layers: Iterable[tuple[FullAttention, Gated]]) -> ModelSpec:
        """A model of these layers' mixers and MLPs, each after a norm, in the formats that the checkpoint
        names."""
        hidden, vocab = self.hidden_size, self.count("vocab_size")
        quantization = read_quantization(self.raw, self._hf_quant)
        names = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}
        norms = tuple(Norm(name, module, hidden) for name, module in names.items())

        def layer(index: int, mixer: FullAttention, mlp: Gated) -> LayerSpec:
            prefix = f"model.layers.{index}"

            def stored(product: Product) -> Product:
                format = quantization.format_of(f"{prefix}.{module}" for module in product.modules)
                return product if format == product.format else replace(product, format=format)

            return LayerSpec(prefix, mixer, mlp, (*norms, *mixer.norms)).map(stored)

        eps = self.raw["rms_norm_eps"]
        if not eps or eps < 0:
            raise ValueError(f"rms_norm_eps is {shown(eps)}; it should be a number greater than 0")
        ends = self._generation.get("eos_token_id"), self.raw.get("eos_token_id"), self._end_id
        eos = [token for found in ends for token in _ids(found) if 0 <= token < vocab]  # some say -1 for none
        return ModelSpec(
            layers=tuple(layer(index, *parts) for index, parts in enumerate(layers)),
            vocab_size=vocab,
            hidden_size=hidden,
            norm_eps=float(eps),
            tie_word_embeddings=self.flag("tie_word_embeddings"),
            max_position_embeddings=self.count("max_position_embeddings"),
            eos_token_ids=tuple(dict.fromkeys(eos)),
            dtype=self._dtype(),
            initializer_range=float(self.raw.get("initializer_range", 0.02)),
            format=quantization.format,
        )

    def _rope(self, head_dim: int, otherwise: float) -> Rope:
        """By transformers 5's rope_parameters or the older two keys. Where both are there, transformers takes
        rope_scaling, whatever the other says."""
        raw = self.raw
        place = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
        found = dict(raw.get(place) or {})
        for key, value in found.items():
            if isinstance(value, dict):
                raise UnsupportedModelError(
                    f"rotary embedding by kind of layer ({key!r}) is not supported; supported: one for all"
                    " layers"
                )
        check_kinds(found, ROPE_KINDS, f"{place}.")
        thetas = found.get("rope_theta"), raw.get("rope_theta"), otherwise
        theta = float(next(theta for theta in thetas if theta is not None))
        rope_type = found.get("rope_type", found.get("type") or "default")
        if rope_type not in ROPE_TYPES:
            raise UnsupportedModelError(
                f"rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
            )
        partial = found.get("partial_rotary_factor")
        if partial not in (None, 1.0):
            raise UnsupportedModelError(
                f"partial_rotary_factor {shown(partial)} is not supported; supported: 1.0"
            )
        if theta <= 0:
            raise ValueError(f"rope_theta is {theta:g}; it should be greater than 0")
        original = "original_max_position_embeddings"
        if original in raw:  # takes precedence in transformers
            found[original] = raw[original]

        def positive(key: str) -> Any:
            if key not in found:
                raise ValueError(f"rope scaling of type {rope_type!r} has no {key!r}")
            if type(found[key]) not in (int, float) or found[key] <= 0:
                raise ValueError(
                    f"{place}.{key} is {shown(found[key])}; it should be a number greater than 0"
                )
            return found[key]

        if rope_type == "linear":
            return Rope(theta, head_dim, LinearScaling(positive("factor")))
        if rope_type == "llama3":
            keys = "factor", "low_freq_factor", "high_freq_factor", original
            return Rope(theta, head_dim, Llama3Scaling(*map(positive, keys)))
        return Rope(theta, head_dim)

    def _dtype(self) -> str:
        dtype = str(self.raw.get("dtype") or self.raw.get("torch_dtype") or "float32").removeprefix("torch.")
        if dtype not in DTYPES:
            raise UnsupportedModelError(f"dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
        return dtype


def whole(module: str, rows: int, columns: int) -> Source:
    """All of a module's matrix."""
    return Source(module, Part((rows, columns), slice(0, rows), slice(0, columns)))


def _ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]
