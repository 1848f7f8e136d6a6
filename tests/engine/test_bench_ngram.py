# SPDX-License-Identifier: Apache-2.0
"""What the benchmark of n-gram drafts measures, on a CPU: engines say what the texts have, and drafts are
right where texts repeat."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from checkpoints import make_checkpoint
from engine.harness import serve, start_core
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.ops import torch_ops
from perf_configs import bench_ngram, repeating


def test_answers_are_those_of_the_texts_and_drafts_repeat_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_ngram, "TEXTS", 2)
    checkpoint = make_checkpoint("llama", tmp_path / "model", vocab_size=2000, max_position_embeddings=2048)
    settings = {
        "load_format": "dummy",
        "max_seq_len": 2048,
        "max_draft_len": 4,
        "speculative_method": "ngram",
    }
    script, pieces = bench_ngram.Script(2, 2049, "cpu"), repeating.Pieces(2000)
    chosen = list(itertools.islice(repeating.texts("quotes"), 2))
    prompts, said = ([pieces.ids(text[part]) for text in chosen] for part in (0, 1))
    script.write([np.concatenate(pair) for pair in zip(prompts, said, strict=True)])
    params = [SamplingParams(max_tokens=len(said[seed]), temperature=0.0, seed=seed) for seed in range(2)]
    with script.replaces(torch_ops):
        core = start_core(checkpoint, max_num_seqs=2, **settings)
        with serve(core, tmp_path / "run") as client:
            found = client.generate([prompt.tolist() for prompt in prompts], params)
        assert found == [answer.tolist() for answer in said]
        core = start_core(checkpoint, max_num_seqs=2, **settings)
        edits, quotes, chats = (bench_ngram.measure(core, kind, 2, script) for kind in repeating.KINDS)
        core.close()
    assert edits["tokens_per_step"] > 2.5 and quotes["tokens_per_step"] > 1.5
    assert chats["accepted"] < 0.5 * chats["drafted"], chats
