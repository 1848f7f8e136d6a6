# SPDX-License-Identifier: Apache-2.0
"""Tiny FP8 checkpoints as quantising tools write them, and what they mean, in float64 by transformers.

Nothing here is the package's own code. The layouts are those of compressed-tensors (FP8_DYNAMIC, FP8 and
FP8_BLOCK of quantization/quant_scheme.py, stored as compressors/naive_quantized does), of ModelOpt
(torch/export: hf_quant_config.json, and what newer ones write to config.json), of transformers'
FineGrainedFP8Config, and of AutoFP8.
"""

from __future__ import annotations

import copy
import functools
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from checkpoints import make_checkpoint
from editing import edit_config

PROMPTS = [torch.randint(3, 256, (n,), generator=torch.manual_seed(n)).tolist() for n in range(5, 13)]
# q 256 rows, k and v 128; hidden_size leaves blocks of 128 that are not full.
SIZES = {
    "hidden_size": 192,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.08,
}
EXPERT_SIZES = {"hidden_size": 256, "moe_intermediate_size": 256}  # whole blocks, as experts need them
# Whole blocks of each part of a product, also on 2 ranks: a query, a gate, keys, values.
DELTA_SIZES = {"head_dim": 128, "linear_key_head_dim": 128, "linear_value_head_dim": 64}
NEVER = ("in_proj_a", "in_proj_b", "in_proj_ba", "shared_expert_gate")  # few rows, which tools leave out
KV_SCALES = {"k": 0.0051, "v": 0.0034}  # small enough that some values are beyond the largest element
ARGS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "group_size": None}
TOKEN = ARGS | {"strategy": "token", "dynamic": True}
GROUP = ARGS | {"strategy": "group", "group_size": 128, "dynamic": True}
BLOCKS = ARGS | {"strategy": "block", "block_structure": [128, 128]}


def compressed_tensors(weights: dict, inputs: dict | None, **more: Any) -> dict[str, Any]:
    group = {"weights": weights, "input_activations": inputs, "targets": ["Linear"]}
    return {
        "config_groups": {"group_0": group},
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    } | more


@dataclass(frozen=True)
class Layout:
    """weights: tensor, channel or block, or "" as they were; inputs: token, tensor or group. kv: the names of
    KV scales."""

    config: dict[str, Any] | None
    weights: str
    inputs: str
    scale_name: str = "weight_scale"
    input_name: str = "input_scale"
    scale_dtype: torch.dtype = torch.float32
    scalar: tuple[int, ...] = ()
    hf_quant: dict[str, Any] | None = None
    kv: str = "{0}_scale"
    ignored: tuple[str, ...] = ("lm_head",)


BF16 = torch.bfloat16
MODELOPT = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
FP8_BLOCK = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
LAYOUTS: dict[str, Layout] = {
    "ct-dynamic": Layout(
        compressed_tensors(ARGS | {"strategy": "channel"}, TOKEN), "channel", "token", scale_dtype=BF16
    ),
    "ct-static": Layout(
        compressed_tensors(ARGS | {"strategy": "tensor"}, ARGS | {"strategy": "tensor"}),
        "tensor", "tensor", scale_dtype=BF16, scalar=(1,), kv="{0}_proj.output_scale",
    ),
    "ct-block": Layout(compressed_tensors(BLOCKS, GROUP), "block", "group", scale_dtype=BF16),
    "modelopt": Layout(
        None, "tensor", "tensor", kv="{0}_proj.{0}_scale",
        hf_quant={"quantization": MODELOPT | {"exclude_modules": ["lm_head"]}},
    ),
    "modelopt-new": Layout(
        MODELOPT | {"quant_method": "modelopt", "ignore": ["lm_head", "model.layers.1.mlp*"]},
        "tensor", "tensor", kv="{0}_proj.{0}_scale", ignored=("lm_head", "model.layers.1.mlp."),
    ),
    "blocks": Layout(FP8_BLOCK, "block", "group", "weight_scale_inv", scale_dtype=BF16),
    "autofp8": Layout({"quant_method": "fp8", "activation_scheme": "static"}, "tensor", "tensor"),
    "mistral": Layout(  # as Ministral 3 is published
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "dequantize": False,
         "modules_to_not_convert": ["lm_head", "model.vision_tower"]},
        "tensor", "tensor", "weight_scale_inv", "activation_scale", BF16,
    ),
    "some-layers": Layout(
        compressed_tensors(ARGS | {"strategy": "channel"}, TOKEN, ignore=["lm_head", r"re:.*\.0\.self_attn"]),
        "channel", "token", ignored=("lm_head", "model.layers.0.self_attn."),
    ),
    "on-load": Layout(None, "channel", "token"),
    "dense": Layout(None, "", ""),
}  # fmt: skip


def e4m3(x: Tensor) -> Tensor:
    """The numbers of e4m3 nearest to x, ties to even, at most 448; in float64."""
    x = x.double()
    step = torch.exp2(torch.frexp(x).exponent.double().sub(1).clamp(min=-6) - 3)
    return ((x / step).round() * step).clamp(-448, 448)


def per_block(x: Tensor) -> Tensor:
    """The largest magnitude of each block, [N / 128, K / 128] rounded up."""
    rows = [[part.abs().max() for part in row.split(128, 1)] for row in x.split(128)]
    return torch.stack([torch.stack(row) for row in rows])


def spread(scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    return scale.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]


@dataclass
class Linear:
    """One quantised module: weight [N, K] as it is stored, in float64, and its scales."""

    elements: Tensor
    scale: Tensor
    inputs: str
    input_scale: float = 0.0
    ranks: int = 1  # that have a part of the columns each, and a scale of their own for a token

    @classmethod
    def quantise(cls, weight: Tensor, layout: Layout) -> Linear:
        peaks = {"tensor": weight.abs().max(), "channel": weight.abs().amax(1, keepdim=True)}
        peak = per_block(weight) if layout.weights == "block" else peaks[layout.weights]
        scale = (peak.double() / 448).to(layout.scale_dtype)
        wide = spread(scale, tuple(weight.shape)) if layout.weights == "block" else scale
        return cls(e4m3(weight.double() / wide.double()), scale, layout.inputs)

    def weight(self) -> Tensor:
        blocks = self.scale.dim() == 2 and self.scale.shape[1] > 1
        scale = spread(self.scale, tuple(self.elements.shape)) if blocks else self.scale
        return self.elements * scale.double()

    def rounded(self, x: Tensor) -> Tensor:
        """x [..., K] as the product sees it."""
        if self.inputs == "tensor":
            return e4m3(x / self.input_scale) * self.input_scale
        size = 128 if self.inputs == "group" else x.shape[-1] // self.ranks
        return torch.cat([_by_peak(part) for part in x.split(size, -1)], -1)


def _by_peak(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 448
    return e4m3(x / scale) * scale


class RoundingCache(transformers.DynamicCache):
    """Keys and values as e4m3 with scales keeps them."""

    def __init__(self, scales: dict[str, float]) -> None:
        super().__init__()
        self._scales = scales.values()

    def update(self, keys: Tensor, values: Tensor, *more: Any, **options: Any) -> tuple[Tensor, Tensor]:
        rounded = (e4m3(x / scale) * scale for x, scale in zip((keys, values), self._scales, strict=True))
        return super().update(*rounded, *more, **options)


@dataclass
class Quantised:
    """A quantised checkpoint in `folder`; model: transformers' in float64 with its weights dequantised."""

    folder: Path
    model: transformers.PreTrainedModel
    linears: dict[str, Linear] = field(default_factory=dict)
    kv_scales: dict[str, float] = field(default_factory=lambda: {"k": 1.0, "v": 1.0})

    def logits(self, tokens: list[int], rounded: bool = True, fp8_cache: bool = False) -> Tensor:
        """[len(tokens), V]. rounded: the inputs of quantised products are rounded, too."""
        return self.logits_of([tokens], rounded, fp8_cache)[0]

    @torch.inference_mode()
    def logits_of(
        self, sequences: list[list[int]], rounded: bool = True, fp8_cache: bool = False
    ) -> list[Tensor]:
        """The same of several sequences in one pass: what fills up the shorter ones is behind them."""
        hooks = []
        for name, linear in self.linears.items() if rounded else ():
            module = self.model.get_submodule(name)
            hook = lambda _, args, linear=linear: (linear.rounded(args[0]), *args[1:])  # noqa: E731
            hooks.append(module.register_forward_pre_hook(hook))
        cache = RoundingCache(self.kv_scales) if fp8_cache else None
        try:
            tokens = pad_sequence([*map(torch.tensor, sequences)], batch_first=True, padding_value=3)
            logits = self.model(tokens, past_key_values=cache).logits
            return [own[: len(sequence)] for own, sequence in zip(logits, sequences, strict=True)]
        finally:
            for hook in hooks:
                hook.remove()


class SparseMlp(nn.Module):
    """The mixture of experts of transformers with a Linear for each matrix, as checkpoints have it."""

    def __init__(self, fused: nn.Module) -> None:
        super().__init__()
        self.router = fused.gate
        matrices = zip(fused.experts.gate_up_proj, fused.experts.down_proj, strict=True)
        self.experts = nn.ModuleList(
            nn.ModuleDict(
                {
                    name: linear(matrix)
                    for name, matrix in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True)
                }
                | {"down_proj": linear(down)}
            )
            for both, down in matrices
        )
        self.shared_expert = getattr(fused, "shared_expert", None)
        self.shared_expert_gate = getattr(fused, "shared_expert_gate", None)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        _, weights, chosen = self.router(rows)
        result = torch.zeros_like(rows)
        for expert in chosen.unique().tolist():
            tokens, place = torch.where(chosen == expert)
            part, mine = self.experts[expert], rows[tokens]
            product = part["down_proj"](nn.functional.silu(part["gate_proj"](mine)) * part["up_proj"](mine))
            result.index_add_(0, tokens, product * weights[tokens, place, None])
        if self.shared_expert is not None:
            result += torch.sigmoid(self.shared_expert_gate(rows)) * self.shared_expert(rows)
        return result.view_as(x)


def linear(matrix: Tensor) -> nn.Linear:
    module = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, dtype=matrix.dtype)
    module.weight.data.copy_(matrix)
    return module


def make_dense(
    kind: str, folder: Path, **sizes: Any
) -> tuple[Path, transformers.PreTrainedModel, dict[str, Tensor]]:
    """A checkpoint to be quantised, its model in float64 with a Linear for each matrix, and its tensors."""
    made, model, tensors = _made(kind, json.dumps(sizes, sort_keys=True))
    path = Path(shutil.copytree(made.name, folder, dirs_exist_ok=True))
    return path, copy.deepcopy(model), dict(tensors)


@functools.cache  # many layouts are of the same model
def _made(
    kind: str, sizes: str
) -> tuple[tempfile.TemporaryDirectory[str], transformers.PreTrainedModel, dict[str, Tensor]]:
    """What make_dense gives copies of."""
    folder = tempfile.TemporaryDirectory(prefix="dense-")
    path = make_checkpoint(kind, folder.name, **json.loads(sizes))
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp = SparseMlp(layer.mlp)
    return folder, model, load_file(path / "model.safetensors")


def make_quantised(
    layout_name: str, kind: str, folder: Path, kv_scales: bool = False, ranks: int = 1, **sizes: Any
) -> Quantised:
    """Write a checkpoint of a kind of checkpoints.KINDS, quantised as LAYOUTS[layout_name] says. ranks: under
    which tensor parallelism its `logits` are to be."""
    layout = LAYOUTS[layout_name]
    sizes = SIZES | sizes_of(kind) | sizes
    dense, model, tensors = make_dense(kind, folder, **sizes)
    result = Quantised(dense, model)
    peaks = _input_peaks(model) if layout.inputs == "tensor" else {}
    for name, module in linears(model):
        if name.startswith(layout.ignored) or name.endswith(NEVER) or not layout.weights:
            continue
        linear = Linear.quantise(tensors[f"{name}.weight"], layout)
        # Modules that share an input have scales of their own here; with the smallest, some values are cut.
        factor = {"q": 0.6, "k": 1.0, "v": 1.4}.get(name.split(".")[-1][0], 0.8)
        linear.input_scale = float(torch.tensor(peaks.get(name, 0.0) / 448 * factor, dtype=torch.float32))
        if name.endswith(("o_proj", "out_proj", "down_proj")):
            linear.ranks = ranks
        result.linears[name] = linear
        if layout_name == "on-load":  # each rank quantises what it reads
            parts = tensors[f"{name}.weight"].chunk(linear.ranks, 1)
            module.weight.data.copy_(torch.cat([Linear.quantise(part, layout).weight() for part in parts], 1))
            continue
        module.weight.data.copy_(linear.weight())
        tensors[f"{name}.weight"] = linear.elements.to(torch.float8_e4m3fn)
        tensors[f"{name}.{layout.scale_name}"] = (
            linear.scale.reshape(layout.scalar) if layout.weights == "tensor" else linear.scale
        )
        if layout.inputs == "tensor":
            tensors[f"{name}.{layout.input_name}"] = torch.tensor(linear.input_scale).reshape(layout.scalar)
    if kv_scales:
        result.kv_scales = KV_SCALES
        for index in range(model.config.num_hidden_layers):
            for part, scale in KV_SCALES.items():
                name = f"model.layers.{index}.self_attn.{layout.kv.format(part)}"
                tensors[name] = torch.tensor(scale).reshape(layout.scalar)
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    edit_config(dense, **({"quantization_config": layout.config} if layout.config else {}))
    if layout.hf_quant:
        (dense / "hf_quant_config.json").write_text(json.dumps(layout.hf_quant))
    return result


def sizes_of(kind: str) -> dict[str, Any]:
    """Config keys that a kind adds to SIZES. With more layers, roundings differ at earlier tokens."""
    few = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    experts = EXPERT_SIZES | {"shared_expert_intermediate_size": 256} | few
    twice = EXPERT_SIZES | {"shared_expert_intermediate_size": 512}
    sizes = {"qwen3-moe": EXPERT_SIZES, "qwen2-moe": twice, "qwen3.5-moe": experts | DELTA_SIZES}
    sizes |= {"qwen3.5": DELTA_SIZES | few}
    return next((own for name, own in sizes.items() if kind.startswith(name)), {})


def linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield name, module


@torch.inference_mode()
def _input_peaks(model: transformers.PreTrainedModel) -> dict[str, float]:
    """The largest magnitude of each Linear's input over PROMPTS, from which static scales are made."""
    peaks: dict[str, float] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda _, args, name=name: peaks.update(
                {name: max(peaks.get(name, 0.0), float(args[0].abs().max()))}
            )
        )
        for name, module in linears(model)
    ]
    for prompt in PROMPTS:
        model(torch.tensor([prompt]))
    for hook in hooks:
        hook.remove()
    return peaks
