# SPDX-License-Identifier: Apache-2.0
"""Attention that FlashInfer compiles from a declaration, against its twin in plain torch."""

import pytest
import torch
from attending import Setup, check_decode_replays, check_eager_steps
from test_windows import BLOCKS, MAX_BLOCKS, SCALES, STEPS

from flashinfer_backend.attention.contract import Scores, StepShape, Variant
from flashinfer_backend.attention.variants.alibi import ALIBI
from flashinfer_backend.attention.variants.chunked import CHUNKED
from flashinfer_backend.cache.device import KVCache
from flashinfer_backend.models.hf.mpt import slopes

pytestmark = pytest.mark.gpu

DEVICE, KV_HEADS = "cuda", 8
# The variant, its heads, by_head, and whether the cache is of e4m3.
CASES: dict[str, tuple[Variant, int, list[float], bool]] = {
    "ALiBi": (ALIBI, 32, list(slopes(32)), False),
    "ALiBi, e4m3": (ALIBI, 8, list(slopes(8)), True),
    "chunks": (CHUNKED, 40, [100.0] * 40, False),
}


def make_setup(name: str) -> Setup:
    """The second layer has usual attention."""
    variant, heads, by_head, in_fp8 = CASES[name]
    scores = [Scores(0.1, variant=variant, by_head=torch.tensor(by_head, device=DEVICE)), Scores(0.07)]
    sizes = {"blocks": BLOCKS, "max_blocks": MAX_BLOCKS}
    return Setup(heads, KV_HEADS, **sizes, scales=SCALES if in_fp8 else (), scores=scores)


@pytest.mark.parametrize("name", CASES)
def test_eager_steps(name: str) -> None:
    check_eager_steps(make_setup(name), STEPS)


@pytest.mark.parametrize("name", CASES)
def test_decode_graphs(name: str) -> None:
    """Steps with prompts have none: they run in pieces."""
    setup, rows = make_setup(name), 24
    words = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    assert setup.attention.graph_words(StepShape(rows, rows, 1)) == 0
    assert setup.attention.captured(StepShape(320, 40, None), setup.table, words) is None
    check_decode_replays(setup, rows, [(rows, 40), (rows, 300), (rows, 3000)])


def test_drafts_are_refused() -> None:
    from flashinfer_backend.attention.flashinfer_paged import FlashInferAttention

    cache = KVCache.over([tuple(torch.zeros(4, 16, KV_HEADS, 128, device=DEVICE).bfloat16() for _ in "kv")])
    scores = [Scores(0.1, variant=ALIBI, by_head=torch.ones(KV_HEADS, device=DEVICE))]
    with pytest.raises(ValueError, match=r"fa2 takes lengths from the host.*set speculative_method to none"):
        FlashInferAttention(cache, KV_HEADS, 4, 4, scores=scores, most_drafts=lambda rows: 2)
