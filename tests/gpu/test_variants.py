# SPDX-License-Identifier: Apache-2.0
"""Attention that FlashInfer compiles from a declaration, against its twin in plain torch."""

import numpy as np
import pytest
import torch
from test_attention import assert_close
from test_windows import BLOCK_SIZE, BLOCKS, LAYERS, MAX_BLOCKS, MAX_SEQS, Case, check_eager_steps
from test_windows import Setup as Windows

from flashinfer_backend.attention.contract import Scores, StepShape, Variant
from flashinfer_backend.attention.torch_paged import TorchPagedAttention
from flashinfer_backend.attention.variants.alibi import ALIBI
from flashinfer_backend.attention.variants.chunked import CHUNKED
from flashinfer_backend.cache.device import KVCache
from flashinfer_backend.models.hf.mpt import slopes
from flashinfer_backend.ops import fp8

pytestmark = pytest.mark.gpu

DEVICE, KV_HEADS, DIM = "cuda", 8, 128
# The variant, its heads, by_head, and whether the cache is of e4m3.
CASES: dict[str, tuple[Variant, int, list[float], bool]] = {
    "ALiBi": (ALIBI, 32, list(slopes(32)), False),
    "ALiBi, e4m3": (ALIBI, 8, list(slopes(8)), True),
    "chunks": (CHUNKED, 40, [100.0] * 40, False),
}


class Setup(Windows):
    """Two layers of random keys and values; the second one has usual attention."""

    def __init__(self, name: str) -> None:
        from flashinfer_backend.attention.flashinfer_paged import FlashInferAttention

        torch.manual_seed(0)
        variant, heads, by_head, in_fp8 = CASES[name]
        self.case, self.rng = Case(heads, KV_HEADS, DIM, None), np.random.default_rng(0)
        shape, scales = (BLOCKS, BLOCK_SIZE, KV_HEADS, DIM), ((0.5, 0.25), (0.125, 2.0)) if in_fp8 else ()
        caches, wide = [], []
        for layer in range(LAYERS):
            values = [torch.randn(shape, device=DEVICE) for _ in "kv"]
            factors = scales[layer] if scales else (1.0, 1.0)
            pair = [
                fp8.to_e4m3(each, factor) if scales else each.bfloat16()
                for each, factor in zip(values, factors, strict=True)
            ]
            caches.append(tuple(pair))
            wide.append(tuple(each.float() * factor for each, factor in zip(pair, factors, strict=True)))
        scores = [Scores(0.1, variant=variant, by_head=torch.tensor(by_head, device=DEVICE)), Scores(0.07)]
        self.table = torch.zeros(MAX_SEQS + 1, MAX_BLOCKS, dtype=torch.int32, device=DEVICE)
        sizes = heads, MAX_SEQS, MAX_BLOCKS
        self.attention = FlashInferAttention(
            KVCache.over(caches, scales), *sizes, dtype=torch.bfloat16, scores=scores
        )
        self.reference = TorchPagedAttention(KVCache.over(wide), heads, scores=scores)


@pytest.mark.parametrize("name", CASES)
def test_eager_steps(name: str) -> None:
    check_eager_steps(Setup(name))


@pytest.mark.parametrize("name", CASES)
def test_decode_graphs(name: str) -> None:
    """Steps with prompts have none: they run in pieces."""
    setup, rows = Setup(name), 24
    words = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    assert setup.attention.graph_words(StepShape(rows, rows, 1)) == 0
    assert setup.attention.captured(StepShape(320, 40, None), setup.table, words) is None
    state = setup.attention.captured(StepShape(rows, rows, 1), setup.table, words)
    assert state is not None
    q, out = setup.query(rows), setup.query(rows)
    state.run(0, q, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state.run(0, q, out)
    for longest in (40, 300, 3000):
        batch = setup.batch([1] * rows, setup.rng.integers(1, longest, rows).tolist())
        assert state.plan(batch, np.empty(0, np.int32))
        q.copy_(setup.query(rows))
        out.fill_(float("nan"))
        graph.replay()
        assert_close(out, setup.expected(batch, 0, q))


def test_drafts_are_refused() -> None:
    from flashinfer_backend.attention.flashinfer_paged import FlashInferAttention

    cache = KVCache.over([tuple(torch.zeros(4, 16, KV_HEADS, DIM, device=DEVICE).bfloat16() for _ in "kv")])
    scores = [Scores(0.1, variant=ALIBI, by_head=torch.ones(KV_HEADS, device=DEVICE))]
    with pytest.raises(ValueError, match=r"fa2 takes lengths from the host.*set speculative_method to none"):
        FlashInferAttention(cache, KV_HEADS, 4, 4, scores=scores, most_drafts=lambda rows: 2)
