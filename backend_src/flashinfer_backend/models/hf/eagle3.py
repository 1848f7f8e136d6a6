# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 drafters: https://arxiv.org/abs/2503.01840, https://github.com/SafeAILab/EAGLE.

A drafter's config.json is that of its layers with a few keys more (SafeAILab, lmsys, NVIDIA), or has the
layers' in transformer_layer_config (https://github.com/vllm-project/speculators).
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from flashinfer_backend.core.checkpoint_json import Kind, check_kinds
from flashinfer_backend.core.tuned import Role
from flashinfer_backend.core.values import shown
from flashinfer_backend.models.errors import UnsupportedModelError
from flashinfer_backend.models.hf.config import Config, normed, whole
from flashinfer_backend.models.spec import FullAttention, ModelSpec, Norm, Product

KINDS: dict[str, Kind] = {
    "draft_vocab_size": "integer", "target_hidden_size": "integer", "speculators_model_type": "text",
    "transformer_layer_config": "object", "speculators_config": "object", "eagle_config": "object",
    "norm_before_residual": "flag", "norm_before_fc": "flag", "fc_norm": "flag", "norm_output": "flag",
}  # fmt: skip
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
# Other keys of eagle_config than AUX_LAYERS and norm_before_fc: the one value of each that is served.
EAGLE_CONFIG: dict[str, Any] = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}
# Keys that are read, here or in config.py, and those that change nothing of what is computed.
READ = {
    *KINDS, AUX_LAYERS, "architectures", "model_type", "dtype", "torch_dtype", "hidden_size",
    "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings",
    "vocab_size", "tie_word_embeddings", "layer_types", "sliding_window", "use_sliding_window",
    "initializer_range", "quantization_config", "compression_config", "hidden_act", "mlp_bias",
    "attention_bias", "partial_rotary_factor", "is_causal",
}  # fmt: skip
HARMLESS = {
    "_name_or_path", "_attn_implementation", "attention_dropout", "auto_map", "bos_token_id",
    "chunk_size_feed_forward", "embed_requires_grad", "eos_token_id", "has_no_defaults_at_init", "id2label",
    "label2id", "max_position_embeddings", "max_window_layers", "num_lookahead_tokens", "pad_token_id",
    "pretraining_tp", "problem_type", "return_dict", "speculators_version", "transformers_version",
    "use_cache",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Eagle3Spec(ModelSpec):
    """A drafter for a target. `fc` joins hidden states of several of the target's layers into one. The
    drafter's own layers, of which the first also takes the next token's embedding, turn it into a hidden
    state from which `head` chooses among `draft_vocab_size` of the target's tokens.

    target_hidden_size: of the hidden states that it takes. taken: after how many of the target's layers each
    of them is taken; None: where SafeAILab's drafters take them. fc_norms: whether the input of `fc` is
    normed: not at all, as a whole, or each layer's part. norm_before_residual: whether the residual stream
    begins with the normed hidden state. norm_output: whether the next draft starts from the hidden state
    behind the final norm.
    """

    draft_vocab_size: int
    target_hidden_size: int
    taken: tuple[int, ...] | None
    fc_norms: Literal["none", "whole", "each"]
    norm_before_residual: bool
    norm_output: bool

    @property
    def head(self) -> Product:
        """Every rank has all of it, and of what follows."""
        return self._outer("lm_head", self.draft_vocab_size, self.hidden_size, "head")

    @property
    def embedding(self) -> Product:
        return Product("embed_tokens", (whole("embed_tokens", self.vocab_size, self.hidden_size),), None, "")

    @property
    def fc(self) -> Product:
        columns = self.target_hidden_size * (3 if self.taken is None else len(self.taken))
        return self._outer("fc", self.hidden_size, columns, "")

    def _outer(self, name: str, rows: int, columns: int, role: Role) -> Product:
        """A product outside of the layers: quantised on load where they are and its shape allows it, as a
        step without a batch takes as long as reading all of these weights."""
        source = (whole(name, rows, columns),)
        if self.format != "fp8_on_load" or rows % 16 or columns % 16:
            return Product(name, source, None, role)
        # No numbers of its own are measured.
        return Product(name, source, None, "qkv", format=self.format)

    @property
    def products(self) -> tuple[Product, ...]:
        return *super().products, self.fc

    def taken_of(self, target: ModelSpec) -> tuple[int, ...]:
        """After how many of the target's layers it takes their residual stream."""
        count = len(target.layers)
        return self.taken or (2, count // 2, count - 3)

    def check_fits(self, target: ModelSpec, max_seq_len: int) -> None:
        """Raise UnsupportedModelError where it cannot draft for the target, in sequences of max_seq_len
        tokens."""
        if self.target_hidden_size != target.hidden_size:
            self._unfit("hidden states of", self.target_hidden_size, target.hidden_size)
        if self.vocab_size != target.vocab_size:
            self._unfit("vocab_size", self.vocab_size, target.vocab_size)
        taken, count = self.taken_of(target), len(target.layers)
        if self.taken is None and count < 6:
            raise UnsupportedModelError(
                f"the drafter names no layers of its target ({AUX_LAYERS}), and 2, half of all and all but 3"
                f" do not suit a target of {count} layers"
            )
        if max(taken) == count:
            raise UnsupportedModelError(
                f"the drafter takes the hidden states behind the target's last layer ({AUX_LAYERS} has"
                f" {count}), which are not kept for drafters: name one that takes those of earlier layers"
            )
        if outside := [layer for layer in taken if layer >= count]:
            raise UnsupportedModelError(
                f"the drafter takes hidden states in front of layer {', '.join(map(str, outside))}, and the"
                f" target's layers are 0 to {count - 1}: it is for a deeper target"
            )
        for name, key in (
            ("heads", "num_attention_heads"),
            ("kv_heads", "num_key_value_heads"),
            ("head_dim", "head_dim"),
        ):
            own, other = getattr(self.attention, name), getattr(target.attention, name)
            if own != other:
                self._unfit(key, own, other, " (its keys and values share the target's blocks)")
        if window := min(filter(None, self.windows(max_seq_len)), default=None):
            raise UnsupportedModelError(
                f"the drafter's layers have a sliding window of {window} tokens, which is not computed: set"
                f" max_seq_len to at most {window}, which is {max_seq_len}, or name a drafter without"
            )

    def _unfit(self, what: str, own: int, other: int, why: str = "") -> None:
        raise UnsupportedModelError(
            f"the drafter has {what} {own}, and the target {other}{why}: name a drafter that was trained for"
            " this target"
        )


def eagle3(raw: dict[str, Any], hf_quant: dict[str, Any]) -> Eagle3Spec:
    """The spec from config.json (`raw`) and hf_quant_config.json. Raises what a family's function raises."""
    check_kinds(raw, KINDS)
    flat, norm_before_residual = _flat(raw)
    _refuse_unknown(flat)
    config = Config(flat, {}, hf_quant)
    config.refuse_unsupported(attention_bias=False)
    hidden, eagle = config.hidden_size, flat.get("eagle_config") or {}
    first = _attention(config)
    columns = 2 * hidden
    sources = tuple(whole(source.module, source.rows, columns) for source in first.qkv.sources)
    mixers = [replace(first, qkv=replace(first.qkv, sources=sources)), *[first] * (config.num_layers - 1)]
    windows = config.windows(config.window(None)) if flat.get("layer_types") else [None] * len(mixers)
    layers = [
        (replace(mixer, window=window), config.gated()) for mixer, window in zip(mixers, windows, strict=True)
    ]
    model = config.model(layers)
    own = model.layers[0]
    norms = (*own.own_norms, Norm("hidden_norm", "hidden_norm", hidden))
    named = [replace(layer, prefix=f"layers.{index}") for index, layer in enumerate(model.layers)]
    known = config.count_or("draft_vocab_size", model.vocab_size)
    if known > model.vocab_size:
        raise ValueError(f"draft_vocab_size is {known}, more than the target's {model.vocab_size}")
    return Eagle3Spec(
        **{name: getattr(model, name) for name in ModelSpec.__dataclass_fields__ if name != "layers"},
        layers=(replace(named[0], own_norms=norms), *named[1:]),
        draft_vocab_size=known,
        target_hidden_size=config.count_or("target_hidden_size", hidden),
        taken=_taken(flat, eagle),
        fc_norms=_fc_norms(config, eagle),
        norm_before_residual=norm_before_residual,
        norm_output=config.flag("norm_output"),
    ).checked()


def _flat(raw: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The keys of both forms in one object, and norm_before_residual."""
    method = raw.get("speculators_model_type")
    if method is None:
        named = any("eagle3" in name.lower() for name in raw.get("architectures") or ())
        if raw.get("draft_vocab_size") is None and not named:
            raise UnsupportedModelError(
                "this is no EAGLE-3 drafter: it has neither draft_vocab_size nor an architecture of EAGLE-3"
            )
        if raw.get("tie_word_embeddings"):
            raise UnsupportedModelError("tie_word_embeddings true is not supported for a drafter")
        return raw, bool(raw.get("norm_before_residual"))
    if method != "eagle3":
        raise UnsupportedModelError(
            f"speculators_model_type {shown(method)} is not supported; supported: eagle3"
        )
    algorithm = (raw.get("speculators_config") or {}).get("algorithm", "eagle3")
    if algorithm != "eagle3":
        raise UnsupportedModelError(f"speculators_config.algorithm is {shown(algorithm)}, not eagle3")
    if raw.get("norm_before_residual") is None:
        raise ValueError("norm_before_residual is missing; set what the drafter was trained with")
    if not raw.get("transformer_layer_config"):
        raise ValueError("transformer_layer_config is missing; it should hold the config of the layers")
    own = {key: value for key, value in raw.items() if key not in ("transformer_layer_config", "model_type")}
    layer = dict(raw["transformer_layer_config"])
    for key in ("architectures", "tie_word_embeddings"):  # the target's, where the object is a copy of it
        layer.pop(key, None)
    return layer | own, raw["norm_before_residual"]


def _refuse_unknown(flat: dict[str, Any]) -> None:
    off: tuple[Any, ...] = (None, False, "", [], {})
    plans = ("base_model_",)  # of transformers' tensor parallelism
    for key, value in flat.items():
        if key not in READ | HARMLESS and value not in off and not key.startswith(plans):
            raise UnsupportedModelError(
                f"{key} is {shown(value)}, which is not known of EAGLE-3 drafters; take the key out of"
                " config.json if it changes nothing of what is computed"
            )


def _attention(config: Config) -> FullAttention:
    """That of layers after the first."""
    kind = config.raw.get("model_type", "llama")
    if kind == "llama":
        return config.attention()
    if kind == "qwen3":
        return normed(config.attention(kv_heads=32, head_dim=128), "head")
    raise UnsupportedModelError(
        f"a drafter with layers of model_type {shown(kind)} is not supported; supported: llama, qwen3"
    )


def _taken(flat: dict[str, Any], eagle: dict[str, Any]) -> tuple[int, ...] | None:
    """After how many layers hidden states are taken. speculators counts so. In eagle_config they are either
    counted so, or are the indices of the layers behind which they are taken, of which the first is 1:
    https://github.com/sgl-project/sglang/pull/25454."""
    own = flat.get(AUX_LAYERS)
    found = own or eagle.get(AUX_LAYERS)
    if not found:
        return None
    if type(found) is not list or any(type(layer) is not int for layer in found):
        raise ValueError(f"{AUX_LAYERS} is {shown(found)}; it should be a list of layers' numbers")
    if found[0] < 1:
        raise UnsupportedModelError(f"{AUX_LAYERS} is {shown(found)}; its numbers should be 1 or more")
    if sorted(found) != found:
        raise UnsupportedModelError(f"{AUX_LAYERS} is {shown(found)}; its numbers should be ascending")
    return tuple(layer + (not own and found[0] == 1) for layer in found)


def _fc_norms(config: Config, eagle: dict[str, Any]) -> Literal["none", "whole", "each"]:
    if unknown := [key for key in eagle if key not in (*EAGLE_CONFIG, AUX_LAYERS, "norm_before_fc")]:
        raise UnsupportedModelError(f"eagle_config.{unknown[0]} is not known of EAGLE-3 drafters")
    for key, value in EAGLE_CONFIG.items():
        if eagle.get(key, value) != value:
            raise UnsupportedModelError(
                f"eagle_config.{key} {shown(eagle[key])} is not supported; supported: {shown(value)}"
            )
    whole_norm = config.flag("norm_before_fc") or eagle.get("norm_before_fc") is True
    if whole_norm and config.flag("fc_norm"):
        raise ValueError("norm_before_fc and fc_norm are both true; a drafter has one of them")
    return "whole" if whole_norm else "each" if config.flag("fc_norm") else "none"
