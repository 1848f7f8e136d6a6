# SPDX-License-Identifier: Apache-2.0
"""The text model of a multimodal checkpoint."""

from typing import Any

from flashinfer_backend.core.checkpoint_json import check_kinds

# Multimodal checkpoints whose text model is served: its architecture, and what its keys are where they are
# missing.
MULTIMODAL: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma3ForConditionalGeneration": (
        "Gemma3ForCausalLM",
        {
            "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
            "num_attention_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
        },
    ),
    "Qwen3_5ForConditionalGeneration": (
        "Qwen3_5ForCausalLM",
        {
            "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
            "num_attention_heads": 16, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
        },
    ),
    "Qwen3_5MoeForConditionalGeneration": (
        "Qwen3_5MoeForCausalLM",
        {
            "vocab_size": 248320, "hidden_size": 2048, "moe_intermediate_size": 512,
            "num_hidden_layers": 40, "num_attention_heads": 16, "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6, "num_experts": 256, "num_experts_per_tok": 8,
            "shared_expert_intermediate_size": 512,
        },
    ),
    "Llama4ForConditionalGeneration": (
        "Llama4ForCausalLM",
        {
            "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192,
            "intermediate_size_mlp": 16384, "num_hidden_layers": 48, "num_attention_heads": 40,
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "num_local_experts": 16,
            "num_experts_per_tok": 1,
        },
    ),
    "Qwen2_5_VLForConditionalGeneration": (
        "Qwen2ForCausalLM",
        {
            "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
            "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80,
        },
    ),
    "Qwen3VLForConditionalGeneration": (
        "Qwen3ForCausalLM",
        {
            "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
            "num_attention_heads": 32, "max_position_embeddings": 128000, "rms_norm_eps": 1e-6,
            "rope_theta": 5e5,
        },
    ),
    "Qwen3VLMoeForConditionalGeneration": (
        "Qwen3MoeForCausalLM",
        {
            "vocab_size": 151936, "hidden_size": 2048, "moe_intermediate_size": 1408, "num_hidden_layers": 24,
            "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 128000,
            "rms_norm_eps": 1e-6, "rope_theta": 5e5, "num_experts_per_tok": 4, "intermediate_size": 5632,
        },
    ),
    "Exaone4_5_ForConditionalGeneration": ("Exaone4ForCausalLM", {}),
    "Mistral3ForConditionalGeneration": (
        "MistralForCausalLM",
        {
            "vocab_size": 131072, "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40,
            "num_attention_heads": 32, "head_dim": 128, "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5, "rope_theta": 1e9, "sliding_window": None,
        },
    ),
}  # fmt: skip
MULTIMODAL["Qwen2VLForConditionalGeneration"] = MULTIMODAL["Qwen2_5_VLForConditionalGeneration"]
# The same where text_config has another model_type than most.
TEXT_TYPES: dict[Any, tuple[str, dict[str, Any]]] = {"ministral3": ("Ministral3ForCausalLM", {})}
# Keys of the text model that are these, whatever text_config says: Qwen-VL's has the layers of the Qwen
# before it.
FIXED: dict[str, dict[str, Any]] = {
    "Qwen2VLForConditionalGeneration": {"model_type": None},
    "Qwen2_5_VLForConditionalGeneration": {"model_type": None},
    "Qwen3VLForConditionalGeneration": {"model_type": None},
    "Qwen3VLMoeForConditionalGeneration": {"model_type": None, "norm_topk_prob": True},
}
# Those whose text model's keys can be those of the whole, as Qwen published them.
FLAT = {"Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"}
# Beginnings of such a checkpoint's tensors: what they are called here, and those that are not read.
ALIASES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
IGNORED = (
    "vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.",
    "model.visual.", "visual.", "vision_model.", "mtp.",
)  # fmt: skip


def text_part(raw: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The keys of a multimodal checkpoint's language model, of MULTIMODAL, and whether it is one. Keys of the
    whole take precedence where they are about weights."""
    names = raw.get("architectures")
    name = names[0] if type(names) is list and names else None
    if type(name) is not str or name not in MULTIMODAL:
        return raw, False
    check_kinds(raw, {"text_config": "object"})
    text = raw.get("text_config") or {}
    if name in FLAT:
        text = text or {key: value for key, value in raw.items() if key != "vision_config"}
    text = text | FIXED.get(name, {})
    architecture, defaults = TEXT_TYPES.get(text.get("model_type"), MULTIMODAL[name])
    shared = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config", "eos_token_id")
    of_whole = {key: raw[key] for key in shared if raw.get(key) is not None}
    return defaults | text | of_whole | {"architectures": [architecture]}, True
