# SPDX-License-Identifier: Apache-2.0
"""Tiny random Qwen3 checkpoints that embed texts or score documents, with sentence-transformers' files."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, Qwen3Config

from checkpoints import SIZES, make_checkpoint, make_model
from editing import edit_config
from flashinfer_backend.core.paths import resolve_model_dir

OPTIONS = {"vocab_size": 2048, "max_position_embeddings": 512, "head_dim": 32}
MODULES = {
    "Transformer": "sentence_transformers.models.Transformer",
    "Pooling": "sentence_transformers.models.Pooling",
    "Normalize": "sentence_transformers.models.Normalize",
    "LogitScore": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
}
PROMPTS = {"query": "Instruct: find passages\nQuery:", "document": ""}
ANSWERS = (7, 9)  # of make_reranker: the ids of yes and no


def write_modules(folder: Path, *kinds: str) -> None:
    listed = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": MODULES[kind]}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    for i, kind in enumerate(kinds):
        (folder / f"{i}_{kind}" if i else folder).mkdir(exist_ok=True)


def write_pooling(folder: Path, mode: str = "lasttoken", **others: Any) -> None:
    modes = {f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens", "lasttoken")}
    size = {"word_embedding_dimension": SIZES["hidden_size"], "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({**size, **modes, **others}))


def _with_tokenizer(folder: Path) -> Path:
    """The bundled model's tokenizer, which like Qwen3-Embedding's puts a token behind each text."""
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_model_dir("bundled") / file, folder)
    file = folder / "tokenizer.json"
    found = json.loads(file.read_text())
    special = {"SpecialToken": {"id": "<|end_of_text|>", "type_id": 0}}
    found["post_processor"]["single"].append(special)
    found["post_processor"]["special_tokens"]["<|end_of_text|>"] = {
        "id": "<|end_of_text|>",
        "ids": [1],
        "tokens": ["<|end_of_text|>"],
    }
    file.write_text(json.dumps(found))
    return folder


def make_embedder(folder: Path, normalize: bool = True, **sizes: Any) -> Path:
    """As Qwen3-Embedding's folder: tensors without the beginning "model.", architecture Qwen3ForCausalLM."""
    make_model("qwen3", **OPTIONS | sizes).model.save_pretrained(folder)
    edit_config(folder, architectures=["Qwen3ForCausalLM"])
    write_modules(folder, "Transformer", "Pooling", *(["Normalize"] if normalize else []))
    write_pooling(folder)
    prompts = {"prompts": PROMPTS, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return _with_tokenizer(folder)


def make_reranker(folder: Path, classifier: bool = False, **sizes: Any) -> Path:
    """As Qwen3-Reranker's, with sentence-transformers' LogitScore; or as Qwen3ForSequenceClassification."""
    if classifier:
        torch.manual_seed(0)
        config = Qwen3Config(**SIZES | OPTIONS | sizes, num_labels=1, pad_token_id=2)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    else:
        make_checkpoint("qwen3", folder, **OPTIONS | sizes)
        write_modules(folder, "Transformer", "LogitScore")
        tokens = dict(zip(("true_token_id", "false_token_id"), ANSWERS, strict=True))
        (folder / "1_LogitScore" / "config.json").write_text(json.dumps(tokens))
    return _with_tokenizer(folder)
