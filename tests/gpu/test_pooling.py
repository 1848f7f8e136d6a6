# SPDX-License-Identifier: Apache-2.0
"""Embeddings and scores from the CUDA kernels and graphs are those of plain torch on a CPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedding_checkpoints import make_embedder, make_reranker
from engine.harness import serve, start_core
from engine.test_pooling import PROMPTS, pooled

pytestmark = pytest.mark.gpu

SIZES = {"head_dim": 64, "hidden_size": 512, "intermediate_size": 1024, "initializer_range": 0.08}


@pytest.mark.parametrize("kind", ["embed", "score", "label"])
def test_what_is_pooled_is_that_of_plain_torch(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / kind
    if kind == "embed":
        make_embedder(folder, **SIZES)
    else:
        make_reranker(folder, classifier=kind == "label", **SIZES)

    def run(**settings: Any) -> np.ndarray:
        core = start_core(folder, max_num_tokens=64, max_seq_len=512, **settings)
        with serve(core, tmp_path / f"run-{settings['device']}") as client:
            found = np.stack(pooled(client, PROMPTS))
        core.close()
        return found

    expected = run(device="cpu")
    found = run(device="cuda", max_tokens_in_paged_kv_cache=8192)
    error = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1).mean()
    # Plain torch in bfloat16 comes to 0.017 and 0.06.
    assert error.mean() < 0.03 and error.max() < 0.1
