# SPDX-License-Identifier: Apache-2.0
"""FP8 checkpoints and the FP8 KV cache through the real engine, against a float64 model of what they mean."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.harness import serve, start_core
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.engine.start import Core
from flashinfer_backend.worker import memory
from quantised import LAYOUTS, PROMPTS, Quantised, make_quantised

VOCAB = 256
FAMILIES = ("llama", "qwen2", "qwen3")
CASES = [(layout, "llama") for layout in LAYOUTS if layout != "dense"] + [
    ("ct-dynamic", "qwen2"),  # with a bias of qkv
    ("modelopt", "qwen2"),
    ("blocks", "qwen2"),
    ("on-load", "qwen2"),
    ("ct-dynamic", "qwen3"),
    ("blocks", "qwen3"),
    ("on-load", "qwen3.5"),
    ("blocks", "qwen2-moe"),
    ("ct-dynamic", "qwen3.5-moe"),
    ("blocks", "qwen3.5-moe"),
    ("ct-dynamic", "qwen3-moe"),
    ("blocks", "qwen3-moe"),
    ("on-load", "qwen3-moe"),
]
IN_FP8 = {"kv_cache_dtype": "fp8_e4m3"}


def answers(core: Core, run_dir: Path) -> list[tuple[torch.Tensor, list[int]]]:
    """The context logits of each of PROMPTS and eight tokens behind it, served in one batch."""
    params = SamplingParams(max_tokens=8, temperature=0.0, context_logits=True)
    with serve(core, run_dir) as client:
        tokens = client.generate(PROMPTS, params)
        sent = [client.reports[i][0].context_logits for i in range(1, len(PROMPTS) + 1)]
    logits = [torch.from_numpy(np.frombuffer(each, np.float32).reshape(-1, VOCAB).copy()) for each in sent]
    return list(zip(logits, tokens, strict=True))


def check(checkpoint: Quantised, found: list[tuple[torch.Tensor, list[int]]], **reference: Any) -> None:
    """A number half-way between two of e4m3 may be rounded to either, by an error of float32 in it; then its
    position and all behind it in its prompt differ as roundings do. So over half of the positions are before
    the first difference of their prompt, where all agree to float32; the others agree to e4m3."""
    before = count = 0
    sequences = [prompt + tokens for prompt, (_, tokens) in zip(PROMPTS, found, strict=True)]
    meant = checkpoint.logits_of(sequences, **reference)
    for prompt, (logits, tokens), every in zip(PROMPTS, found, meant, strict=True):
        expected, behind = every[: len(prompt)], every[len(prompt) - 1 : -1]
        error = (logits - expected).abs()
        short = behind.amax(-1) - behind[range(len(tokens)), tokens]  # of the best, by a token's logit
        assert error.square().mean().sqrt() < 0.3 and short.max() < 0.5  # logits' standard deviation is 1.6
        differs = torch.cat([error.amax(-1), short]) > 1e-4
        before += int((differs.cumsum(0) == 0).sum())
        count += len(differs)
    assert before > count / 2, f"only {before} of {count} positions are before a difference"


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_logits_and_text_are_those_of_the_format(layout, kind, tmp_path):
    """Also where the checkpoint has scales for a KV cache that is not in FP8."""
    checkpoint = make_quantised(layout, kind, tmp_path / "model", kv_scales=layout.startswith("modelopt"))
    knobs = {"quantization": "fp8"} if layout == "on-load" else {}
    check(checkpoint, answers(start_core(checkpoint.folder, **knobs), tmp_path / "run"))


@pytest.mark.parametrize(
    ("layout", "kind", "scaled"),
    [("dense", kind, False) for kind in (*FAMILIES, "qwen3-moe")]
    + [(layout, "llama", True) for layout in ("dense", "ct-dynamic", "ct-static", "modelopt")],
)
def test_kv_cache_in_fp8(layout, kind, scaled, tmp_path):
    checkpoint = make_quantised(layout, kind, tmp_path / "model", kv_scales=scaled)
    check(checkpoint, answers(start_core(checkpoint.folder, **IN_FP8), tmp_path / "run"), fp8_cache=True)


def test_a_prefix_is_reused_from_a_cache_in_fp8(tmp_path):
    checkpoint = make_quantised("dense", "llama", tmp_path / "model", kv_scales=True)
    prompt = torch.randint(3, 256, (150,), generator=torch.manual_seed(1)).tolist()
    core = start_core(checkpoint.folder, **IN_FP8)
    with serve(core, tmp_path / "run") as client:
        params = SamplingParams(max_tokens=16, temperature=0.0)
        assert client.generate([prompt], params) == client.generate([prompt], params)
    assert core.scheduler.prompt_tokens_reused == 144


def test_a_cache_in_fp8_holds_more_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "CPU_KV_BYTES", 1 << 20)
    folder = make_quantised("dense", "llama", tmp_path).folder
    tokens = [
        start_core(folder, **options).scheduler.kv_manager.pools[0].num_blocks * 16
        for options in ({"dtype": "bfloat16"}, {"dtype": "bfloat16"} | IN_FP8)
    ]
    # K and V of 2 layers and 2 heads of 64, two bytes or one each
    assert tokens == [(1 << 20) // 1024, (1 << 20) // 512]
