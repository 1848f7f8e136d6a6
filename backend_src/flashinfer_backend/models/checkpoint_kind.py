# SPDX-License-Identifier: Apache-2.0
"""Kinds of checkpoints that are not served. Each is refused with its name and the one thing to do."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from flashinfer_backend.core.checkpoint_json import read_object_if_there, shards
from flashinfer_backend.core.paths import CONVERT
from flashinfer_backend.core.values import some
from flashinfer_backend.models.errors import UnsupportedModelError
from flashinfer_backend.models.pooling import GENERATORS, INSTEAD

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapters.safetensors")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LFS_POINTER = b"version https://git-lfs"
# The end of an architecture's name -> what such a model is for.
OTHER_TASKS = {
    "ForSequenceClassification": "a classifier or reward model",
    "ForTokenClassification": "a classifier of tokens",
    "ForQuestionAnswering": "a model that marks answers in a text",
    "RewardModel": "a reward model",
    "ForMaskedLM": "an encoder",
    "Model": "an embedding model",
}
# Beginnings of architectures' names -> what such models have that is not computed.
NOT_COMPUTED = {
    "Deepseek": "latent attention (MLA)",
    "KimiK2": "latent attention (MLA)",
    "Glm4Moe": "a router of its own",
    "Ernie4_5_Moe": "a router of its own",
    "Mamba": "recurrent layers (Mamba)",
    "FalconMamba": "recurrent layers (Mamba)",
    "Nemotron": "recurrent layers (Mamba), or an MLP of its own",
    "Jamba": "recurrent layers (Mamba)",
    "Rwkv": "recurrent layers",
    "RecurrentGemma": "recurrent layers (RG-LRU)",
    "KimiLinear": "recurrent layers (delta attention)",
    "MiniMax": "recurrent layers (lightning attention), or a router of its own",
    "Lfm2": "short convolutions in place of attention",
    "Gemma4": "heads of two sizes",
    "Qwen4": "hyper-connections and embeddings of several tokens",
    "MiMo": "values of another size than keys",
    "Cohere": "layers whose attention and MLP read the same",
    "BitNet": "weights of three values",
    "Gemma3n": "embeddings of each layer and keys and values that layers share",
    "GptNeoX": "layers whose attention and MLP read the same",
    "Phimoe": "a router of its own",
}
# Keys of config.json -> the same of architectures that are not known: with these keys, or with such layers.
KEYS_NOT_COMPUTED = {
    "kv_lora_rank": "latent attention (MLA)",
    "mamba_d_state": "recurrent layers (Mamba)",
    "mamba_num_heads": "recurrent layers (Mamba)",
    "ssm_cfg": "recurrent layers (Mamba)",
    "state_size": "recurrent layers (Mamba)",
    "hc_count": "hyper-connections",
    "hc_mult": "hyper-connections",
    "swa_head_dim": "heads of two sizes",
    "global_head_dim": "heads of two sizes",
    "linear_num_value_heads": "recurrent layers (gated delta net)",
    "n_shared_experts": "a router of its own",
    "n_routed_experts": "a router of its own",
    "num_shared_experts": "a router of its own",
}
LAYERS_NOT_COMPUTED = {"linear_attention", "indexed_attention", "mamba", "mamba2", "recurrent", "conv"}


def check_folder(folder: Path) -> None:
    """Look at the names of a folder's files alone.

    Raises UnsupportedModelError for kinds that are not served, FileNotFoundError without a config.json.
    """
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    has_config = "config.json" in names
    adapter = next((name for name in ADAPTER_WEIGHTS if name in names), None)
    if adapter or (ADAPTER_CONFIG in names and not has_config):
        _refuse(
            f"{folder} has an adapter ({adapter or ADAPTER_CONFIG}; LoRA, for one), which is no model: name"
            " it by lora_modules, next to its model, or merge it (peft: merge_and_unload) and name the merged"
            " checkpoint's folder"
            + (", or move the adapter's files away to serve the weights without it" if has_config else "")
        )
    safetensors = any(name.endswith(".safetensors") for name in names)
    gguf = sorted(name for name in names if name.lower().endswith(".gguf"))
    if gguf and not (has_config and safetensors):
        _refuse(
            f"{folder} holds GGUF files ({some(gguf)}): take the safetensors checkpoint that they were made"
            f" from, or convert one by {CONVERT}"
        )
    if any(name.endswith(".engine") for name in names):
        _refuse(
            f"{folder} holds an engine of TensorRT-LLM: name the Hugging Face checkpoint that it was built"
            " from"
        )
    if "model_index.json" in names:
        _refuse(f"{folder} holds a pipeline of diffusers, which makes images: take a model that writes text")
    if not has_config and "params.json" in names:
        _refuse(
            f"{folder} has params.json, so it is in Meta's or Mistral's own format: take the same model in"
            " Hugging Face's format (config.json, model.safetensors)"
        )
    if not has_config:
        raise FileNotFoundError(f"{folder} is not a checkpoint folder: it has no config.json")


def check_config(raw: dict[str, Any], folder: Path) -> None:
    """Look at config.json, whose values have the right kinds, before the architecture is looked up.

    Raises UnsupportedModelError for kinds that are not served.
    """
    architectures: Sequence[str] = raw.get("architectures") or ()
    named = ", ".join(architectures) or raw.get("model_type") or "the checkpoint"
    if raw.get("is_encoder_decoder") is True:
        _refuse(f"{named} is an encoder-decoder model: {generator()}")
    if any(raw.get(key) for key in ("vision_config", "audio_config", "text_config", "thinker_config")):
        text = raw.get("text_config")
        what = lacking({**(text if isinstance(text, dict) else {}), "architectures": architectures})
        cure = "serve it with vLLM or SGLang"
        _refuse(
            f"{named} is a multimodal model (images, audio or video) whose text part is not served"
            + (f", as it has {what}: {cure}" if what else f": take a text-only checkpoint, or {cure}")
        )
    for end, kind in OTHER_TASKS.items():
        if any(name.endswith(end) and not name.endswith(GENERATORS) for name in architectures):
            _refuse(f"{named} is {kind}: {INSTEAD}, or {generator()}")
    if "pretrained_config" in raw or ("architecture" in raw and not architectures):
        _refuse("it is a config.json of TensorRT-LLM: name the Hugging Face checkpoint that it was made from")
    scheme = raw.get("quantization_config")
    without_method = scheme is None or (isinstance(scheme, dict) and not scheme.get("quant_method"))
    mlx = raw.get("quantization")
    if isinstance(mlx, dict) and "bits" in mlx and "group_size" in mlx and without_method:
        _refuse(
            "it is quantised for MLX, which is not supported: take the safetensors checkpoint that it was"
            " made from"
        )
    if scheme is None and read_object_if_there(folder / "quantize_config.json"):
        _refuse(
            "quantize_config.json next to it says that the weights are quantised by GPTQ: copy its content"
            ' into config.json as "quantization_config", with "quant_method": "gptq"'
        )


def lacking(raw: dict[str, Any]) -> str | None:
    """What an architecture that is not served has that is not computed, by its name or by config.json; None
    where that is not known."""
    names: Sequence[str] = raw.get("architectures") or ()
    by_name = (
        what for beginning, what in NOT_COMPUTED.items() for name in names if name.startswith(beginning)
    )
    by_key = (what for key, what in KEYS_NOT_COMPUTED.items() if raw.get(key) not in (None, 0))
    layers = LAYERS_NOT_COMPUTED.intersection(raw.get("layer_types") or ())
    by_layer = (f"layers of type {name}" for name in sorted(layers))
    return next(itertools.chain(by_name, by_key, by_layer), None)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint; model.safetensors alone where it is there, as in transformers.

    Raises FileNotFoundError, naming what is there instead or what is missing, and ValueError for an index or
    a file that is none.
    """
    single, index = folder / SINGLE, folder / INDEX
    files = [single] if single.is_file() else []
    if not files and index.is_file():
        files = [folder / name for name in shards(index)]
    if absent := [path.name for path in files if not path.is_file()]:
        raise FileNotFoundError(
            f"{folder} lacks {some(absent)}, which {INDEX} names: its download is incomplete; fetch it again"
        )
    if not files:
        raise FileNotFoundError(
            f"{folder} has no weights: expected {SINGLE} or {INDEX}{_found_instead(folder)}"
        )
    for path in files:
        with path.open("rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                raise ValueError(
                    f"{path} is a pointer of Git LFS, not the file: run `git lfs pull` in {folder}"
                )
    return files


def _found_instead(folder: Path) -> str:
    found = sorted(path.name for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    if others := [name for name in found if name.endswith(".safetensors")]:
        return f"; it has {some(others)}: fetch {INDEX} too, or rename a single file to {SINGLE}"
    if others := [name for name in found if name.endswith((".bin", ".pt", ".pth"))]:
        return (
            f"; it has {some(others)}, which are pickles of PyTorch: load the checkpoint with transformers"
            " and save it again (save_pretrained), which writes safetensors"
        )
    return ""


def generator() -> str:
    return "take a decoder-only model that generates text (...ForCausalLM)"


def _refuse(message: str) -> NoReturn:
    raise UnsupportedModelError(message)
