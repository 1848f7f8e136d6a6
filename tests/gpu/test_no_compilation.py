# SPDX-License-Identifier: Apache-2.0
"""No request makes the engine compile or load a kernel: all of that is done when it starts.

FLASHINFER_BACKEND_TEST_SHAPE=FOLDER takes another shape than a small one: a folder with a config.json, whose
weights are random.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compilations import Compilations, watch

from checkpoints import make_checkpoint
from engine.harness import Client, serve, start_core
from flashinfer_backend.core.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

# The bundled tokenizer's vocabulary, for guides.
SIZES = {
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.08,
    "max_position_embeddings": 4096,
}
SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "tokenizer_dir": "bundled",
    "max_num_seqs": 100,
    "max_num_tokens": 2048,
    "max_num_tokens_while_decoding": 512,
    "max_seq_len": 4096,
}
GUIDE = {"grammar_type": "regex", "grammar": "(cat|dog)s? [0-9]{3,5}", "end_id": 1}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.7},
    "top-k and top-p": {"top_k": 20, "top_p": 0.9},
    "repetition penalty": {"repetition_penalty": 1.3},
    "presence and frequency penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.3},
    "bias": {"bias_ids": [5, 9], "bias_values": [3.0, -3.0]},
    "bad words": {"bad_words": [[7], [8, 9], [3, 4, 5]]},
    "allowed ids": {"allowed_ids": [5, 6, 7, 90]},
    "min_tokens": {"min_tokens": 4, "end_id": 2, "temperature": 1.0},
    "guide": GUIDE,
    "guide and what changes logits": GUIDE
    | {"repetition_penalty": 1.2, "bad_words": [[7]], "bias_ids": [5], "bias_values": [1.0], "top_p": 0.9},
    "log probs": {"log_probs": True},
    "top log probs": {"log_probs": True, "top_logprobs": 5},
    "generation logits": {"generation_logits": True},
    "context logits": {"context_logits": True},
    "log probs of prompts": {"prompt_log_probs": 0},
    "top log probs of prompts": {"prompt_log_probs": 20},
    "all at once": {
        "top_k": 20,
        "top_p": 0.9,
        "repetition_penalty": 1.2,
        "bias_ids": [5],
        "bias_values": [1.0],
        "bad_words": [[7]],
        "min_tokens": 2,
        "end_id": 2,
        "log_probs": True,
    },
}
ROUNDS = [*range(1, 21), 33, 70, 100]  # requests at a time


@pytest.fixture(scope="module", params=["auto", "none"], ids=["graphs", "no graphs"])
def engine(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, Compilations]]:
    folder = tmp_path_factory.mktemp("engine")
    settings = SETTINGS | {"cuda_graph_batch_sizes": request.param}
    if shape := os.environ.get("FLASHINFER_BACKEND_TEST_SHAPE"):
        checkpoint = Path(shape)
        settings |= {"load_format": "dummy", "tokenizer_dir": "", "kv_cache_free_gpu_mem_fraction": 0.5}
    else:
        checkpoint = make_checkpoint("llama", folder / "model", **SIZES)
    with watch() as found:
        core = start_core(checkpoint, **settings)
        assert found.modules and found.kernels, "CUPTI told of nothing"
        with serve(core, folder / "run") as client:
            yield client, found


def prompts(count: int, longest: int, shortest: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, 2000, (n,), generator=generator).tolist() for n in lengths]


def check(found: Compilations, what: str) -> None:
    assert not found.built, f"{what}: FlashInfer compiled {found.built}"
    assert not found.loaded, f"{what}: FlashInfer loaded {found.loaded}"
    variants = "\n".join(found.triton)
    assert not found.triton, f"{what}: {len(found.triton)} variants of Triton kernels were new:\n{variants}"
    modules, kernels = "\n".join(found.modules), "\n".join(found.kernels)
    assert not found.modules, f"{what}: CUDA loaded {len(found.modules)} modules:\n{modules}"
    assert not found.kernels, f"{what}: {len(found.kernels)} kernels ran for the first time:\n{kernels}"


@pytest.mark.parametrize("kind", [*KINDS, "all"])
def test_requests_of_a_kind_and_of_all_in_one_batch(engine, kind):
    client, found = engine
    found.clear()
    kinds = list(KINDS.values()) if kind == "all" else [KINDS[kind]]
    most = 100 if kind == "all" else 5  # tokens more than the fewest
    for count in ROUNDS:
        each = [
            SamplingParams(max_tokens=3 + i % most, seed=i, **kinds[i % len(kinds)]) for i in range(count)
        ]
        client.generate(prompts(count, 60), each)
        check(found, f"{count} requests with {kind}")


@pytest.mark.parametrize("longest", [30, 300, 900, 1800, 3900])
def test_prompts_of_all_lengths(engine, longest):
    """Beyond 2048 tokens in chunks; with others that stream meanwhile, few and many."""
    client, found = engine
    found.clear()
    params = SamplingParams(max_tokens=40, temperature=0.0)
    for count in (1, 2, 5, 20):
        client.generate(prompts(count, longest, longest // 2), params)
        check(found, f"{count} prompts of up to {longest} tokens")
    for others in (7, 70):
        stream = SamplingParams(max_tokens=200, temperature=0.0)
        streams = [client.submit([9, 8, 7], stream) for _ in range(others)]
        client.generate(prompts(3, longest, longest // 2), params)
        client.wait(streams)
        check(found, f"prompts of up to {longest} tokens while {others} stream")


def test_several_sequences_of_a_request(engine):
    client, found = engine
    found.clear()
    for count in ROUNDS:
        prompt = prompts(count, 200, 100)[0]
        params = [SamplingParams(max_tokens=6, temperature=1.0, top_p=0.9, seed=i) for i in range(count)]
        first = client.submit(prompt, params[0])
        client.wait([first, *(client.submit(prompt, each, share_with=first) for each in params[1:])])
        check(found, f"{count} sequences")


def test_cached_prefixes(engine):
    client, found = engine
    found.clear()
    prefix = prompts(1, 700, 700)[0]
    for extra in (1, 2, 17, 64, 129, 400):
        client.generate([prefix + [5] * extra], SamplingParams(max_tokens=4, temperature=0.0))
        check(found, f"{extra} tokens behind a cached prefix")
