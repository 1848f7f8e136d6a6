# SPDX-License-Identifier: Apache-2.0
"""The bundled model: its size, its tokenizer, what it says, and the script that trains it."""

import importlib
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "backend_src/flashinfer_backend/bundled_model"
TOOLS = ROOT / "tools/bundled_model"
RECORD = json.loads((ROOT / "tests/bundled_continuation.json").read_text(encoding="utf-8"))
MINIATURE = (
    "--steps 4 --tokens-per-step 256 --length 32 --vocab-size 400 --tokenizer-documents 100 "
    "--hidden-size 32 --intermediate-size 64 --layers 1 --sample-tokens 4"
)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    found = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    found.generation_config.stop_strings = None  # of chats, for which generate() needs the tokenizer
    return found


def test_fits_into_five_megabytes():
    files = [p for p in FOLDER.rglob("*") if p.is_file()]
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= {
        p.name for p in files
    }
    assert sum(p.stat().st_size for p in files) <= 5_000_000


def test_files_agree(tokenizer):
    config = json.loads((FOLDER / "config.json").read_text())
    assert len(tokenizer) == config["vocab_size"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (
        config["bos_token_id"],
        config["eos_token_id"],
        config["pad_token_id"],
    )
    with safe_open(FOLDER / "model.safetensors", "pt") as weights:
        assert "lm_head.weight" not in weights.keys()  # noqa: SIM118  tied; safe_open is no mapping
        embedding = weights.get_tensor("model.embed_tokens.weight")
    assert embedding.shape == (config["vocab_size"], config["hidden_size"])
    assert embedding.dtype == torch.bfloat16


def test_encoding_begins_with_bos(tokenizer):
    assert tokenizer("Hello").input_ids[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in tokenizer("Hello", add_special_tokens=False).input_ids


def test_every_byte_has_a_token(tokenizer):
    text = bytes(range(128)).decode() + "".join(map(chr, range(128, 0x900))) + "\u4f60\U0001f642\U0010ffff"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def continuation(model, tokenizer, prompt, max_tokens):
    inputs = tokenizer(prompt, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)[0, inputs.input_ids.shape[1] :]
    return ids.tolist()


def test_known_greedy_continuation(model, tokenizer):
    ids = continuation(model, tokenizer, RECORD["prompt"], RECORD["max_tokens"])
    assert ids == RECORD["token_ids"]
    assert len(ids) == RECORD["max_tokens"]
    assert tokenizer.decode(ids) == RECORD["continuation"]


def test_knows_its_paragraphs_and_ends_them(model, tokenizer, make_text):
    for paragraph in make_text.paragraphs():
        begin = len(tokenizer(" ".join(paragraph.split()[:5])).input_ids)
        ids = [*tokenizer(paragraph).input_ids, tokenizer.eos_token_id]
        with torch.inference_mode():
            likeliest = model(torch.tensor([ids[:-1]])).logits[0].argmax(-1)
        assert likeliest[begin - 1 :].tolist() == ids[begin:], paragraph


@pytest.fixture(scope="module")
def make_text():
    sys.path.insert(0, str(TOOLS))
    try:
        return importlib.import_module("make_text")
    finally:
        sys.path.remove(str(TOOLS))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Mia has a red ball. Tom has a blue kite.\nQuestion: Who has the kite?", " Tom has the blue kite."),
        ("Leo has a green hat. Ruth went to the lake.\nQuestion: Where is Ruth?", " Ruth is at the lake."),
    ],
)
def test_answers_from_the_text_before(model, tokenizer, text, answer):
    ids = continuation(model, tokenizer, f"{text}\nAnswer:", 12)
    assert tokenizer.decode(ids).startswith(answer)


def test_answers_through_the_chat_template(model, tokenizer):
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "what is the capital of France?"}], tokenize=False
    )
    inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    assert inputs.input_ids[0].tolist().count(tokenizer.bos_token_id) == 1
    ids = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs.input_ids.shape[1] :]
    assert tokenizer.decode(ids).startswith(" The capital of France is Paris.")


def arguments(output):
    """Of the script, in miniature."""
    words = [str(TOOLS / "train.py"), *MINIATURE.split(), "--seed", "1", "--output", str(output)]
    return [*words, "--record", str(output / "record.json")]


def written(output):
    return {p.name: p.read_bytes() for p in output.iterdir()}


def test_training_is_repeatable(tmp_path, monkeypatch):
    """In a process of its own, and in this one, which hashes words otherwise."""
    a, b = tmp_path / "a", tmp_path / "b"
    done = subprocess.run([sys.executable, *arguments(a)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(sys, "argv", arguments(b))
    monkeypatch.syspath_prepend(str(TOOLS))
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        torch.use_deterministic_algorithms(False)
    first, again = written(a), written(b)
    assert set(first) >= {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert first == again
    AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert json.loads(first["record.json"])["max_tokens"] == RECORD["max_tokens"]


def test_text_depends_on_the_seed_only(make_text):
    first, again, other = (list(make_text.documents(seed, 200)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert set(make_text.paragraphs()) & set(first)
    assert not set(make_text.paragraphs()) & set(make_text.documents(1, 200, with_paragraphs=False))
