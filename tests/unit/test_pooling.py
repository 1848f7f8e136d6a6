# SPDX-License-Identifier: Apache-2.0
"""How a checkpoint says that it embeds texts or scores documents."""

import json
from pathlib import Path
from typing import Any

import pytest

from embedding_checkpoints import MODULES, write_modules, write_pooling
from flashinfer_backend.models.errors import UnsupportedModelError
from flashinfer_backend.models.hf import read_spec
from flashinfer_backend.models.pooling import Pooling, read_pooling, read_prompts

CONFIG = {
    "model_type": "qwen3", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
}  # fmt: skip
EMBED, LABEL = Pooling("embed", 64), Pooling("score")


def folder(path: Path, architecture: str = "Qwen3ForCausalLM", **files: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | {"architectures": [architecture]} | files))
    return path


def test_the_folder_decides(tmp_path: Path) -> None:
    plain = folder(tmp_path / "plain")
    assert read_pooling(plain) is None and read_spec(plain).outputs == 300
    assert read_pooling(plain, task="embed") == EMBED
    assert read_spec(folder(tmp_path / "base", "Qwen3Model")).pooling == EMBED
    label = folder(tmp_path / "label", "Qwen3ForSequenceClassification", id2label={"0": "LABEL_0"})
    assert read_pooling(label) == LABEL and read_spec(label).outputs == 1
    assert read_pooling(label, task="generate") is None
    # As sentence-transformers 5 and 6 write them.
    write_modules(plain, "Transformer", "Pooling")
    write_pooling(plain)
    assert read_pooling(plain) == Pooling("embed", 64, normalize=False)
    file = plain / "modules.json"
    newer = "sentence_transformers.sentence_transformer.modules.pooling.Pooling"
    file.write_text(file.read_text().replace(MODULES["Pooling"], newer))
    (plain / "1_Pooling" / "config.json").write_text('{"pooling_mode": "lasttoken", "include_prompt": true}')
    assert read_pooling(plain) == Pooling("embed", 64, normalize=False)
    write_modules(plain, "Transformer", "Pooling", "Normalize")
    assert read_spec(plain).pooling == EMBED and read_spec(plain).outputs == 64


def test_a_knob_says_that_a_model_is_a_reranker(tmp_path: Path) -> None:
    plain = folder(tmp_path / "plain")
    file = plain / "tokenizer.json"
    file.write_text(json.dumps({"model": {"vocab": {"no": 215, "yes": 296}}}))
    assert read_pooling(plain, task="score") == Pooling("score", tokens=(296, 215))
    file.write_text(json.dumps({"model": {"vocab": {"yes": 296}}}))
    with pytest.raises(ValueError, match="has no tokens yes and no"):
        read_pooling(plain, task="score")
    file.write_text(json.dumps({"model": {"vocab": {"no": 215, "yes": 300}}}))
    with pytest.raises(ValueError, match=r"should lie in 0\.\.299"):
        read_pooling(plain, task="score")


@pytest.mark.parametrize("mode", ["mean_tokens", "cls_token"])
def test_other_pooling_is_refused_by_name(tmp_path: Path, mode: str) -> None:
    plain = folder(tmp_path / "plain")
    write_modules(plain, "Transformer", "Pooling", "Normalize")
    write_pooling(plain, mode)
    with pytest.raises(UnsupportedModelError, match=f"pools by {mode}; only lasttoken.*serve it with vLLM"):
        read_spec(plain)
    write_pooling(plain, **{f"pooling_mode_{mode}": True})  # and the last token's
    with pytest.raises(UnsupportedModelError, match="pools by"):
        read_spec(plain)


def test_prompts_have_names(tmp_path: Path) -> None:
    assert read_prompts(tmp_path) == ({}, None)
    file = tmp_path / "config_sentence_transformers.json"
    file.write_text('{"prompts": {"query": "Find: "}, "default_prompt_name": "query"}')
    assert read_prompts(tmp_path) == ({"query": "Find: "}, "query")
    file.write_text('{"prompts": {"query": "Find: "}, "default_prompt_name": "other"}')
    with pytest.raises(ValueError, match="should be one of its prompts"):
        read_prompts(tmp_path)
