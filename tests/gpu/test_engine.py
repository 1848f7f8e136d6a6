# SPDX-License-Identifier: Apache-2.0
"""The whole engine on a GPU: kernels and graphs against the same engine in plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpoints import make_checkpoint
from engine.harness import serve, start_core
from flashinfer_backend.transport.protocol import SamplingParams

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
SETTINGS = {"device": "cuda", "max_num_tokens": 512, "max_num_tokens_while_decoding": 256, "max_num_seqs": 16}


def make_prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(1, 150, (count,), generator=generator).tolist()
    return [torch.randint(3, 250, (n,), generator=generator).tolist() for n in lengths]


def generate(folder: Path, run_dir: Path, params: SamplingParams, **settings: object) -> list[list[int]]:
    core = start_core(folder, **(SETTINGS | settings))
    with serve(core, run_dir) as client:
        return client.generate(make_prompts(12), params)


@pytest.mark.parametrize("kind", ["llama3-rope", "mistral", "qwen2", "qwen3"])
def test_greedy_ids_agree_with_float32_on_plain_torch(kind, tmp_path):
    """bfloat16 rounding may part two runs for good, so most of the tokens must agree, not all."""
    folder = make_checkpoint(kind, tmp_path / "model", **SIZES)
    params = SamplingParams(max_tokens=32, temperature=0.0)
    expected = generate(folder, tmp_path / "a", params, attention_backend="torch", dtype="float32")
    for backend in ("auto", "fa2", "xqa"):
        produced = generate(folder, tmp_path / backend, params, attention_backend=backend)
        same = [
            p == e for row, ref in zip(produced, expected, strict=True) for p, e in zip(row, ref, strict=True)
        ]
        assert sum(same) / len(same) > 0.75, f"{backend}: {sum(same)} of {len(same)} tokens agree"


def test_graphs_do_not_change_the_result(tmp_path):
    folder = make_checkpoint("llama", tmp_path / "model", **SIZES)
    params = SamplingParams(max_tokens=32, temperature=0.8, seed=5)
    eager = generate(folder, tmp_path / "a", params, cuda_graph_batch_sizes="none")
    graphs = generate(folder, tmp_path / "b", params)
    same = [p == e for row, ref in zip(graphs, eager, strict=True) for p, e in zip(row, ref, strict=True)]
    assert sum(same) / len(same) > 0.75, f"{sum(same)} of {len(same)} tokens agree"


def test_preemption_and_prefix_reuse_leave_nothing(tmp_path):
    folder = make_checkpoint("llama", tmp_path / "model", **SIZES)
    params = SamplingParams(max_tokens=64, temperature=0.0)
    core = start_core(folder, **(SETTINGS | {"max_tokens_in_paged_kv_cache": 800, "max_seq_len": 256}))
    with serve(core, tmp_path / "run") as client:  # checks on leaving that no page and no slot is lost
        first = client.generate(make_prompts(12), params)
        assert [len(row) for row in first] == [64] * 12
        client.generate(make_prompts(12), params)
    assert core.scheduler.preemptions > 0
    assert core.scheduler.prompt_tokens_reused > 0
