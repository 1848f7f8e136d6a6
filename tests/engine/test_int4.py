# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with weights of 4 bits through the real engine, against a float64 model of what they mean.
MXFP4 is compared with transformers, with the same numbers in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from editing import edit_config, edit_tensors
from engine.harness import fewer, make_prompts, serve, start_core
from engine.ranks_in_threads import start_ranks
from engine.test_fp8 import answers
from engine.test_generate import reference
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.core.shard import Shard
from flashinfer_backend.engine.start import Core
from flashinfer_backend.models.errors import UnsupportedModelError
from flashinfer_backend.models.hf import read_spec
from flashinfer_backend.models.transformer import Transformer
from flashinfer_backend.models.weights import WeightsError, load_weights
from flashinfer_backend.ops import torch_ops
from int4_checkpoints import INT4_LAYOUTS, make_int4
from mxfp4_checkpoints import QUANTIZATION, make_mxfp4
from quantised import PROMPTS, Quantised

CASES = [(layout, "llama") for layout in INT4_LAYOUTS if layout != "gptq-qwen3.5"] + [
    ("awq", "qwen2"),  # with a bias of qkv
    ("gptq", "qwen2"),
    ("packed-zeros", "qwen3"),
    ("gptq-ordered", "mistral"),
    ("awq", "qwen3-moe"),
    ("awq", "mixtral"),
    ("gptq", "qwen3-moe-mixed"),
    ("packed", "qwen3-moe"),
    ("awq", "qwen3.5"),
    ("packed", "qwen3.5"),  # a matrix that is read in parts, without the order of its columns
    ("gptq", "qwen3-next"),
    ("gptq-qwen3.5", "qwen2-moe"),  # whose shared expert stays in 16 bits
    ("gptq-rows", "qwen2-moe"),
    ("packed", "qwen2-moe"),
]


def sizes_of(kind: str) -> dict[str, Any]:
    """With experts, one layer keeps states: errors of float32 grow from one to the next."""
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    return {} if kind == "qwen3.5" else fewer(kind) | (layers if kind == "qwen3-next" else {})


def check(checkpoint: Quantised, core: Core, run_dir: Path) -> None:
    """Context logits of PROMPTS, in one batch, and eight tokens behind each."""
    found = answers(core, run_dir)
    sequences = [prompt + tokens for prompt, (_, tokens) in zip(PROMPTS, found, strict=True)]
    for prompt, (logits, tokens), every in zip(PROMPTS, found, checkpoint.logits_of(sequences), strict=True):
        expected, behind = every[: len(prompt)], every[len(prompt) - 1 : -1]
        assert (logits - expected).abs().max() < 1e-4  # their standard deviation is 1.6
        assert (behind.amax(-1) - behind[range(len(tokens)), tokens]).max() < 1e-4


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_logits_and_text_are_those_of_the_format(layout, kind, tmp_path):
    checkpoint = make_int4(layout, kind, tmp_path / "model", **sizes_of(kind))
    check(checkpoint, start_core(checkpoint.folder), tmp_path / "run")


@pytest.mark.parametrize(
    ("layout", "groups"),
    [
        ("awq", 1),
        ("gptq-zeros", 1),
        ("gptq-zeros", 2),
        ("gptq-rows", 1),
        ("packed-zeros", 1),
        ("packed-rows", 1),
    ],
)
def test_ranks_serve_4_bits(layout, groups, tmp_path, monkeypatch):
    kind = "qwen3-moe" if layout == "gptq-zeros" else "llama"
    checkpoint = make_int4(layout, kind, tmp_path / "model")
    core = start_ranks(checkpoint.folder, 2, monkeypatch, expert_groups=groups)
    check(checkpoint, core, tmp_path / "run")
    core.close()


@pytest.mark.parametrize(
    ("layout", "size", "problem"),
    [
        ("gptq-ordered", 1, "g_idx of layer 0's .*experts.* puts? columns"),
        ("gptq-ordered", 2, "columns of several ranks into one group; set tensor_parallel_size=1"),
        ("awq", 4, "down_proj have 32 columns on each of 4 ranks; .* multiple of 64"),
    ],
)
def test_groups_that_ranks_would_cut_are_refused(layout, size, problem, tmp_path):
    sizes = {"head_dim": 128, "intermediate_size": 128} if size == 4 else {}
    folder = make_int4(layout, "llama" if size > 1 else "qwen3-moe", tmp_path, **sizes).folder
    with pytest.raises((UnsupportedModelError, WeightsError), match=problem):
        config = read_spec(folder).share(Shard(size - 1, size))
        load_weights(Transformer(config, torch_ops, "float32", "cpu"), folder)


@pytest.mark.parametrize(("ranks", "groups"), [(1, 1), (2, 1), (2, 2)])
def test_mxfp4_gives_the_ids_of_transformers(ranks, groups, tmp_path, monkeypatch):
    """On two ranks an expert's columns are cut between groups of 32, and one rank adds its bias; or each rank
    has whole experts."""
    folder, dense = make_mxfp4(tmp_path, intermediate_size=96 if groups == 2 else 128)
    prompts, count = make_prompts(4, 30), 12
    if ranks == 1:
        core = start_core(folder, max_num_seqs=4, max_seq_len=160)
    else:
        core = start_ranks(folder, ranks, monkeypatch, expert_groups=groups)
    with serve(core, tmp_path / "run") as client:
        answers = client.generate(prompts, SamplingParams(max_tokens=count, temperature=0.0))
    core.close()
    assert answers == reference(dense, prompts, answers, count)


def test_transformers_reads_the_same_numbers_of_mxfp4(tmp_path):
    """So the layout is the published one."""
    folder, dense = make_mxfp4(tmp_path)
    how = transformers.Mxfp4Config(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=how
    )
    expected = load_file(dense / "model.safetensors")["model.layers.1.mlp.experts.gate_up_proj"]
    found = dict(model.named_parameters())["model.layers.1.mlp.experts.gate_up_proj"]
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=0)


def test_mxfp4_that_cannot_be_read_is_refused(tmp_path):
    folder, _ = make_mxfp4(tmp_path)
    with pytest.raises(
        UnsupportedModelError, match=r"down_proj would have 48 columns on each of 2 ranks; in"
    ):
        read_spec(folder).share(Shard(0, 2))
    scales = "model.layers.1.mlp.experts.down_proj_scales"
    edit_tensors(folder, lambda tensors: tensors[scales][2, 3, 1].fill_(255))
    with pytest.raises(WeightsError, match=r"down_proj_scales has scales above 128 \(2"):
        load_weights(Transformer(read_spec(folder), torch_ops, "float32", "cpu"), folder)
    others = QUANTIZATION["modules_to_not_convert"][1:]
    edit_config(folder, quantization_config=QUANTIZATION | {"modules_to_not_convert": others})
    with pytest.raises(
        UnsupportedModelError, match=r"q_proj.* should not be in MXFP4.*modules_to_not_convert"
    ):
        read_spec(folder)
