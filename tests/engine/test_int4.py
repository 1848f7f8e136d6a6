# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with weights of 4 bits through the real engine, against a float64 model of what they mean."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.harness import serve, start_core
from flashinfer_backend.core.sampling_params import SamplingParams
from int4_checkpoints import INT4_LAYOUTS, make_int4
from quantised import PROMPTS, Quantised

VOCAB = 256
CASES = [(layout, "llama") for layout in INT4_LAYOUTS] + [
    ("awq", "qwen2"),  # with a bias of qkv
    ("gptq", "qwen2"),
    ("packed-zeros", "qwen3"),
    ("gptq-ordered", "mistral"),
]


def check(checkpoint: Quantised, run_dir: Path) -> None:
    """Context logits of PROMPTS, in one batch, and eight tokens behind each."""
    params = SamplingParams(max_tokens=8, temperature=0.0, context_logits=True)
    with serve(start_core(checkpoint.folder), run_dir) as client:
        produced = client.generate(PROMPTS, params)
        sent = [client.reports[i][0].context_logits for i in range(1, len(PROMPTS) + 1)]
    for prompt, tokens, each in zip(PROMPTS, produced, sent, strict=True):
        logits = torch.from_numpy(np.frombuffer(each, np.float32).reshape(-1, VOCAB).copy())
        every = checkpoint.logits(prompt + tokens)
        expected, behind = every[: len(prompt)], every[len(prompt) - 1 : -1]
        assert (logits - expected).abs().max() < 1e-4  # their standard deviation is 1.6
        assert (behind.amax(-1) - behind[range(len(tokens)), tokens]).max() < 1e-4


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_logits_and_text_are_those_of_the_format(layout, kind, tmp_path):
    check(make_int4(layout, kind, tmp_path / "model"), tmp_path / "run")
