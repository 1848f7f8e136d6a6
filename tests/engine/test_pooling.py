# SPDX-License-Identifier: Apache-2.0
"""Embeddings and scores out of a real engine, compared with transformers."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from embedding_checkpoints import ANSWERS, make_embedder, make_reranker
from engine.harness import Client, make_prompts, serve, start_core
from engine.ranks_in_threads import start_ranks
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.engine.start import Core

POOLED = SamplingParams(max_tokens=1, temperature=0.0, pooled=True)
LONG = make_prompts(3, longest=400)
# Of many lengths; two of them continue others, whose blocks they find; one is a single token.
PROMPTS = [*make_prompts(14, longest=60), *LONG, LONG[0] + [5, 6, 7], LONG[1][:200], [11]]


def theirs(kind: str, folder: Path) -> list[np.ndarray]:
    loaders = {"embed": AutoModel, "score": AutoModelForCausalLM, "label": AutoModelForSequenceClassification}
    model = loaders[kind].from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for prompt in PROMPTS:
        with torch.inference_mode():
            output = model(torch.tensor([prompt]))
        if kind == "embed":
            found.append(output.last_hidden_state[0, -1].numpy())
        else:
            found.append(output.logits[0, -1, list(ANSWERS)].numpy() if kind == "score" else output.logits[0])
    return found


def ours(core: Core, run_dir: Path) -> list[np.ndarray]:
    with serve(core, run_dir) as client:
        found = [*pooled(client, PROMPTS[:-3]), *pooled(client, PROMPTS[-3:])]
        assert core.scheduler.prompt_tokens_reused >= 200  # of those that continue others
        assert client.loop.generated_tokens == 0
    core.close()
    return found


def pooled(client: Client, prompts: list[list[int]]) -> list[np.ndarray]:
    ids = [client.submit(prompt, POOLED) for prompt in prompts]
    client.wait(ids)
    assert not client.failure
    return [np.frombuffer(client.reports[i][0].generation_logits, "<f4") for i in ids]


def make(kind: str, folder: Path) -> Path:
    return make_embedder(folder) if kind == "embed" else make_reranker(folder, classifier=kind == "label")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["embed", "score", "label"])
def test_what_is_pooled_is_that_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, ranks: int
) -> None:
    """In batches of chunks, with blocks found in the cache."""
    folder = make(kind, tmp_path / kind)
    limits = {"max_num_tokens": 64, "max_seq_len": 512}
    core = start_core(folder, **limits) if ranks == 1 else start_ranks(folder, ranks, monkeypatch, **limits)
    found = ours(core, tmp_path / "run")
    for expected, values in zip(theirs(kind, folder), found, strict=True):
        np.testing.assert_allclose(values, expected, rtol=0, atol=1e-5 * max(1, abs(expected).max()))


def test_other_requests_are_refused(tmp_path: Path) -> None:
    with serve(start_core(make_embedder(tmp_path / "embed")), tmp_path / "run") as client:
        writes = client.submit([5, 6], SamplingParams(max_tokens=3))
        longer = client.submit([5, 6], SamplingParams(max_tokens=2, pooled=True))
        fine = client.submit([5, 6], POOLED)
        client.wait([writes, longer, fine])
        for i in (writes, longer):
            assert "is an embedding model, which writes no text; send texts to" in client.failure[i].message
        assert fine not in client.failure


def test_drafts_have_no_use(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"embedding model.*set speculative_method=none"):
        start_core(make_embedder(tmp_path / "embed"), speculative_method="ngram")
