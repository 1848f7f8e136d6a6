# SPDX-License-Identifier: Apache-2.0
"""A checkpoint folder and the build command, for the tests of build.py."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from flashinfer_backend.config_tools import cli

ROOT = Path(__file__).parents[2]
MODEL_REPO = ROOT / "model_repo"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


def write_checkpoint(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    (folder / "tokenizer.json").write_text("{}")
    save_file({"model.norm.weight": np.ones(256, np.float32)}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def build(tmp_path, checkpoint, capsys):
    """build(*arguments) -> (exit status, stdout, stderr), with --model and --output filled in."""

    def run(*arguments: object, model: Path | None = checkpoint, output: Path = tmp_path / "repo"):
        fixed = ["--output", str(output)] + (["--model", str(model)] if model else [])
        status = cli.main(MODEL_REPO, fixed + [str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def refused(build, tmp_path):
    """refused(*arguments) -> the message, after checking that nothing was written."""

    def run(*arguments: object, **options: Any) -> str:
        status, out, err = build(*arguments, **options)
        assert not re.search(r"\b(None|True|False|NoneType)\b", err)
        assert (status, out) == (2, "")
        assert not (tmp_path / "repo").exists()
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".repo")] == []
        return err

    return run


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
