# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: the same answers from several ranks as from one, and what happens when one is lost."""

import functools
import logging
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from checkpoints import KINDS, make_checkpoint
from engine.harness import asks, fewer, make_prompts, serve, start_core
from engine.ranks_in_threads import start_ranks
from engine.test_fp8 import answers, check
from flashinfer_backend.core import progress
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.core.shard import Shard
from flashinfer_backend.core.step import Wants
from flashinfer_backend.engine.start import Core
from flashinfer_backend.models import weights
from flashinfer_backend.models.errors import UnsupportedModelError
from flashinfer_backend.models.hf import read_spec
from flashinfer_backend.models.transformer import Transformer
from flashinfer_backend.models.weights import load_weights
from flashinfer_backend.ops import torch_ops
from flashinfer_backend.ops.weight import Stored
from flashinfer_backend.sampling.logprobs import context_logits
from flashinfer_backend.worker import ranks
from flashinfer_backend.worker.warm_up import prompt_plan
from quantised import make_quantised
from thinned import some
from waiting import wait_for

# The longest is so long that what the cache has of it serves layers that keep states.
PROMPTS = make_prompts(8, 60)
PROMPTS[5] = (PROMPTS[5] + PROMPTS[3] + PROMPTS[0])[:90]
# Everything that rows can ask for, in one batch.
ASKED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 0.9, "top_p": 0.8, "top_k": 20, "seed": 4},
    {"repetition_penalty": 1.3, "log_probs": True, "top_logprobs": 3},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"bad_words": [[4], [9, 5]], "bias_ids": [7], "bias_values": [2.0], "allowed_ids": list(range(3, 90))},
    {"context_logits": True, "prompt_log_probs": 1},
    {"generation_logits": True},
]


def served(core: Core, run_dir: Path, max_tokens: int) -> tuple[Any, ...]:
    """What a mixed batch comes to, and then two equal prompts, of which one takes the other's blocks; log
    probabilities; the logits of a prompt."""
    params = [SamplingParams(**({"max_tokens": max_tokens, "temperature": 0.0} | asked)) for asked in ASKED]
    with serve(core, run_dir) as client:
        first = client.generate(PROMPTS, params)
        log_probs = [p for report in client.reports[4] for p in [report.log_prob] if p is not None]
        context, told = client.reports[7][0].context_logits, client.reports[7][0].prompt_log_probs
        log_probs += np.frombuffer(told, "<f4").reshape(-1, 4)[:, [1, 3]].ravel().tolist()
        longest = max(PROMPTS, key=len)
        again = client.generate([longest, longest], params[0])
    core.close()
    logits = torch.frombuffer(bytearray(context), dtype=torch.float32)
    return first, again, log_probs, logits


def agree(found: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    *texts, log_probs, logits = found
    *expected_texts, expected_log_probs, expected_logits = expected
    assert texts == expected_texts
    assert log_probs == pytest.approx(expected_log_probs, abs=1e-4)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-4)


FEW = [
    ("llama3-rope", 2, 14),
    ("llama-tied", 4, 6),
    ("qwen3-moe", 4, 6),
    ("phi3", 2, 6),
    ("olmo2", 4, 6),
    ("gemma3", 2, 6),
    ("gpt-oss", 2, 6),
    ("qwen2-moe", 2, 6),
    ("mpt", 2, 6),
    ("apertus", 2, 6),
    ("llama4", 2, 6),
    ("qwen3.5", 2, 14),
    ("qwen3-next", 2, 6),
]
EVERY = [*FEW, *((kind, 2, 6) for kind in KINDS.keys() - {kind for kind, *_ in FEW})]


@pytest.fixture(scope="module")
def of_one(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], tuple[Path, Any, Any]]:
    """A checkpoint of a kind, settings, and what it answers on one rank."""

    @functools.cache
    def made(kind: str, max_tokens: int) -> tuple[Path, Any, Any]:
        folder = tmp_path_factory.mktemp(kind)
        model = make_checkpoint(kind, folder / "model", vocab_size=250, **fewer(kind))
        few = {"max_tokens_in_paged_kv_cache": 128, "max_seq_len": 112} if max_tokens > 6 else {}
        one = start_core(model, **few)
        expected = served(one, folder, max_tokens)
        assert bool(one.scheduler.preemptions) == bool(few) and one.scheduler.prompt_tokens_reused
        return model, few, expected

    return made


@pytest.mark.parametrize(("kind", "size", "max_tokens"), some(sorted(EVERY), FEW))
def test_ranks_give_the_answers_of_one(kind, size, max_tokens, of_one, tmp_path, monkeypatch):
    """Of longer answers with so few blocks that one is preempted. 4 ranks hold 2 key and value heads, and a
    vocabulary of 250 leaves the last rank fewer tokens."""
    model, few, expected = of_one(kind, max_tokens)
    agree(served(start_ranks(model, size, monkeypatch, **few), tmp_path / "more", max_tokens), expected)


SIZES = {"head_dim": 128, "intermediate_size": 512}  # half of them are whole blocks of 128


@pytest.mark.parametrize(
    ("layout", "kind"),
    [(layout, "llama") for layout in ("ct-dynamic", "ct-static", "modelopt-new", "blocks", "on-load")]
    + [(layout, "qwen3-moe") for layout in ("ct-dynamic", "blocks", "on-load")]
    + [("blocks", kind) for kind in ("qwen3.5-moe", "qwen2-moe")],
)
def test_ranks_serve_fp8(layout, kind, tmp_path, monkeypatch):
    checkpoint = make_quantised(layout, kind, tmp_path / "model", ranks=2, **SIZES)
    knobs = {"quantization": "fp8"} if layout == "on-load" else {}
    core = start_ranks(checkpoint.folder, 2, monkeypatch, **knobs)
    check(checkpoint, answers(core, tmp_path / "run"))


@pytest.mark.parametrize(
    ("kind", "size", "groups"),
    [("qwen3-moe", 4, 2), ("qwen2-moe", 2, 2), ("gpt-oss", 2, 2), ("llama4", 2, 2), ("qwen3.5-moe", 2, 2)],
)
def test_ranks_with_whole_experts_give_the_answers_of_one(kind, size, groups, of_one, tmp_path, monkeypatch):
    """Of 4 ranks, two have a part each of the same experts."""
    model, _, expected = of_one(kind, 6)
    core = start_ranks(model, size, monkeypatch, expert_groups=groups)
    experts = core.runner.state.model.spec.experts
    assert experts.own == (0, experts.count // groups) and experts.gate_up.experts == experts.own[1]
    agree(served(core, tmp_path / "more", 6), expected)


@pytest.mark.parametrize("rank", [0, 1])
def test_context_logits_that_fail_on_one_rank_end_the_step(rank, tmp_path, monkeypatch):
    """A rank that goes on without them takes the other's next exchange for another one."""
    core = start_ranks(make_checkpoint("llama", tmp_path / "model"), 2, monkeypatch)

    def failing(model: Transformer, hidden: torch.Tensor, chosen: None) -> np.ndarray:
        if model.collectives.shard.rank == rank:
            raise MemoryError("no room")
        return context_logits(model, hidden, chosen)

    monkeypatch.setattr("flashinfer_backend.worker.runner.context_logits", failing)
    plan = prompt_plan(slot=0, length=1)
    plan.wants |= Wants.LOGITS
    others: Any = core.runner.others
    with pytest.raises(threading.BrokenBarrierError if rank else MemoryError):
        core.runner.run(plan)
    if rank:
        assert isinstance(others.errors[0], MemoryError)
    else:
        others.meeting.abort()


def test_each_rank_reads_its_part_alone(tmp_path, monkeypatch):
    """Half of every matrix, and all of the norms."""
    folder = make_checkpoint("qwen2", tmp_path, tie_word_embeddings=False)
    read: list[int] = []
    cut = Stored.cut

    def noting(stored: Stored, shape: tuple[int, ...]) -> tuple[slice, ...]:
        found = cut(stored, shape)
        read.append(torch.empty(shape)[found].numel())
        return found

    monkeypatch.setattr(Stored, "cut", noting)
    config = read_spec(folder)
    counts = {}
    for size in (1, 2):
        model = Transformer(config.share(Shard(size - 1, size)), torch_ops, "float32", "cpu")
        read.clear()
        load_weights(model, folder)
        counts[size] = sum(read)
        tensors = weights._find(model, folder, weights.destinations(model))
        assert sum(tensor.nbytes for tensor in tensors) == 4 * counts[size], "what progress counts"
    norms = (2 * len(config.layers) + 1) * config.hidden_size
    assert counts[2] - norms == (counts[1] - norms) // 2


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "problem"),
    [
        (6, 2, 96, "should divide num_attention_heads, which is 6"),
        (12, 6, 96, "should divide num_key_value_heads, which is 6"),
        (12, 3, 96, "should be a multiple of num_key_value_heads, which is 3"),
        (4, 2, 98, "should divide intermediate_size, which is 98"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(heads, kv_heads, size, problem, tmp_path):
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": size}
    config = read_spec(make_checkpoint("llama", tmp_path), changes=sizes | {"head_dim": 16})
    with pytest.raises(UnsupportedModelError, match=f"tensor_parallel_size=4 {problem}"):
        config.share(Shard(0, 4))


def test_blocks_of_scales_that_would_be_cut_are_refused(tmp_path):
    config = read_spec(make_quantised("blocks", "llama", tmp_path, head_dim=128).folder)
    with pytest.raises(UnsupportedModelError, match=r"64 rows on each of 4 ranks.*multiples of 128"):
        config.share(Shard(0, 4))


def test_ranks_as_processes(of_one, tmp_path, monkeypatch, caplog, capfd):
    """The real thing, with whole experts and a guide, until one of them is killed; and how its start shows
    that it goes on."""
    model, *_ = of_one("qwen3-moe", 6)
    lost: list[str] = []
    params = [
        SamplingParams(max_tokens=20, temperature=0.7, seed=1),
        asks("[a-f]{3}-[0-9]{4}"),
        SamplingParams(max_tokens=20, temperature=0.0, log_probs=True, repetition_penalty=1.2),
    ]
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    with serve(start_core(model, tokenizer_dir="bundled"), tmp_path / "one") as client:
        expected = client.generate(prompts, params)
    caplog.set_level(logging.INFO)
    opened = weights._opened
    with monkeypatch.context() as patch:
        patch.setattr(progress, "PROGRESS_S", 0.001)
        patch.setattr(weights, "_opened", lambda path: time.sleep(0.1) or opened(path))
        ranks_of_experts = {"tensor_parallel_size": 2, "expert_parallel_size": 2}
        core = start_core(model, tokenizer_dir="bundled", on_loss=lost.append, **ranks_of_experts)
    assert core.runner.state.model.spec.experts.own == (0, 2)
    for line in (r"read \d\.\d\d of 0\.00 GB in 0 s", "found 1 of 2 ranks; not yet 1", "found all 2 ranks"):
        assert any(re.fullmatch(line, record.message) for record in caplog.records), line
    assert "[engine rank 1] INFO read 0.00 GB" in capfd.readouterr().err
    others = core.runner.others
    assert others is not None
    (process,) = [
        child for child in psutil.Process().children() if "flashinfer_backend.worker" in child.cmdline()
    ]
    with serve(core, tmp_path / "two") as client:
        assert client.generate(prompts, params) == expected
    process.kill()
    wait_for(lambda: lost)
    assert lost == ["rank 1 has ended"]
    with pytest.raises(ranks.RanksLostError, match="rank 1 has ended"):
        others.send(None)  # type: ignore[arg-type]
    core.close()
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
