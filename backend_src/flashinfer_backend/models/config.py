# SPDX-License-Identifier: Apache-2.0
"""What the engine needs to know of a checkpoint, read from its JSON files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from flashinfer_backend.core.checkpoint_json import Kind, check_kinds, read_object, read_object_if_there
from flashinfer_backend.core.shard import WHOLE, Part, Shard
from flashinfer_backend.core.tuned import Role
from flashinfer_backend.core.values import INT32_MAX, shown, some
from flashinfer_backend.models.checkpoint_kind import check_config, check_folder
from flashinfer_backend.models.errors import UnsupportedModelError
from flashinfer_backend.models.quantization import (
    BLOCK,
    DENSE,
    ON_LOAD,
    Quantization,
    WeightFormat,
    read_quantization,
)

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
ROPE_TYPES = ("default", "linear", "llama3")
DTYPES = ("float32", "bfloat16", "float16")
# What transformers takes where config.json has no such key; a sliding_window of null is no window.
DEFAULT_WINDOW = 4096
QWEN_FULL_LAYERS = 28
DEFAULT_ROPE_THETA = {"mixtral": 1e6}
OTHER_ROPE_THETA = 10000.0
DEFAULT_HEADS: dict[str, dict[str, int]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "mixtral": {"num_key_value_heads": 8},
    "qwen3_moe": {"num_key_value_heads": 4},
}


class MlpNames(NamedTuple):
    """What a checkpoint calls the parts of a layer's MLP. block: the module that has them, or the experts and
    the router. size: config.json's key of the intermediate size. experts: whether there are any."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    size: str = "intermediate_size"
    experts: bool = False


MLP_NAMES = {
    "mixtral": MlpNames("block_sparse_moe", "w1", "w3", "w2", experts=True),
    "qwen3_moe": MlpNames(size="moe_intermediate_size", experts=True),
}
DENSE_MLP = MlpNames()
VOCAB_GRAIN = 16  # rows of a rank's share of the vocabulary come in multiples, as its kernels want them
TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "tokenizer.json")
LAYER_ROLES: tuple[Role, ...] = ("qkv", "o", "gate_up", "down")
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
COUNTS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings",
)  # fmt: skip
COUNTS_OR_NONE = ("num_key_value_heads", "head_dim")
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


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one decoder-only checkpoint. rope_scaling is None for plain rotary embedding.

    With a mixture of experts each token's MLP is the weighted sum of experts_per_token of num_experts (0: one
    dense MLP), each of intermediate_size. norm_topk_prob: the weights of a token's experts add up to 1.

    Of a rank's share (`local`), heads and the intermediate size are its own and `whole` is the checkpoint's
    config; the vocabulary's size is the whole's.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    max_position_embeddings: int
    sliding_window: int | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str
    initializer_range: float
    num_experts: int = 0
    experts_per_token: int = 0
    norm_topk_prob: bool = False
    quantization: Quantization = DENSE
    shard: Shard = WHOLE
    whole_config: ModelConfig | None = None

    @classmethod
    def from_pretrained(cls, model_dir: str | Path, tokenizer_dir: str | Path | None = None) -> ModelConfig:
        """Read config.json and, where present, generation_config.json of a checkpoint folder, and which
        token ends a text by the tokenizer in tokenizer_dir (default: in the same folder).

        Raises FileNotFoundError without a config.json, UnsupportedModelError for a kind, architecture,
        rotary embedding, layer variant or quantisation that is not implemented, and ValueError for a key that
        is missing or has a wrong value.
        """
        model_dir = Path(model_dir)
        check_folder(model_dir)
        path = model_dir / "config.json"
        raw = read_object(path)
        generation_path = model_dir / "generation_config.json"
        generation = read_object_if_there(generation_path)
        check_kinds(generation, {"eos_token_id": "ids"}, f"{generation_path}: ")
        hf_quant = read_object_if_there(model_dir / "hf_quant_config.json")
        end_id = tokenizer_end_id(Path(tokenizer_dir or model_dir))
        try:
            check_kinds(raw, KINDS)
            check_config(raw, model_dir)
            return _parse(raw, generation, hf_quant, end_id)
        except KeyError as error:
            raise ValueError(f"{path} has no {error.args[0]!r}") from None
        except (TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"{path} has a value of a wrong type: {error}") from None
        except ValueError as error:
            raise type(error)(f"{path}: {error}") from None

    @property
    def mlp_names(self) -> MlpNames:
        """What the checkpoint calls the parts of an MLP."""
        return MLP_NAMES.get(self.model_type, DENSE_MLP)

    @property
    def whole(self) -> ModelConfig:
        """The checkpoint's config."""
        return self.whole_config or self

    def local(self, shard: Shard) -> ModelConfig:
        """One rank's share under tensor parallelism: whole heads, and an equal part of each MLP's rows and of
        the vocabulary. Fewer key/value heads than ranks are held by several ranks each.

        Raises UnsupportedModelError where the model cannot be cut into so many.
        """
        size = shard.size
        if size == 1:
            return self
        where = f"tensor_parallel_size={size}"
        counts = {"num_attention_heads": self.num_heads, self.mlp_names.size: self.intermediate_size}
        if self.num_kv_heads > size:
            counts["num_key_value_heads"] = self.num_kv_heads
        for name, count in counts.items():
            if count % size:
                raise UnsupportedModelError(f"{where} should divide {name}, which is {count}")
        if self.num_kv_heads < size and size % self.num_kv_heads:
            raise UnsupportedModelError(
                f"{where} should be a multiple of num_key_value_heads, which is {self.num_kv_heads}, or"
                " divide it"
            )
        local = replace(
            self,
            num_heads=self.num_heads // size,
            num_kv_heads=max(1, self.num_kv_heads // size),
            intermediate_size=self.intermediate_size // size,
            shard=shard,
            whole_config=self,
        )
        local.check_formats()
        return local

    @property
    def local_vocab(self) -> slice:
        """The tokens of the vocabulary whose rows of embedding and head this rank has."""
        rank, count = self.shard.rank, self.vocab_rows
        return slice(min(rank * count, self.vocab_size), min((rank + 1) * count, self.vocab_size))

    @property
    def vocab_rows(self) -> int:
        """Rows of embedding and head on each rank, those of padding behind the vocabulary included."""
        size = self.shard.size
        grain = VOCAB_GRAIN if size > 1 else 1
        return -(-self.vocab_size // (size * grain)) * grain

    def part(self, role: Role, module: str) -> Part:
        """Which part of the checkpoint's matrix of a module this rank has."""
        rank, size = self.shard
        rows, columns = self.parts(role)[module], self.shape(role)[1]
        whole = self.whole.parts(role)[module], self.whole.shape(role)[1]
        if role in ("o", "down"):
            return Part(whole, slice(0, rows), slice(rank * columns, (rank + 1) * columns))
        first = rank * whole[0] // size // self.head_dim * self.head_dim if role == "qkv" else rank * rows
        return Part(whole, slice(first, first + rows), slice(0, columns))

    def parts(self, role: Role) -> dict[str, int]:
        """The modules of a layer that one weight stores one behind the other, each with its rows: of one
        product, or of all experts'."""
        return self._parts[role]

    @cached_property
    def _parts(self) -> dict[Role, dict[str, int]]:
        q_rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        block, gate, up, down, *_ = self.mlp_names
        mlps = [f"{block}.experts.{index}" for index in range(self.num_experts)] or [block]
        return {
            "qkv": {"self_attn.q_proj": q_rows, "self_attn.k_proj": kv_rows, "self_attn.v_proj": kv_rows},
            "o": {"self_attn.o_proj": self.hidden_size},
            "gate_up": {f"{mlp}.{name}": self.intermediate_size for mlp in mlps for name in (gate, up)},
            "down": {f"{mlp}.{down}": self.hidden_size for mlp in mlps},
        }

    def shape(self, role: Role) -> tuple[int, int]:
        """[N, K] of a layer's weight; of experts, all of them below each other."""
        inner = {"o": self.num_heads * self.head_dim, "down": self.intermediate_size}
        return sum(self.parts(role).values()), inner.get(role, self.hidden_size)

    def weight_format(self, layer: int, role: Role) -> WeightFormat:
        """How the weight of a layer's product is stored."""
        return self._formats[role][layer]

    def weight_formats(self) -> dict[Role, set[WeightFormat]]:
        """Those of all layers."""
        return {role: set(formats) for role, formats in self._formats.items()}

    @cached_property
    def _formats(self) -> dict[Role, list[WeightFormat]]:
        layers = [f"model.layers.{layer}" for layer in range(self.num_layers)]
        return {
            role: [
                self.quantization.format_of(f"{layer}.{part}" for part in self.parts(role))
                for layer in layers
            ]
            for role in LAYER_ROLES
        }

    def check_formats(self) -> None:
        """Raise UnsupportedModelError where a product's parts cannot be stored as one weight, and where
        experts have a format that is not computed."""
        self._check_experts()
        for role, formats in self.weight_formats().items():
            parts, cut = self.parts(role), self.shard.size > 1
            if any(format.startswith("int4") for format in formats):
                self._check_int4(role, formats)
            if not any(format.startswith("fp8_block") for format in formats):
                continue
            for part, rows in parts.items():
                if rows % BLOCK and (len(parts) > 1 or (cut and role not in ("o", "down"))):
                    where = f" on each of {self.shard.size} ranks" if cut else ""
                    cure = ": set a smaller tensor_parallel_size" if cut else ""
                    raise UnsupportedModelError(
                        f"{part} has {rows} rows{where}; with FP8 scales of {BLOCK}x{BLOCK} blocks the parts"
                        f" of one product should have multiples of {BLOCK}{cure}"
                    )
            columns = self.shape(role)[1]
            if cut and role in ("o", "down") and columns % BLOCK:
                raise UnsupportedModelError(
                    f"{some(list(parts))} would have {columns} columns on each of {self.shard.size} ranks;"
                    f" with FP8 scales of {BLOCK}x{BLOCK} blocks it should be a multiple of {BLOCK}: set a"
                    " smaller tensor_parallel_size"
                )

    def _check_experts(self) -> None:
        formats = self.weight_formats()
        for format in sorted(formats["gate_up"] | formats["down"]) if self.num_experts else ():
            if format.startswith("int4"):
                found, other = "with weights of 4 bits", ""
            elif format == "fp8_static":
                found, other = "in FP8 with stored scales of activations", " one with dynamic scales, or"
            else:
                continue
            raise UnsupportedModelError(
                f"experts {found} are not supported; take{other} the 16-bit checkpoint, with the knob"
                " quantization=fp8 if it should be FP8"
            )

    def _check_int4(self, role: Role, formats: set[WeightFormat]) -> None:
        parts, columns = self.parts(role), self.shape(role)[1]
        where = f" on each of {self.shard.size} ranks" if self.shard.size > 1 else ""
        for part, rows in parts.items():
            if rows % 8:
                raise UnsupportedModelError(
                    f"{part} has {rows} rows{where}; with 4-bit weights they should be a multiple of 8"
                )
        for format in formats:
            size = format.rpartition("_")[2]
            grain = int(size) if size.isdigit() else 8
            if columns % grain:
                raise UnsupportedModelError(
                    f"{', '.join(parts)} have {columns} columns{where}; in format {format} they should be a"
                    f" multiple of {grain}"
                )

    def quantised_on_load(self) -> ModelConfig:
        """The same model with its layers' products in FP8, made from 16-bit weights while they load.

        Raises UnsupportedModelError for a checkpoint that is quantised already.
        """
        if self.quantization.format != "dense":
            raise UnsupportedModelError(
                f"quantization=fp8 is for checkpoints of 16 or 32 bits, and this one is quantised already"
                f" ({self.quantization.format}); it is served as it is with quantization=auto"
            )
        return replace(self, quantization=ON_LOAD)

    @property
    def longest_seq_len(self) -> int:
        """The longest sequence, in tokens, that check_max_seq_len lets pass."""
        return min(self.max_position_embeddings, self.sliding_window or self.max_position_embeddings)

    def check_max_seq_len(self, max_seq_len: int) -> None:
        """Raise ValueError if sequences of max_seq_len tokens are beyond what the model computes exactly."""
        if max_seq_len > self.max_position_embeddings:
            raise ValueError(
                f"max_seq_len {max_seq_len} is above the checkpoint's max_position_embeddings "
                f"{self.max_position_embeddings}; choose at most that"
            )
        if self.sliding_window is not None and max_seq_len > self.sliding_window:
            raise UnsupportedModelError(
                f"max_seq_len {max_seq_len} is above the checkpoint's sliding_window {self.sliding_window}; "
                "sliding-window attention is not implemented, so set max_seq_len to at most "
                f"{self.sliding_window}, or take the key out of config.json if the model was trained without"
            )


def tokenizer_end_id(folder: Path) -> int | None:
    """The id of the token that ends a text by the tokenizer's own files; None if they name none.

    Read without the tokenizer itself, which takes a while and much memory. Raises ValueError for a file
    that is not JSON.
    """
    config, special, tokenizer = (read_object_if_there(folder / name) for name in TOKENIZER_FILES)
    names = [token.get("content") if isinstance(token, dict) else token for token in
             (config.get("eos_token"), special.get("eos_token"))]  # fmt: skip
    names = [name for name in names if isinstance(name, str) and name]
    if not names:
        return None
    model = tokenizer.get("model") or {}
    vocabulary = model.get("vocab") or {} if isinstance(model, dict) else {}
    try:
        if isinstance(vocabulary, list):  # of [piece, score]
            vocabulary = {piece: i for i, (piece, *_) in enumerate(vocabulary)}
        ids = {token["content"]: int(i) for i, token in (config.get("added_tokens_decoder") or {}).items()}
        ids |= vocabulary | {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
    except (TypeError, KeyError, ValueError, AttributeError):
        raise ValueError(
            f"{folder / 'tokenizer.json'} or tokenizer_config.json does not list tokens as the tokenizers "
            'library writes them: vocab as {"text": id}, added_tokens as [{"id": id, "content": "text"}]'
        ) from None
    return next((ids[name] for name in names if name in ids), None)


def _parse(
    raw: dict[str, Any], generation: dict[str, Any], hf_quant: dict[str, Any], end_id: int | None
) -> ModelConfig:
    model_type = _model_type(raw)
    raw = DEFAULT_HEADS[model_type] | raw
    _refuse_variants(raw, model_type)
    window = _sliding_window(raw, model_type)
    names = MLP_NAMES.get(model_type, DENSE_MLP)
    counts = {key: raw[key] for key in (*COUNTS, names.size)} | {
        "sliding_window": 1 if window is None else window
    }
    counts |= {key: raw[key] for key in COUNTS_OR_NONE if raw.get(key) is not None}
    experts = _experts(raw) if names.experts else {}
    for key, value in (counts | experts).items():
        if type(value) is not int or not 1 <= value <= INT32_MAX:
            raise ValueError(f"{key} is {shown(value)}; it should be an integer of at least 1, in 31 bits")
    if not raw["rms_norm_eps"] or raw["rms_norm_eps"] < 0:
        raise ValueError(
            f"rms_norm_eps is {shown(raw['rms_norm_eps'])}; it should be a number greater than 0"
        )
    num_experts, experts_per_token = experts.values() if experts else (0, 0)
    if experts_per_token > num_experts:
        raise ValueError(
            f"num_experts_per_tok is {experts_per_token}; it should be at most the number of experts,"
            f" {num_experts}"
        )
    rope_theta, rope_scaling = _rope(raw, model_type)
    hidden_size, num_heads = raw["hidden_size"], raw["num_attention_heads"]
    num_kv_heads = raw.get("num_key_value_heads") or num_heads
    head_dim = raw.get("head_dim") or hidden_size // num_heads
    if num_heads % num_kv_heads:
        raise UnsupportedModelError(
            f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    if head_dim % 2:
        raise UnsupportedModelError(f"head_dim {head_dim} is odd; rotary embedding pairs its halves")
    eos = _ids(generation.get("eos_token_id")) + _ids(raw.get("eos_token_id")) + _ids(end_id)
    eos = [token for token in eos if 0 <= token < raw["vocab_size"]]  # some files say -1 for none
    config = ModelConfig(
        model_type=model_type,
        vocab_size=raw["vocab_size"],
        hidden_size=hidden_size,
        intermediate_size=raw[names.size],
        num_layers=raw["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(raw["rms_norm_eps"]),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=model_type == "qwen2",
        qk_norm=model_type in ("qwen3", "qwen3_moe"),
        max_position_embeddings=raw["max_position_embeddings"],
        sliding_window=window,
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        dtype=_dtype(raw),
        initializer_range=float(raw.get("initializer_range", 0.02)),
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        norm_topk_prob=model_type == "mixtral" or bool(raw.get("norm_topk_prob", False)),
        quantization=read_quantization(raw, hf_quant),
    )
    config.check_formats()
    return config


def _model_type(raw: dict[str, Any]) -> str:
    architectures = raw.get("architectures") or []
    for name in architectures:
        if name in ARCHITECTURES:
            if raw.get("model_type") not in (None, ARCHITECTURES[name]):  # by which transformers chooses
                raise UnsupportedModelError(
                    f"model_type {raw['model_type']!r} contradicts architecture {name}, whose model_type is"
                    f" {ARCHITECTURES[name]!r}; set the one that the model was trained as"
                )
            return ARCHITECTURES[name]
    if not architectures and raw.get("model_type") in ARCHITECTURES.values():
        return raw["model_type"]
    named = ", ".join(architectures) or raw.get("model_type") or "none named"
    raise UnsupportedModelError(
        f"architecture {named} is not supported; supported: {', '.join(ARCHITECTURES)}"
    )


def _experts(raw: dict[str, Any]) -> dict[str, Any]:
    """The number of experts, by either name that there is for it, and how many a token has."""
    found = {key: raw[key] for key in ("num_experts", "num_local_experts") if raw.get(key) is not None}
    if len(found) > 1 and found["num_experts"] != found["num_local_experts"]:
        raise ValueError("num_experts and num_local_experts differ; they are two names of one number")
    if not found:
        raise ValueError("it has neither num_experts nor num_local_experts")
    name = next(iter(found))
    return {name: raw[name], "num_experts_per_tok": raw["num_experts_per_tok"]}


def _refuse_variants(raw: dict[str, Any], model_type: str) -> None:
    """Refuse options that change the computation; each has exactly one value that is implemented."""
    implemented: dict[str, Any] = {
        "hidden_act": "silu",
        "mlp_bias": False,
        "partial_rotary_factor": 1.0,
        "is_causal": True,  # false in some models that embed texts
    }
    if model_type != "qwen2":
        implemented["attention_bias"] = False
    for key, value in implemented.items():
        found = raw.get(key)
        if found is not None and found != value:
            raise UnsupportedModelError(
                f"{key} {shown(found)} is not supported; supported: {shown(value)} or absent"
            )
    for key, (harmless, instead) in NOT_HONOURED.items():
        if raw.get(key) not in (None, *harmless):
            raise UnsupportedModelError(f"{key} is {shown(raw[key])}, which is not supported: {instead}")
    if model_type == "qwen3_moe":
        _refuse_dense_layers(raw)


def _refuse_dense_layers(raw: dict[str, Any]) -> None:
    """Refuse a mixture of experts with a layer that has none; as in transformers, mlp_only_layers can name
    layers that the model does not have."""
    dense, step = raw.get("mlp_only_layers") or [], raw.get("decoder_sparse_step")
    step = 1 if step is None else step
    if type(dense) is not list or any(type(layer) is not int for layer in dense):
        raise ValueError(f"mlp_only_layers is {shown(dense)}; it should be a list of layers' numbers")
    if type(step) is not int or step < 1:
        raise ValueError(f"decoder_sparse_step is {shown(step)}; it should be an integer of at least 1")
    layers = range(raw["num_hidden_layers"] if type(raw["num_hidden_layers"]) is int else 0)
    found = {"mlp_only_layers": any(layer in layers for layer in dense), "decoder_sparse_step": step > 1}
    for key in (key for key, there in found.items() if there):
        raise UnsupportedModelError(
            f"{key} is {shown(raw[key])}: some layers have no experts. Only models with experts in every"
            " layer are supported, and another value here would not make this one"
        )


def _rope(raw: dict[str, Any], model_type: str) -> tuple[float, dict[str, Any] | None]:
    """rope_theta and the scaling, from transformers 5's rope_parameters or the older two keys. Where both are
    there, transformers takes rope_scaling, whatever the other says."""
    place = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    scaling = dict(raw.get(place) or {})
    for key, value in scaling.items():
        if isinstance(value, dict):
            raise UnsupportedModelError(
                f"rotary embedding by kind of layer ({key!r}) is not supported; supported: one for all layers"
            )
    check_kinds(scaling, ROPE_KINDS, f"{place}.")
    thetas = (scaling.pop("rope_theta", None), raw.get("rope_theta"), DEFAULT_ROPE_THETA.get(model_type))
    theta = float(next((theta for theta in thetas if theta is not None), OTHER_ROPE_THETA))
    old_name = scaling.pop("type", None)
    rope_type = scaling.setdefault("rope_type", old_name or "default")
    if rope_type not in ROPE_TYPES:
        raise UnsupportedModelError(
            f"rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    partial = scaling.pop("partial_rotary_factor", None)
    if partial not in (None, 1.0):
        raise UnsupportedModelError(
            f"partial_rotary_factor {shown(partial)} is not supported; supported: 1.0"
        )
    if theta <= 0:
        raise ValueError(f"rope_theta is {theta:g}; it should be greater than 0")
    if rope_type == "default":
        return theta, None
    needed = ["factor"]
    if rope_type == "llama3":
        if "original_max_position_embeddings" in raw:  # goes first in transformers
            scaling["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
        needed += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    for key in needed:
        if key not in scaling:
            raise ValueError(f"rope scaling of type {rope_type!r} has no {key!r}")
        if type(scaling[key]) not in (int, float) or scaling[key] <= 0:
            raise ValueError(f"{place}.{key} is {shown(scaling[key])}; it should be a number greater than 0")
    return theta, scaling


def _sliding_window(raw: dict[str, Any], model_type: str) -> int | None:
    """The attention window in tokens, or None where every layer sees the whole sequence.

    As in transformers; but that gives Llama full attention whatever its keys say, and others a window: up to
    that many tokens both are the same.
    """
    layer_types = raw.get("layer_types")
    other = set(layer_types or ()) - {"full_attention", "sliding_attention"}
    if other:
        raise UnsupportedModelError(
            f"layer_types has {', '.join(map(repr, sorted(other)))}; supported: full_attention, and"
            " sliding_attention up to the window's length"
        )
    if model_type == "mistral":  # whatever its layer_types
        return raw.get("sliding_window", DEFAULT_WINDOW)
    if model_type == "mixtral":
        return raw.get("sliding_window")
    if model_type == "qwen3_moe":
        return raw.get("sliding_window", DEFAULT_WINDOW) if raw.get("use_sliding_window") else None
    window = raw.get("sliding_window", DEFAULT_WINDOW if model_type != "llama" else None)
    if model_type != "llama" and not raw.get("use_sliding_window", False):
        window = None
    if layer_types is not None:
        if "sliding_attention" not in layer_types:
            return None
        if window is None:
            raise ValueError(
                "layer_types has sliding_attention, but sliding_window is not set or not used; set it"
                " (and use_sliding_window), or name full_attention for every layer"
            )
    elif model_type != "llama" and raw["num_hidden_layers"] <= raw.get("max_window_layers", QWEN_FULL_LAYERS):
        return None
    return window


def _ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _dtype(raw: dict[str, Any]) -> str:
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise UnsupportedModelError(f"dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    return dtype
