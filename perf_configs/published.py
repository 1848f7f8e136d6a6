# SPDX-License-Identifier: Apache-2.0
"""Writes a shape of Qwen3.5 (perf_configs/shapes) as it is published in FP8, for servers that know only
published forms:

    python -m perf_configs.published qwen3.5-27b --tokenizer DIR FOLDER

The model has its image part, cut to one layer, and FP8 weights with 128x128 blocks in all products except
those that Qwen leaves in 16 bits. FOLDER gets a config.json and the tokenizer's files, but no weights: use
`load_format=dummy`, or vLLM's `--load-format dummy --language-model-only`.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from client.arguments import argument_parser

SHAPES = Path(__file__).parent / "shapes"
NAMES = sorted(folder.name for folder in SHAPES.glob("qwen3.5-*"))
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
LAYERS, VISION = "model.language_model.layers.", "model.visual."
# Modules of a layer, and of the images' part, that stay in 16 bits.
DELTA = ("linear_attn.conv1d", "linear_attn.in_proj_a", "linear_attn.in_proj_b")
EXPERTS = ("mlp.gate", "mlp.shared_expert_gate")
IMAGES = (
    "blocks.0.attn.qkv", "blocks.0.attn.proj", "blocks.0.mlp.linear_fc1", "blocks.0.mlp.linear_fc2",
    "merger.linear_fc1", "merger.linear_fc2",
)  # fmt: skip


def in_fp8(text: dict[str, Any]) -> dict[str, Any]:
    """The config.json that a shape of Qwen3.5's text model has in FP8."""
    text = dict(text)
    (architecture,) = text.pop("architectures")
    every, layers = text["full_attention_interval"], range(text["num_hidden_layers"])
    kinds = ["linear_attention" if (number + 1) % every else "full_attention" for number in layers]
    kept = ["lm_head", "model.language_model.embed_tokens", *(VISION + name for name in IMAGES)]
    for number, kind in enumerate(kinds):
        own = DELTA if kind == "linear_attention" else ()
        own += EXPERTS if "num_experts" in text else ()
        kept += [f"{LAYERS}{number}.{name}" for name in own]
    return {
        "architectures": [architecture.replace("ForCausalLM", "ForConditionalGeneration")],
        "model_type": text["model_type"].removesuffix("_text"),
        "image_token_id": 248056,
        "video_token_id": 248057,
        "vision_start_token_id": 248053,
        "vision_end_token_id": 248054,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": text | {"layer_types": kinds, "mamba_ssm_dtype": "float32"},
        "vision_config": {
            "model_type": text["model_type"].removesuffix("_text"), "depth": 1, "hidden_size": 1152,
            "hidden_act": "gelu_pytorch_tanh", "intermediate_size": 4304, "num_heads": 16, "in_channels": 3,
            "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
            "out_hidden_size": text["hidden_size"], "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [],
        },
        "quantization_config": {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [128, 128], "modules_to_not_convert": kept,
        },
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser("perf_configs.published", __doc__)
    parser.add_argument("shape", choices=NAMES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder with tokenizer.json")
    options = parser.parse_args(argv)
    if not (options.tokenizer / "tokenizer.json").is_file():
        parser.error(f"--tokenizer: {options.tokenizer} has no tokenizer.json")
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER:
        if (options.tokenizer / name).is_file():
            shutil.copy(options.tokenizer / name, options.folder)
    text = json.loads((SHAPES / options.shape / "config.json").read_text())
    (options.folder / "config.json").write_text(json.dumps(in_fp8(text), indent=1))


if __name__ == "__main__":
    main()
