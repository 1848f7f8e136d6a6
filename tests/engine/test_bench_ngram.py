# SPDX-License-Identifier: Apache-2.0
"""What the benchmark of n-gram drafts measures, on a CPU: answers that copy have drafts accepted, others
soon have none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import make_checkpoint
from engine.harness import start_core
from flashinfer_backend.speculate.ngram import make_ngram
from perf_configs import bench_ngram
from perf_configs.bench_engine import random_prompts
from perf_configs.replaying import tokens_follow


def test_ngrams_of_answers_that_copy_and_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_ngram, "WARM", 4)
    monkeypatch.setattr(bench_ngram, "SECONDS", 0.0)
    follows: list[Any] = []

    def make(config: Any, model: Any) -> Any:
        follows.append(tokens_follow(model, torch.Generator().manual_seed(0)).numpy())
        return make_ngram(config, model)

    checkpoint = make_checkpoint("llama", tmp_path / "model", vocab_size=2000)
    settings = {"load_format": "dummy", "max_seq_len": 512, "max_draft_len": 3, "speculative_method": "ngram"}
    core = start_core(checkpoint, make_proposer=make, max_num_seqs=2, **settings)
    prompts = bench_ngram.copying_prompts(2, follows[0])
    copied = bench_ngram.measure(core, prompts, bench_ngram.COPIED - 8)
    assert copied["accepted"] > 0.9 * copied["drafted"] and copied["tokens_per_step"] > 3
    never = bench_ngram.measure(core, random_prompts(2, 256, 2000, seed=2), 200)
    assert never["accepted"] <= 3 and never["drafted"] < 80
