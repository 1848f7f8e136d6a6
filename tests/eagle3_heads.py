# SPDX-License-Identifier: Apache-2.0
"""Tiny random EAGLE-3 heads in the forms that are published, and what they compute, in plain torch."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

LAYER = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.5.0",
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "a target"}},
    "norm_before_residual": True,
    "target_hidden_size": None,
    "tie_word_embeddings": False,
}
# form -> (what config.json has beside LAYER, whether that is in transformer_layer_config)
FORMS: dict[str, tuple[dict[str, Any], bool]] = {
    "safeailab": ({"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}, False),
    "nvidia": (
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [1, 2],
                "use_aux_hidden_state": True,
                "use_mtp_layernorm": False,
                "norm_before_fc": True,
            },
        },
        False,
    ),
    "speculators": (SPECULATORS | {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, True),
    "speculators-qwen3": (
        SPECULATORS
        | {"eagle_aux_hidden_state_layer_ids": [1, 3], "fc_norm": True, "norm_output": True}
        | {"embed_requires_grad": True},
        True,
    ),
}


def make_head(
    form: str,
    folder: Path,
    *,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    known: int,
    layers: int = 1,
    seed: int = 0,
    target: Tensor | None = None,
    **changes: Any,
) -> Path:
    """A head of a form named in FORMS with `known` tokens; changes: of config.json's upper level."""
    upper, nested = FORMS[form]
    intermediate = 2 * hidden
    layer = LAYER | {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "num_hidden_layers": layers,
    }
    if form == "speculators-qwen3":
        layer |= {"model_type": "qwen3"}
    config = upper | {"draft_vocab_size": known}
    config |= {"transformer_layer_config": layer} if nested else layer
    config |= changes
    taken = len(taken_by(config, 6))
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * (1.5 / shape[-1] ** 0.5)

    def norm(size: int) -> Tensor:
        return torch.rand(size, generator=generator) + 0.5

    tensors = {"fc.weight": random(hidden, taken * hidden), "norm.weight": norm(hidden)}
    tensors["lm_head.weight"] = random(known, hidden)
    for index in range(layers):
        prefix = f"layers.{index}" if nested or form == "nvidia" else "midlayer"
        columns = hidden * (1 if index else 2)
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            tensors[f"{prefix}.self_attn.{name}_proj.weight"] = random(rows * head_dim, columns)
        tensors[f"{prefix}.self_attn.o_proj.weight"] = random(hidden, heads * head_dim)
        for name in ("gate", "up"):
            tensors[f"{prefix}.mlp.{name}_proj.weight"] = random(intermediate, hidden)
        tensors[f"{prefix}.mlp.down_proj.weight"] = random(hidden, intermediate)
        names = ["input_layernorm", "post_attention_layernorm", *([] if index else ["hidden_norm"])]
        for name in names:
            tensors[f"{prefix}.{name}.weight"] = norm(hidden)
        if form == "speculators-qwen3":
            for name in ("q_norm", "k_norm"):
                tensors[f"{prefix}.self_attn.{name}.weight"] = norm(head_dim)
    if form == "nvidia":
        tensors["input_norm.weight"] = norm(taken * hidden)
    if form == "speculators-qwen3":
        for index in range(taken):
            tensors[f"fc_norm.{index}.weight"] = norm(hidden)
        tensors["embed_tokens.weight"] = random(vocab, hidden)
    elif nested and target is not None:
        tensors["embed_tokens.weight"] = target.clone()  # a copy of the target's
    ids = torch.randperm(vocab, generator=generator)[:known].sort().values
    tensors["d2t"] = ids - torch.arange(known)
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def taken_by(config: dict[str, Any], target_layers: int) -> list[int]:
    """After how many of the target's layers hidden states are taken."""
    if own := config.get("eagle_aux_hidden_state_layer_ids"):
        return own
    nvidia = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    if nvidia:
        return [layer + 1 for layer in nvidia]  # the indices of the layers behind which they are taken
    return [2, target_layers // 2, target_layers - 3]


class Reference:
    """What the head in a folder computes, one position at a time, by the definitions of SafeAILab's cnets.py
    and speculators' Eagle3DraftModel. embedding: the target's [V, H]."""

    def __init__(self, folder: Path, embedding: Tensor, target_layers: int) -> None:
        self.tensors = {
            name.replace("midlayer.", "layers.0."): tensor.float() if tensor.is_floating_point() else tensor
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        self.config = json.loads((folder / "config.json").read_text())
        self.layer = self.config.get("transformer_layer_config", self.config)
        self.embedding = self.tensors.get("embed_tokens.weight", embedding)
        self.taken = taken_by(self.config, target_layers)

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.tensors[f"{name}.weight"]
        return F.rms_norm(x, weight.shape, weight, self.layer["rms_norm_eps"])

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        dim = x.shape[-1]
        angles = positions[:, None, None] * self.layer["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
        first, second = x[..., : dim // 2], x[..., dim // 2 :]
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1
        )

    def run(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Hidden states behind the head's layers at all positions of one sequence, before the final norm.
        hidden [T, H]: what the head starts from at each; tokens [T]: the ones that follow."""
        heads, count = self.layer["num_attention_heads"], self.layer["num_key_value_heads"]
        dim, positions = self.layer["head_dim"], torch.arange(len(tokens))
        for index in range(self.layer["num_hidden_layers"]):
            prefix = f"layers.{index}"
            residual = hidden
            if index:
                x = self.norm(hidden, f"{prefix}.input_layernorm")
            else:
                normed = self.norm(hidden, f"{prefix}.hidden_norm")
                if self.config.get("norm_before_residual"):
                    residual = normed
                x = torch.cat([self.norm(self.embedding[tokens], f"{prefix}.input_layernorm"), normed], -1)
            parts = []
            for name, number in (("q", heads), ("k", count), ("v", count)):
                part = (x @ self.tensors[f"{prefix}.self_attn.{name}_proj.weight"].T).view(-1, number, dim)
                if name != "v":
                    if f"{prefix}.self_attn.q_norm.weight" in self.tensors:
                        part = self.norm(part, f"{prefix}.self_attn.{name}_norm")
                    part = self.rotate(part, positions)
                parts.append(part.repeat_interleave(heads // number, 1).transpose(0, 1))
            attended = F.scaled_dot_product_attention(*parts, is_causal=True).transpose(0, 1).flatten(1)
            hidden = residual + attended @ self.tensors[f"{prefix}.self_attn.o_proj.weight"].T
            x = self.norm(hidden, f"{prefix}.post_attention_layernorm")
            gate, up = (x @ self.tensors[f"{prefix}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            hidden = hidden + (F.silu(gate) * up) @ self.tensors[f"{prefix}.mlp.down_proj.weight"].T
        return hidden

    def drafts(self, taken: list[Tensor], tokens: list[int], count: int) -> tuple[list[int], list[float]]:
        """`count` guesses at what follows a sequence of T + 1 tokens, and how far ahead of the second best
        each is. taken: the target's hidden states [T, H] of the first T, one by one of self.taken."""
        joined = torch.cat(taken, -1)
        if "input_norm.weight" in self.tensors:
            joined = self.norm(joined, "input_norm")
        if "fc_norm.0.weight" in self.tensors:
            parts = [self.norm(part, f"fc_norm.{i}") for i, part in enumerate(taken)]
            joined = torch.cat(parts, -1)
        hidden, follow = joined @ self.tensors["fc.weight"].T, tokens[1:]
        found, margins = [], []
        for _ in range(count):
            last = self.run(hidden, torch.tensor(follow))[-1]
            normed = self.norm(last, "norm")
            logits = normed @ self.tensors["lm_head.weight"].T
            best = logits.topk(2)
            choice = int(best.indices[0])
            found.append(choice + int(self.tensors["d2t"][choice]))
            margins.append(float(best.values[0] - best.values[1]))
            start = normed if self.config.get("norm_output") else last
            hidden, follow = torch.cat([hidden, start[None]]), [*follow, found[-1]]
        return found, margins
