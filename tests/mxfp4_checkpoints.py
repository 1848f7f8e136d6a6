# SPDX-License-Identifier: Apache-2.0
"""A tiny GPT-OSS checkpoint with experts in MXFP4 as OpenAI published them, and the same numbers in float32.

Nothing here is the package's own code. The names and layout are those of openai/gpt-oss-20b, and of
transformers' integrations/mxfp4.py.
"""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints import make_checkpoint
from editing import edit_config

NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip


def quantise(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """weight[E, K, N] -> blocks uint8 [E, N, K / 32, 16], scales uint8 [E, N, K / 32], and what they mean, as
    the weight."""
    groups = weight.transpose(1, 2).unflatten(2, (-1, 32)).double()
    exponents = groups.abs().amax(-1, keepdim=True).log2().floor() - 2
    scaled = groups / 2**exponents
    codes = (scaled.abs().unsqueeze(-1) - NUMBERS).abs().argmin(-1)
    meant = (NUMBERS[codes] * scaled.sign() * 2**exponents).flatten(2).transpose(1, 2)
    codes = (codes + 8 * (scaled < 0)).to(torch.uint8)
    blocks = codes[..., 0::2] + 16 * codes[..., 1::2]
    return blocks, (exponents[..., 0] + 127).to(torch.uint8), meant.float().contiguous()


def make_mxfp4(folder: Path, **sizes: object) -> tuple[Path, Path]:
    """Folders of a checkpoint with experts in MXFP4, and of the same in float32."""
    dense = make_checkpoint("gpt-oss", folder / "dense", **sizes)
    return publish(dense, folder / "mxfp4"), dense


def publish(dense: Path, published: Path) -> Path:
    """Writes the checkpoint `dense` with experts in MXFP4 to the folder `published` and returns it; `dense`
    gets the numbers that these mean."""
    tensors = load_file(dense / "model.safetensors")
    written = dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales, tensors[name] = quantise(written.pop(name))
        written |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    shutil.copytree(dense, published)
    for path, found in ((dense, tensors), (published, written)):
        found = {name: tensor.contiguous() for name, tensor in found.items()}
        save_file(found, path / "model.safetensors", metadata={"format": "pt"})
    edit_config(published, quantization_config=QUANTIZATION)
    return published
