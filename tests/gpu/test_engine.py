# SPDX-License-Identifier: Apache-2.0
"""The whole engine on a GPU: kernels and graphs against the same engine in plain torch."""

from functools import partial
from pathlib import Path

import pytest
import torch
from comparing import SETTINGS
from transformers import AutoModelForCausalLM

from checkpoints import make_checkpoint
from engine import harness
from engine.harness import serve, start_core
from flashinfer_backend.core.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

# Sizes that FlashInfer has; a wide spread of logits, so that bfloat16 seldom changes the best token.
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "initializer_range": 0.08,
}
TOLERANCE = 0.5  # of logits that spread by about 2
DEVICE = "cuda"
make_prompts = partial(harness.make_prompts, longest=150)


def generate(folder: Path, run_dir: Path, params: SamplingParams, **settings: object) -> list[list[int]]:
    core = start_core(folder, **(SETTINGS | settings))
    with serve(core, run_dir) as client:
        return client.generate(make_prompts(12), params)


def shortfalls(
    folder: Path, produced: list[list[int]], prompts: list[list[int]] | None = None
) -> torch.Tensor:
    """By how much each produced token's logit is below the best one, in float32 by transformers. prompts:
    default, those of make_prompts."""
    # transformers' usual attention leaves out soft caps.
    how = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, **how).eval()
    result = []
    for prompt, tokens in zip(prompts or make_prompts(12), produced, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        result.append(logits.amax(-1) - logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0])
    return torch.cat(result)


@pytest.mark.parametrize("kind", ["llama3-rope", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("backend", ["auto", "fa2"])
def test_greedy_tokens_are_the_best_or_nearly(kind, backend, tmp_path):
    """In bfloat16 near ties may fall either way, and the texts part for good: so each token is judged in
    the context that was really produced."""
    folder = make_checkpoint(kind, tmp_path / "model", **SIZES)
    params = SamplingParams(max_tokens=32, temperature=0.0)
    produced = generate(folder, tmp_path / "run", params, attention_backend=backend)
    short = shortfalls(folder, produced)
    assert (short == 0).float().mean() > 0.9, f"{(short > 0).sum()} of {len(short)} tokens are not the best"
    assert short.max() < TOLERANCE, f"a token is {short.max():.2f} below the best logit"


def test_graphs_do_not_change_what_is_produced(tmp_path):
    """Steps in graphs and steps launched one by one: the same quality, hence the same computation."""
    folder = make_checkpoint("llama", tmp_path / "model", **SIZES)
    params = SamplingParams(max_tokens=32, temperature=0.0)
    for name in ("none", "auto"):
        produced = generate(folder, tmp_path / name, params, cuda_graph_batch_sizes=name)
        assert shortfalls(folder, produced).max() < TOLERANCE, f"cuda_graph_batch_sizes={name}"


def test_preemption_and_prefix_reuse_leave_nothing(tmp_path):
    folder = make_checkpoint("llama", tmp_path / "model", **SIZES)
    params = SamplingParams(max_tokens=64, temperature=0.0)
    core = start_core(folder, **(SETTINGS | {"max_tokens_in_paged_kv_cache": 800, "max_seq_len": 256}))
    with serve(core, tmp_path / "run") as client:  # checks on leaving that no block and no slot is lost
        first = client.generate(make_prompts(12), params)
        assert [len(row) for row in first] == [64] * 12
        client.generate(make_prompts(12), params)
    assert core.scheduler.preemptions > 0
