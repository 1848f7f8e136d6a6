# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints with weights of 4 bits as quantising tools write them, and what they mean in float64.

Nothing here is the package's own code. The layouts were read from AutoAWQ (awq/modules/linear/gemm.py),
from GPTQModel (nn_modules/qlinear, utils/model.py: convert_gptq_v2_to_v1_format) and from compressed-tensors
0.20.0 (compressors/pack_quantized), and the last compared with what the library writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from editing import edit_config
from quantised import NEVER, SIZES, Quantised, linears, make_dense

# q 256 rows, k and v 128; blocks of 64 columns in hidden_size, of 128 elsewhere.
INT4_SIZES = SIZES | {"hidden_size": 192}
AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "version": "gemm",
    "zero_point": True,
    "modules_to_not_convert": None,
}
GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": True, "checkpoint_format": "gptq"}


def packed(**weights: Any) -> dict[str, Any]:
    """compressed-tensors' config."""
    weights = {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32,
        "dynamic": False, "actorder": None, "block_structure": None,
    } | weights  # fmt: skip
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


@dataclass(frozen=True)
class Int4Layout:
    """group: columns, or 0 for all of a row. shuffled: groups are of columns that are no neighbours."""

    writer: str
    config: dict[str, Any]
    group: int
    symmetric: bool = False
    shuffled: bool = False
    scale_dtype: torch.dtype = torch.float16
    ignored: tuple[str, ...] = ("lm_head",)


BF16 = torch.bfloat16
MIXTRAL = {"mlp.": "block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
NEVER_QWEN = "self_attn.", "linear_attn.", "mlp.shared_expert."
INT4_LAYOUTS: dict[str, Int4Layout] = {
    "awq": Int4Layout("awq", AWQ | {"group_size": 64}, 64),
    "awq-some": Int4Layout(
        "awq", AWQ | {"group_size": 32, "modules_to_not_convert": ["lm_head", "model.layers.0.mlp"]}, 32,
        ignored=("lm_head", "model.layers.0.mlp."),
    ),
    "gptq": Int4Layout("gptq", GPTQ | {"group_size": 64}, 64, symmetric=True),
    "gptq-zeros": Int4Layout("gptq", GPTQ | {"group_size": 32, "sym": False}, 32),
    "gptq-ordered": Int4Layout("gptq", GPTQ | {"group_size": 32, "desc_act": True}, 32, shuffled=True),
    "gptq-rows": Int4Layout("gptq", GPTQ | {"group_size": -1}, 0, symmetric=True),
    "gptq-v2": Int4Layout(
        "gptq_v2",
        GPTQ | {"group_size": 64, "sym": False, "checkpoint_format": "gptq_v2",
                "dynamic": {"lm_head": {}, r"-:model\.layers\.1\.mlp": {}}},
        64, ignored=("lm_head", "model.layers.1.mlp."),
    ),
    "gptq-qwen3.5": Int4Layout(  # as Qwen publishes it
        "gptq",
        GPTQ | {"group_size": 64, "dynamic": {
            "lm_head": {}, "model.language_model.embed_tokens": {}, "-:.*attn.*": {},
            "-:.*shared_expert.*": {}, "-:.*mtp.*": {}, "-:.*visual.*": {},
        }},
        64, symmetric=True,
        ignored=("lm_head", *(f"model.layers.{index}.{part}" for index in range(5) for part in NEVER_QWEN)),
    ),
    "packed": Int4Layout("packed", packed(group_size=64), 64, symmetric=True, scale_dtype=BF16),
    "packed-zeros": Int4Layout("packed", packed(symmetric=False), 32, scale_dtype=BF16),
    "packed-rows": Int4Layout(
        "packed", packed(strategy="channel", group_size=None), 0, symmetric=True, scale_dtype=BF16
    ),
    "packed-ordered": Int4Layout(
        "packed", packed(actorder="group"), 32, symmetric=True, shuffled=True, scale_dtype=BF16
    ),
}  # fmt: skip


@dataclass
class Groups:
    """A matrix [N, K]: elements and zeros of 0..15, int64 [N, K] and [N, groups], scale [N, groups], and each
    column's group, int64 [K]."""

    elements: Tensor
    scale: Tensor
    zeros: Tensor
    index: Tensor

    @classmethod
    def of(cls, weight: Tensor, layout: Int4Layout, seed: int) -> Groups:
        rows, columns = weight.shape
        size = layout.group or columns
        index = torch.arange(columns) // size
        if layout.shuffled:
            index = index[torch.randperm(columns, generator=torch.Generator().manual_seed(seed))]
        scale, zeros = torch.empty(rows, columns // size), torch.empty(rows, columns // size)
        for group in range(columns // size):
            part = weight[:, index == group].float()
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            if layout.symmetric:
                scale[:, group], zeros[:, group] = part.abs().amax(1) / 7.5, 8
            else:
                scale[:, group] = (high - low) / 15
                zeros[:, group] = (-low / scale[:, group]).round()
        if not layout.symmetric:  # the ends of what can be stored
            zeros[0], zeros[1] = 0, 15
        scale = scale.to(layout.scale_dtype)
        wide = scale.double()[:, index]
        elements = ((weight.double() / wide).round() + zeros[:, index]).clamp(0, 15)
        return cls(elements.long(), scale, zeros.long(), index)

    def weight(self) -> Tensor:
        return (self.elements - self.zeros[:, self.index]) * self.scale.double()[:, self.index]


def words(values: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """[R, 8 C] -> int32 [R, C]: 4 bits each, element order[i] of a word's eight at bit 4 i."""
    result = torch.zeros(len(values), values.shape[1] // 8, dtype=torch.int64)
    for i, element in enumerate(order):
        result |= values[:, element::8] << 4 * i
    return as_int32(result)


def as_int32(values: Tensor) -> Tensor:
    """Of 32 bits in int64."""
    values = values & 0xFFFFFFFF
    return torch.where(values < 2**31, values, values - 2**32).int()


def awq(groups: Groups) -> dict[str, Tensor]:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": words(groups.elements.t(), order),
        "qzeros": words(groups.zeros.t(), order),
        "scales": groups.scale.t(),
    }


def gptq_v2(groups: Groups) -> dict[str, Tensor]:
    return {
        "qweight": words(groups.elements).t(),
        "qzeros": words(groups.zeros.t()),
        "scales": groups.scale.t(),
        "g_idx": groups.index.int(),
    }


def gptq(groups: Groups) -> dict[str, Tensor]:
    """Whole words of zero points less one in each 4 bits, and a bias where there is none."""
    tensors = gptq_v2(groups)
    return tensors | {
        "qzeros": as_int32(tensors["qzeros"].long() - 0x11111111),
        "bias": torch.zeros(len(groups.elements), dtype=torch.float16),
    }


def packed_tensors(groups: Groups, layout: Int4Layout) -> dict[str, Tensor]:
    tensors = {
        "weight_packed": words(groups.elements),
        "weight_scale": groups.scale,
        "weight_shape": torch.tensor(groups.elements.shape),
    }
    if not layout.symmetric:
        tensors["weight_zero_point"] = words(groups.zeros.t()).t()
    if layout.shuffled:
        tensors["weight_g_idx"] = groups.index.int()
    return tensors


def tensors_of(groups: Groups, layout: Int4Layout) -> dict[str, Tensor]:
    """A module's tensors as `layout` stores them."""
    if layout.writer == "packed":
        tensors = packed_tensors(groups, layout)
    else:
        tensors = {"awq": awq, "gptq": gptq, "gptq_v2": gptq_v2}[layout.writer](groups)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def make_int4(layout_name: str, kind: str, folder: Path, **sizes: Any) -> Quantised:
    """Write a checkpoint of a kind of checkpoints.KINDS, quantised as INT4_LAYOUTS[layout_name] says."""
    layout = INT4_LAYOUTS[layout_name]
    experts = {"moe_intermediate_size": 128} if "moe" in kind or kind == "qwen3-next" else {}
    shared = {"shared_expert_intermediate_size": 256 if kind == "qwen2-moe" else 128} if experts else {}
    dense, model, tensors = make_dense(kind, folder, **(INT4_SIZES | experts | shared | sizes))
    for name, module in linears(model):
        if name.startswith(layout.ignored) or name.endswith(NEVER):
            continue
        # Modules that read the same x have their columns in the same groups.
        layer, _, part = name.removeprefix("model.layers.").partition(".")
        part = part.replace("linear_attn", "self_attn")
        seed = 4 * int(layer) + ("self_attn.o", "mlp.d", "mlp", "self").index(
            next(start for start in ("self_attn.o", "mlp.d", "mlp", "self") if part.startswith(start))
        )
        if kind == "mixtral":
            for usual, own in MIXTRAL.items():
                name = name.replace(usual, own)
        groups = Groups.of(tensors.pop(f"{name}.weight"), layout, seed)
        module.weight.data.copy_(groups.weight())
        bias = {"bias": tensors[f"{name}.bias"]} if f"{name}.bias" in tensors else {}
        for key, tensor in (tensors_of(groups, layout) | bias).items():
            tensors[f"{name}.{key}"] = tensor
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    edit_config(dense, quantization_config=layout.config)
    return Quantised(dense, model)
