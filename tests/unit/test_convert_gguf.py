# SPDX-License-Identifier: Apache-2.0
"""A GGUF file becomes a checkpoint that is served, or is refused by name."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from checkpoints import make_model
from flashinfer_backend.core.paths import resolve_model_dir
from flashinfer_backend.models.hf import read_spec
from flashinfer_backend.openai.template import ChatTemplate
from flashinfer_backend.text.tokenizer import TextTokenizer

gguf = pytest.importorskip("gguf")
CHAT_TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
VOCAB = 2048  # of the bundled model's tokenizer


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    file = Path(__file__).parents[2] / "tools" / "convert_gguf.py"
    spec = importlib.util.spec_from_file_location("convert_gguf", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(file: Path, model: Any, kind: str, pre: str = "gpt-2", drop: str = "", **more: str) -> None:
    """The model as llama.cpp lays it out, its matrices in 8 bits."""
    config, layers = model.config, model.config.num_hidden_layers
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    writer = gguf.GGUFWriter(file, kind)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for name, value in more.items():
        writer.add_string(f"{kind}.{name.replace('__', '.')}", value)
    tokenizer = AutoTokenizer.from_pretrained(resolve_model_dir("bundled"))
    words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(words)
    writer.add_token_types([3 if word in tokenizer.all_special_tokens else 1 for word in words])
    writer.add_token_merges([" ".join(pair) for pair in merges(tokenizer)])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(CHAT_TEMPLATE)
    names = gguf.get_tensor_name_map({v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[kind], layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, suffix = name.rpartition(".")
        data = tensor.float().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        if kind == "llama" and (
            own := heads.get(stem.rpartition(".")[2])
        ):  # rotary pairs are neighbours there
            data = data.reshape(own, 2, -1, data.shape[-1]).swapaxes(1, 2).reshape(data.shape)
        target = f"{names.get_name(stem)}.{suffix}"
        if target == drop:
            continue
        if data.ndim == 2:
            packed = gguf.quants.quantize(data, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(target, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(target, np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def merges(tokenizer: Any) -> list[list[str]]:
    found = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    return [pair.split(" ") if isinstance(pair, str) else pair for pair in found]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_converted_model_computes_what_the_original_does(
    kind: str, tool: ModuleType, tmp_path: Path
) -> None:
    model = make_model(kind, vocab_size=VOCAB)
    write(tmp_path / "model.gguf", model, kind)
    tool.convert(tmp_path / "model.gguf", tmp_path / "made")
    spec = read_spec(tmp_path / "made")
    assert spec.eos_token_ids[0] == 1
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32)
    for name, tensor in model.state_dict().items():
        found = made.state_dict()[name]
        assert (found - tensor).abs().max() <= tensor.abs().max() / 100, (
            name
        )  # half a step of 8 bits, bfloat16
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected, got = model(ids).logits, made(ids).logits
    assert torch.nn.functional.cosine_similarity(expected, got, dim=-1).min() > 0.99
    original, tokenizer = (
        TextTokenizer(folder) for folder in (resolve_model_dir("bundled"), tmp_path / "made")
    )
    text = "Hello, it's 1984:  <|end_of_text|> naïve"
    assert tokenizer.encode_batch([text], False) == original.encode_batch([text], False)
    chat = [{"role": "user", "content": "Hi"}]
    template = ChatTemplate.load(tmp_path / "made")
    assert template and template.render(chat) == "<user>Hi"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"pre": "viking"}, "tokenizer.ggml.pre is viking"),
        ({"drop": "blk.1.ffn_up.weight"}, "lacks the tensors model.layers.1.mlp.up_proj.weight"),
        ({"rope__scaling__type": "yarn"}, "llama.rope.scaling.type"),
        ({"attention__novel": "on"}, "no place for the settings llama.attention.novel"),
    ],
)
def test_what_would_be_lost_is_refused(
    options: dict[str, str], named: str, tool: ModuleType, tmp_path: Path
) -> None:
    write(tmp_path / "model.gguf", make_model("llama", vocab_size=VOCAB), "llama", **options)
    with pytest.raises(tool.Refused, match=named):
        tool.convert(tmp_path / "model.gguf", tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_other_architectures_and_files_are_refused(tool: ModuleType, tmp_path: Path) -> None:
    for kind in ("mamba", "rwkv7"):
        writer = gguf.GGUFWriter(tmp_path / f"{kind}.gguf", kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(tool.Refused, match=f"the architecture {kind} is not served"):
            tool.convert(tmp_path / f"{kind}.gguf", tmp_path / "made")
    (tmp_path / "text.gguf").write_text("no GGUF file at all")
    with pytest.raises(SystemExit, match="convert_gguf"):
        tool.main([str(tmp_path / "text.gguf"), str(tmp_path / "made")])
