# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints, written by Hugging Face transformers."""

from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from editing import edit_config

transformers.utils.logging.disable_progress_bar()

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0}
MINISTRAL3_ROPE = {
    **YARN_ROPE,
    "rope_theta": 1e4,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * index for index in range(8)],
    "long_factor": [1.0 + index for index in range(8)],
}
PLAIN_IDS = {"pad_token_id": 0}
GEMMA3 = {
    **PLAIN_IDS,
    "head_dim": 32,
    "sliding_window": 21,
    "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 24,
    "tie_word_embeddings": False,
}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
}
EXPERTS = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3}
GPT_OSS = {
    "head_dim": 32,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 21,
    "rope_scaling": {**YARN_ROPE, "truncate": False},
    "swiglu_limit": 1.5,
}
# Two layers of each kind: the last delta net lies between two with attention.
QWEN3_5 = {
    "initializer_range": 0.1,
    **PLAIN_IDS,
    "num_hidden_layers": 5,
    "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2, "full_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
# Folded: as two experts, and as one; and one whose size is no multiple of theirs.
TWICE, ONCE, APART = ({"shared_expert_intermediate_size": size} for size in (96, 48, 32))
# Positions in several chunks; layers of each kind: with experts and without, with positions and without.
LLAMA4 = {
    **PLAIN_IDS,
    "head_dim": 32,
    "intermediate_size_mlp": 80,
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 2,
    "no_rope_layers": [1, 0, 0, 1],
    "layer_types": ["chunked_attention", "full_attention", "chunked_attention", "full_attention"],
    "attention_chunk_size": 21,
    "floor_scale": 16,
    "attn_scale": 0.5,
}
LINEAR_ROPE = {"rope_type": "linear", "factor": 4.0}

# kind -> (architecture, options that differ from SIZES, options of save_pretrained)
KINDS: dict[str, tuple[str, dict, dict]] = {
    "llama": ("Llama", {}, {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}, {}),
    "llama3-rope": ("Llama", {"rope_scaling": LLAMA3_ROPE}, {}),
    "llama-linear-rope": ("Llama", {"rope_scaling": LINEAR_ROPE}, {}),
    "llama-sharded": ("Llama", {}, {"max_shard_size": "100KB"}),
    "mistral": ("Mistral", {"head_dim": 32, "sliding_window": None}, {}),
    "mistral-window": ("Mistral", {"sliding_window": 40}, {}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}, {}),
    "qwen2-windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1},
        {},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}, {}),
    "seed-oss": ("SeedOss", {"head_dim": 32, "attention_out_bias": True}, {}),
    "ministral": (
        "Ministral",
        {"head_dim": 16, "sliding_window": 21, "layer_types": ["sliding_attention", "full_attention"]},
        {},
    ),
    "ministral3": ("Ministral3", {"head_dim": 16, "rope_parameters": MINISTRAL3_ROPE}, {}),
    "internlm3": ("InternLM3", {"head_dim": 32, "rope_scaling": {"rope_type": "dynamic", "factor": 6.0}}, {}),
    "arcee": ("Arcee", {"rope_scaling": YARN_ROPE}, {}),
    "iquestcoder": ("IQuestCoder", {"head_dim": 32, "attention_bias": True, "mlp_bias": True}, {}),
    "apertus": ("Apertus", {**PLAIN_IDS, "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 1e4}}, {}),
    "phi3": ("Phi3", PLAIN_IDS, {}),
    "phi3-long": (
        "Phi3",
        {
            **PLAIN_IDS,
            "rope_scaling": LONG_ROPE,
            "original_max_position_embeddings": 64,
            "sliding_window": 40,
        },
        {},
    ),
    "granite": ("Granite", MULTIPLIERS, {}),
    "helium": ("Helium", {"head_dim": 16, **PLAIN_IDS}, {}),
    "ernie4.5": ("Ernie4_5", {"head_dim": 32, "use_bias": True, "tie_word_embeddings": False}, {}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0], **PLAIN_IDS}, {}),
    "hunyuan": (
        "HunYuanDenseV1",
        {"head_dim": 32, "rope_scaling": {"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0}},
        {},
    ),
    "olmo2": ("Olmo2", PLAIN_IDS, {}),
    "olmo3": ("Olmo3", {**PLAIN_IDS, "sliding_window": 21, "num_hidden_layers": 4}, {}),
    "exaone4": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}, {}),
    "exaone4-windows": ("Exaone4", {"sliding_window": 21, "num_hidden_layers": 4}, {}),
    "glm4": ("Glm4", {"head_dim": 32, **PLAIN_IDS}, {}),
    "gemma3": ("Gemma3", GEMMA3 | {"final_logit_softcapping": 4.0}, {}),
    "gemma2-capped": ("Gemma2", GEMMA3 | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}, {}),
    "gpt-oss": ("GptOss", GPT_OSS, {}),
    "llama4": ("Llama4", LLAMA4, {}),
    "mpt": ("Mpt", {"hidden_size": 96, "num_attention_heads": 6, "max_seq_len": 512}, {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}, {}),
    "qwen3-moe": ("Qwen3Moe", {"head_dim": 32, **EXPERTS, "norm_topk_prob": True}, {}),
    "qwen3-moe-mixed": ("Qwen3Moe", {"head_dim": 32, **EXPERTS, "mlp_only_layers": [0]}, {}),
    "qwen2-moe": (
        "Qwen2Moe",
        {**EXPERTS, **TWICE, "num_hidden_layers": 3, "mlp_only_layers": [1]},
        {},
    ),
    "qwen3.5": ("Qwen3_5", QWEN3_5, {}),
    "qwen3.5-moe": ("Qwen3_5Moe", QWEN3_5 | EXPERTS | ONCE, {}),
    "qwen3-next": ("Qwen3Next", QWEN3_5 | EXPERTS | APART | {"mlp_only_layers": [1]}, {}),
    "qwen3-moe-plain": ("Qwen3Moe", {"head_dim": 32, **EXPERTS}, {"max_shard_size": "100KB"}),
}

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,  # large enough that logits differ clearly between tokens
}


def make_model(kind: str, seed: int = 0, **overrides) -> transformers.PreTrainedModel:
    """A float32 transformers model of a kind named in KINDS; overrides are options of its config."""
    architecture, options, _ = KINDS[kind]
    suffix = "TextConfig" if architecture.startswith(("Gemma3", "Llama4", "Qwen3_5")) else "Config"
    config_class = getattr(transformers, f"{architecture}{suffix}")
    make = getattr(transformers, f"{architecture}ForCausalLM", transformers.AutoModelForCausalLM.from_config)
    sizes = SIZES | options | overrides
    torch.manual_seed(seed)
    model = make(config_class(**sizes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # transformers starts these at 1 and biases at 0, which would hide mistakes
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            elif "alpha_" in name:
                parameter.normal_(0.0, 1.0)
            elif name.endswith("sinks"):
                parameter.normal_(0.0, 1.5)
            elif name.endswith("A_log"):  # states that decay fast come of sums of large numbers, rounded
                parameter.uniform_(-4.0, -1.0)
            elif name.endswith("conv1d.weight"):  # keys that are small before they are normalised, too
                parameter.normal_(0.0, 1.0)
    return model


def make_checkpoint(kind: str, path: str | Path, seed: int = 0, **overrides) -> Path:
    """Write a checkpoint of a kind named in KINDS to the folder path and return it."""
    path = Path(path)
    architecture, _, options = KINDS[kind]
    make_model(kind, seed, **overrides).save_pretrained(path, **options)
    edit_config(path, architectures=[f"{architecture}ForCausalLM"])
    return path


def make_multimodal(kind: str, path: Path) -> Path:
    """A checkpoint whose text model is of a kind named in KINDS, with a vision tower."""
    architecture, options, _ = KINDS[kind]
    name, model_type, vision = {
        "Gemma3": ("Gemma3", "gemma3_text", "siglip_vision_model"),
        "Qwen3_5": ("Qwen3_5", "qwen3_5_text", "qwen3_5_vision"),
        "Qwen3_5Moe": ("Qwen3_5Moe", "qwen3_5_moe_text", "qwen3_5_moe_vision"),
        "Llama4": ("Llama4", "llama4_text", "llama4_vision_model"),
        "Qwen2": ("Qwen2_5_VL", "qwen2_5_vl_text", "qwen2_5_vl_vision"),
        "Qwen3": ("Qwen3VL", "qwen3_vl_text", "qwen3_vl_vision"),
        "Qwen3Moe": ("Qwen3VLMoe", "qwen3_vl_moe_text", "qwen3_vl_moe_vision"),
        "Exaone4": ("Exaone4_5_", "exaone4", "exaone4_5_vision"),
        "Mistral": ("Mistral3", "mistral", "pixtral"),
        "Ministral3": ("Mistral3", "ministral3", "pixtral"),
    }[architecture]
    # transformers ignores the cap of such checkpoints.
    # Llama 4's language model is a whole model in the other, whose own key says whether its head is tied.
    tied = name != "Llama4"
    text = {"model_type": model_type, "tie_word_embeddings": tied, "final_logit_softcapping": None}
    if "VL" in name:
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    tower |= {"depth": 1, "num_heads": 2, "deepstack_visual_indexes": [0]}
    config = getattr(transformers, f"{name}Config")(
        text_config=SIZES | options | text,
        vision_config=tower | {"model_type": vision, "image_size": 28, "patch_size": 14},
    )
    torch.manual_seed(0)
    getattr(transformers, f"{name}ForConditionalGeneration")(config).save_pretrained(path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    for key, tensor in tensors.items():  # as published, which transformers reads but does not write
        if name == "Qwen3VLMoe" and ".mlp.experts." in key:
            tensors[key] = tensor.transpose(1, 2).contiguous()
    if name == "Exaone4_5_":
        tensors["mtp.norm.weight"] = torch.ones(SIZES["hidden_size"])
    save_file(tensors, file, metadata={"format": "pt"})
    return path
