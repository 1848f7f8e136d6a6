# SPDX-License-Identifier: Apache-2.0
"""Needles in prompts of 120 000 tokens, at the head sizes of Llama 3.1 8B: found as by plain torch."""

import pytest
from test_engine import DEVICE

from engine.harness import serve, start_core
from flashinfer_backend.core.sampling_params import SamplingParams
from needles import ANSWER, CASES, hide, make_needle_model, questions

pytestmark = pytest.mark.gpu

LENGTH = 120_000
SETTINGS = {
    "device": DEVICE,
    "dtype": "bfloat16",
    "max_seq_len": 131072,
    "max_num_tokens": 8192,
    "max_num_tokens_while_decoding": 2048,
    "max_tokens_in_paged_kv_cache": 400_000,
    "enable_kv_cache_reuse": True,
}


@pytest.mark.parametrize(
    ("backend", "cache"), [("auto", "auto"), ("auto", "fp8_e4m3"), ("fa2", "auto"), ("torch", "auto")]
)
def test_needles_are_found(backend, cache, tmp_path):
    model = make_needle_model(tmp_path / "model", heads=32, kv_heads=8, head_dim=128)
    core = start_core(model, **SETTINGS, attention_backend=backend, kv_cache_dtype=cache)
    params = SamplingParams(max_tokens=1, temperature=0)
    with serve(core, tmp_path / "run") as client:
        for seed, (depths, values) in enumerate(CASES):
            first, second = questions(hide(LENGTH, depths, values, seed))
            expected = [[ANSWER + value] for value in values]
            assert client.generate([first], params) == expected[:1]
            # Behind the cached prefix, and next to the same prompt once more.
            reused = core.scheduler.prompt_tokens_reused
            assert client.generate([second, first], params) == expected[::-1]
            assert core.scheduler.prompt_tokens_reused > reused + LENGTH
