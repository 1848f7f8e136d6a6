# SPDX-License-Identifier: Apache-2.0
"""Checkpoints and knobs that are broken in any way: errors name the file or the knob, and what is wrong."""

import json
import random
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints import make_checkpoint
from flashinfer_backend.config_tools import cli
from flashinfer_backend.config_tools.checks import check
from flashinfer_backend.config_tools.knobs import KNOBS
from flashinfer_backend.config_tools.settings import complete
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.paths import resolve_model_dir
from flashinfer_backend.text.tokenizer import TextTokenizer
from flashinfer_backend.worker.start import start_runner

ROOT = Path(__file__).parents[2]
JSON_FILES = (
    "config.json", "config.json", "generation_config.json", "tokenizer_config.json",
    "special_tokens_map.json", "tokenizer.json", "model.safetensors.index.json",
)  # fmt: skip
VALUES: list[Any] = [
    None, True, 0, -1, 1, 3, 7, 2.5, 1e400, -1e400, 10**12, 10**30, "", "x", "8", "silu", [], [1], ["x"],
    [[]], {}, {"a": 1}, {"rope_type": "llama3"}, {"type": "linear", "factor": "x"}, {"0": "x"},
    {"factor": 0, "rope_type": "linear"}, [{"id": "x"}], [{"content": []}], {"x": {"content": "y"}},
]  # fmt: skip
ADDED = [
    "rope_scaling", "rope_parameters", "sliding_window", "layer_types", "head_dim", "quantization_config",
    "torch_dtype", "eos_token_id", "architectures", "partial_rotary_factor", "tie_word_embeddings",
]  # fmt: skip
PYTHON = re.compile(
    r"Traceback|\w+(Error|Exception)\b|NoneType|object (is|has|of|cannot)|subscriptable|indices must"
    r"|unhashable|unsupported operand|positional argument|\b(None|True|False)\b|<class"
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with weights in several files, and a tokenizer."""
    folder = make_checkpoint("llama-sharded", tmp_path_factory.mktemp("whole") / "model", vocab_size=2048)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_model_dir("bundled") / name, folder)
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}')
    return folder


def break_json(rng: random.Random, file: Path) -> str:
    """Changes a JSON file; what was changed."""
    kind = rng.randrange(8)
    data = file.read_bytes()
    if kind == 0:
        file.unlink()
        return f"{file.name} is gone"
    if kind == 1:
        file.write_bytes(data[: rng.randrange(len(data))])
        return f"{file.name} is cut"
    if kind == 2:
        file.write_bytes(
            rng.choice([b"", b"\xff\xfe\x00", b"[]", b"7", b"null", b"{", b"[" * 100_000, b'"x"'])
        )
        return f"{file.name} is {file.read_bytes()[:9]!r}"
    value = json.loads(data)
    place, path = value, file.name
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(min(len(place), 3)))
        key = rng.choice(keys)
        path += f".{key}"
        if isinstance(place[key], (dict, list)) and place[key] and rng.random() < 0.6:
            place = place[key]
            continue
        if kind == 3 and isinstance(place, dict):
            del place[key]
            path += " left out"
        else:
            place[key] = rng.choice(VALUES)
            path += f" = {place[key]!r}"
        break
    if file.name == "config.json" and rng.random() < 0.3:
        added = rng.choice(ADDED)
        value[added] = rng.choice(VALUES)
        path += f", {added} = {value[added]!r}"
    file.write_text(json.dumps(value))
    return path


def break_weights(rng: random.Random, folder: Path) -> str:
    """Changes a safetensors file; what was changed."""
    file = rng.choice(sorted(folder.glob("*.safetensors")))
    data = file.read_bytes()
    kind = rng.randrange(4)
    if kind == 0:
        file.unlink()
        return f"{file.name} is gone"
    if kind == 1:
        file.write_bytes(data[: rng.choice([0, 4, 9, 100, rng.randrange(len(data))])])
        return f"{file.name} is cut"
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    name = rng.choice([key for key in header if key != "__metadata__"])
    if kind == 2:
        file.write_bytes(struct.pack("<Q", rng.choice([0, 2**40, 2**63, length + 1])) + data[8:])
        return f"{file.name} says another length of its header"
    change = rng.choice(["rename", "shape", "dtype", "offsets"])
    if change == "rename":
        header[name + "x"] = header.pop(name)
    elif change == "shape":
        header[name]["shape"] = header[name]["shape"][::-1] + [1]
    elif change == "dtype":
        header[name]["dtype"] = rng.choice(["F64", "I32", "U8", "x"])
    else:
        header[name]["data_offsets"] = rng.choice([[0, 1], [5, 1], [0, 2**40], []])
    made = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(made)) + made + data[8 + length :])
    return f"{file.name}: {change} of {name}"


def judge(what: str, change: str, folder: Path, call: Callable[[], Any]) -> str:
    """What is wrong with the way in which `call` fails, or nothing."""
    try:
        problems = call()
    except (ValueError, OSError) as error:
        problems = [str(error)]
    except Exception as error:
        return f"{change}: {what} raises {type(error).__name__}: {error}"
    for problem in problems if isinstance(problems, list) else []:
        if found := PYTHON.search(problem):
            return f"{change}: {what} says {found[0]!r}: {problem}"
        if not re.search(r"\.json|\.safetensors", problem) and str(folder) not in problem:
            return f"{change}: {what} names no file: {problem}"
    return ""


def attempt(whole: Path, folder: Path, seed: int) -> list[str]:
    """Breaks a copy of the checkpoint; what is wrong with the errors."""
    rng = random.Random(seed)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    if rng.random() < 0.3:
        change = break_weights(rng, folder)
    else:
        change = break_json(rng, folder / rng.choice(JSON_FILES))
    change = f"seed {seed}: {change}"
    values = complete({"model_dir": str(folder), "device": "cpu"})
    settings: dict[str, Any] = {"max_seq_len": 64, "max_num_seqs": 2, "max_num_tokens": 64, "device": "cpu"}
    config = EngineConfig(
        model_dir=str(folder), max_tokens_in_paged_kv_cache=64, max_num_tokens_while_decoding=64, **settings
    )
    found = [
        judge("build.py", change, folder, lambda: check(values)),
        judge("the engine", change, folder, lambda: start_runner(config) and None),
        judge("the tokenizer", change, folder, lambda: TextTokenizer(folder) and None),
    ]
    return [problem for problem in found if problem]


def test_broken_checkpoints_are_named(whole: Path, tmp_path: Path) -> None:
    found = [problem for seed in range(80) for problem in attempt(whole, tmp_path / "broken", seed)]
    assert not found, "\n".join(found)


TEXTS = [
    "", " ", "auto", "none", "true", "TRUE", "0", "1", "-1", "7", "16", "1e9", "nan", "inf", "-0.5", "0.5",
    "2147483648", "9" * 400, "1,2", ",", "1,,2", "x", "cuda", "cpu", "bfloat16", "fcfs", "/nowhere", "../..",
    "a b", "é", "${x}", "\x00", "'", '"', "}", "\n", "None", "[]",
]  # fmt: skip


def test_random_knobs_are_set_or_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(1)
    names = [knob.name for knob in KNOBS]
    refused = 0
    for number in range(150):
        chosen = {rng.choice(names): rng.choice(TEXTS) for _ in range(rng.choice([1, 1, 2, 4]))}
        pairs = [f"{name}={text}" for name, text in chosen.items()]
        try:
            status = cli.main(ROOT / "model_repo", ["--output", str(tmp_path / str(number)), "--set", *pairs])
        except SystemExit as error:
            status = error.code
        told = capsys.readouterr().err
        assert status in (0, 2), (pairs, status, told)
        if status:
            refused += 1
            assert any(name in told for name in chosen), (pairs, told)
            assert not PYTHON.search(told.replace("None", "", 2 * ("None" in chosen.values()))), (pairs, told)
    assert refused > 50
