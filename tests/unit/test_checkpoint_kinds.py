# SPDX-License-Identifier: Apache-2.0
"""Folders of another kind than is served: build.py says what they are and the one thing to do."""

# ruff: noqa: F401, F811  (fixtures are imported, and are parameters of the same name)
import json
import re
from pathlib import Path

import pytest
from build_support import build, checkpoint, refused, write_checkpoint

from flashinfer_backend.models import checkpoint_kind

PYTHON_WORDS = re.compile(r"\b(None|True|False|NoneType|dict|str|int)\b")
MLX = {"group_size": 64, "bits": 4}
INDEX = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model.bin"}})
POOLING = '[{"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]'
NO_CONFIG = {"config.json": None, "model.safetensors": None}
# Files to write (None: to remove) and changes of config.json -> what it is, what to do.
KINDS = {
    "gguf": ({**NO_CONFIG, "m.Q4_K_M.gguf": "GGUF"}, {}, "GGUF files (m.Q4_K_M.gguf)", "take the"),
    "four of gguf": ({**NO_CONFIG, **dict.fromkeys(("a.gguf", "b.gguf", "c.gguf", "d.gguf"), "GGUF")}, {},
     "GGUF files (a.gguf, b.gguf, c.gguf, d.gguf)", "take the"),
    "more of gguf": ({**NO_CONFIG, **{f"{name}.gguf": "GGUF" for name in "abcde"}}, {},
     "GGUF files (a.gguf, b.gguf, c.gguf, d.gguf and 1 more)", "take the"),
    "gguf beside config.json": ({"model.safetensors": None, "m.gguf": ""}, {}, "GGUF files", "take the"),
    "pickle": ({"model.safetensors": None, "pytorch_model.bin": ""}, {},
     "it has pytorch_model.bin, which are pickles", "save it again (save_pretrained)"),
    "missing shard": ({"model.safetensors": None, "model.safetensors.index.json": INDEX}, {},
     "lacks model-00001-of-00002.safetensors, model.bin, which model.safetensors.index.json", "fetch it"),
    "no index": ({"model.safetensors": None, "model-00001-of-00002.safetensors": ""}, {},
     "it has model-00001-of-00002.safetensors", "fetch model.safetensors.index.json too"),
    "lfs": ({"model.safetensors": "version https://git-lfs.github.com/spec/v1\n"}, {}, "a pointer of Git LFS",
     "run `git lfs pull`"),
    "mlx": ({}, {"quantization": MLX}, "quantised for MLX", "take the safetensors checkpoint"),
    "mlx twice": ({}, {"quantization": MLX, "quantization_config": MLX}, "quantised for MLX", "take the"),
    "gptq": ({"quantize_config.json": '{"bits": 4, "group_size": 128}'}, {}, "quantised by GPTQ",
     'into config.json as "quantization_config", with "quant_method": "gptq"'),
    "no method": ({}, {"quantization_config": {"bits": 4}}, "quantization_config: quant_method is missing",
     "take the 16-bit checkpoint"),
    "adapter": ({**NO_CONFIG, "adapter_config.json": "{}"}, {}, "has an adapter (adapter_config", "merge"),
    "adapter beside a checkpoint": ({"adapter_config.json": "{}", "adapter_model.bin": ""}, {},
     "has an adapter (adapter_model.bin; LoRA", "name"),
    "mlx adapter": ({**NO_CONFIG, "adapters.safetensors": ""}, {}, "has an adapter (adapters.saf", "merge"),
    "multimodal": ({},
     {"architectures": ["InternVLForConditionalGeneration"], "vision_config": {"depth": 32}},
     "InternVLForConditionalGeneration is a multimodal model", "take a text-only checkpoint, or"),
    "multimodal, its text": ({},
     {"architectures": ["NewForConditionalGeneration"], "text_config": {"kv_lora_rank": 512}},
     "whose text part is not served, as it has latent attention (MLA)", "serve it with vLLM"),
    "Gemma 4": ({}, {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": {"head_dim": 256}},
     "whose text part is not served, as it has heads of two sizes", "serve it with vLLM"),
    "sparse": ({},
     {"architectures": ["NewForCausalLM"], "layer_types": ["full_attention", "indexed_attention"]},
     "such models have layers of type indexed_attention", "serve it with vLLM"),
    "recurrent": ({},
     {"architectures": ["NewForCausalLM"], "layer_types": ["linear_attention", "full_attention"]},
     "NewForCausalLM is not supported, as such models have layers of type linear_attention",
     "serve it with vLLM"),
    "mla": ({}, {"architectures": ["NewForCausalLM"], "kv_lora_rank": 512}, "latent attention",
     "serve it with"),
    "encoder-decoder": ({}, {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
     "T5ForConditionalGeneration is an encoder-decoder model", "take a decoder-only model"),
    "embedding": ({}, {"architectures": ["BertModel"]}, "BertModel is an embedding model", "serve it with"),
    "pooling": ({"modules.json": POOLING, "1_Pooling/config.json": '{"pooling_mode_mean_tokens": true}'}, {},
     "1_Pooling/config.json pools by mean_tokens; only lasttoken", "serve it with"),
    "dense": ({"modules.json": POOLING.replace("Pooling", "Dense")}, {}, "has a module Dense", "serve it"),
    "bidirectional": ({}, {"architectures": ["LlamaBidirectionalModel"]}, "is an embedding model",
     "serve it with"),
    "labels": ({}, {"architectures": ["Qwen3ForSequenceClassification"], "model_type": "qwen3"},
     "is a classifier with 2 labels", "serve it with"),
    "classifier": ({}, {"architectures": ["LlamaForSequenceClassification"]},
     "LlamaForSequenceClassification is a classifier or reward model", "take a decoder-only"),
    "engine": ({**NO_CONFIG, "rank0.engine": ""}, {}, "an engine of TensorRT-LLM", "name the Hugging"),
    "TensorRT-LLM": ({}, {"architectures": None, "architecture": "LlamaForCausalLM"}, "of TensorRT-LLM",
     "name the"),
    "original": ({**NO_CONFIG, "params.json": "{}"}, {}, "Meta's or Mistral's own", "take the same model"),
    "diffusers": ({**NO_CONFIG, "model_index.json": "{}"}, {}, "pipeline of diffusers", "take a model"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_are_named_with_the_thing_to_do(refused, tmp_path, kind):
    files, changes, what, cure = KINDS[kind]
    folder = write_checkpoint(tmp_path / "odd", **changes)
    for name, text in files.items():
        if text is None:
            (folder / name).unlink()
        else:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
    told = refused(model=folder)
    assert "1 to correct" in told and what in told and cure in told[told.index(what) :]
    assert not PYTHON_WORDS.search(told)


def test_a_gguf_file_is_no_folder(refused, tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    told = refused(model=file)
    assert "is a file: name a folder with config.json" in told and "tools/convert_gguf.py FILE" in told


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "ChatGLMModel"])
def test_generators_by_another_name_are_no_embedding_models(refused, tmp_path, name):
    told = refused(model=write_checkpoint(tmp_path / "odd", architectures=[name]))
    assert f"architecture {name} is not supported; supported: Llama" in told


def test_what_is_served_passes(checkpoint: Path):
    """Files and keys that often stand beside a whole checkpoint."""
    (checkpoint / "m.gguf").write_bytes(b"")
    (checkpoint / "params.json").write_text("{}")
    (checkpoint / "pytorch_model.bin").write_bytes(b"")
    checkpoint_kind.check_folder(checkpoint)
    raw = {"architectures": ["LlamaForCausalLM"], "vision_config": None, "is_encoder_decoder": False}
    checkpoint_kind.check_config(raw, checkpoint)
    assert checkpoint_kind.weight_files(checkpoint) == [checkpoint / "model.safetensors"]
