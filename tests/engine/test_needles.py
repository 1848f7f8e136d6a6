# SPDX-License-Identifier: Apache-2.0
"""Needles in long prompts are found in chunks, by several requests at once and behind a cached prefix, with a
KV cache in 32 bits and in e4m3."""

import pytest
import torch
import transformers

from engine.harness import serve, start_core
from flashinfer_backend.core.sampling_params import SamplingParams
from needles import ANSWER, CASES, hide, make_needle_model, questions

LENGTH = 2400
GREEDY = SamplingParams(max_tokens=1, temperature=0)


def test_transformers_finds_them(tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        make_needle_model(tmp_path / "model"), attn_implementation="sdpa"
    )
    for seed, (depths, values) in enumerate(CASES):
        for kind, ids in enumerate(questions(hide(LENGTH, depths, values, seed))):
            with torch.inference_mode():
                logits = model(torch.tensor([ids]), logits_to_keep=1).logits[0, -1]
            assert int(logits.argmax()) == ANSWER + values[kind]


@pytest.mark.parametrize("cache", ["auto", "fp8_e4m3"])
def test_the_engine_finds_them(cache, tmp_path):
    core = start_core(
        make_needle_model(tmp_path / "model"),
        max_seq_len=4096,
        max_num_tokens=400,
        max_tokens_in_paged_kv_cache=16_000,
        enable_kv_cache_reuse=True,
        kv_cache_dtype=cache,
    )
    with serve(core, tmp_path / "run") as client:
        for seed, (depths, values) in enumerate(CASES):
            asked = questions(hide(LENGTH, depths, values, seed))
            expected = [[ANSWER + value] for value in values]
            assert client.generate(asked, GREEDY) == expected
            reused = core.scheduler.prompt_tokens_reused
            assert client.generate(asked, GREEDY) == expected
            assert core.scheduler.prompt_tokens_reused == reused + 2 * (LENGTH // 16 * 16)
