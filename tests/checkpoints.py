# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints, written by Hugging Face transformers."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

transformers.utils.logging.disable_progress_bar()

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EXPERTS = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3}
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
    "mixtral": ("Mixtral", {"num_local_experts": 4}, {}),
    "qwen3-moe": ("Qwen3Moe", {"head_dim": 32, **EXPERTS, "norm_topk_prob": True}, {}),
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
    config_class = getattr(transformers, f"{architecture}Config")
    model_class = getattr(transformers, f"{architecture}ForCausalLM")
    sizes = SIZES | options | overrides
    torch.manual_seed(seed)
    model = model_class(config_class(**sizes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # transformers starts these at 1 and biases at 0, which would hide mistakes
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
    return model


def make_checkpoint(kind: str, path: str | Path, seed: int = 0, **overrides) -> Path:
    """Write a checkpoint of a kind named in KINDS to the folder path and return it."""
    path = Path(path)
    make_model(kind, seed, **overrides).save_pretrained(path, **KINDS[kind][2])
    return path
