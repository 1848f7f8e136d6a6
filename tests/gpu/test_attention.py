# SPDX-License-Identifier: Apache-2.0
"""FlashInfer attention against plain torch over the same blocks."""

import numpy as np
import pytest
import torch
from comparing import assert_close

from flashinfer_backend.attention.batch import AttentionBatch
from flashinfer_backend.attention.contract import StepShape
from flashinfer_backend.attention.torch_paged import TorchPagedAttention
from flashinfer_backend.cache.device import KVCache

pytestmark = pytest.mark.gpu

HEADS = [(32, 8), (28, 4), (16, 8), (32, 32)]
DIM, BLOCK_SIZE, MAX_SEQS, MAX_BLOCKS, LAYERS = 128, 16, 64, 300, 2


class Setup:
    """Random caches, a random block table over distinct blocks, and both implementations."""

    def __init__(self, heads: int, kv_heads: int, decode_backend: str = "auto", seed: int = 0):
        from flashinfer_backend.attention.flashinfer_paged import FlashInferAttention

        torch.manual_seed(seed)
        self.rng = np.random.default_rng(seed)
        self.heads = heads
        self.blocks = 4000
        shape = (self.blocks, BLOCK_SIZE, kv_heads, DIM)
        self.caches = [
            tuple(torch.randn(shape, device="cuda").bfloat16() for _ in "kv") for _ in range(LAYERS)
        ]
        # The last row is the slot of padded rows: all of its blocks are block 0.
        self.table = torch.zeros(MAX_SEQS + 1, MAX_BLOCKS, dtype=torch.int32, device="cuda")
        self.attention = FlashInferAttention(
            KVCache.over(self.caches), heads, MAX_SEQS, MAX_BLOCKS, decode_backend
        )
        wide = [tuple(cache.float() for cache in pair) for pair in self.caches]
        self.reference = TorchPagedAttention(KVCache.over(wide), heads)

    def batch(self, q_lens, kv_lens) -> AttentionBatch:
        rows = len(q_lens)
        slots = self.rng.permutation(MAX_SEQS)[:rows].astype(np.int32)
        blocks = iter(self.rng.permutation(np.arange(1, self.blocks)))
        table = np.zeros((MAX_SEQS + 1, MAX_BLOCKS), dtype=np.int32)
        for slot, kv_len in zip(slots, kv_lens, strict=True):
            count = -(-int(kv_len) // BLOCK_SIZE)
            table[slot, :count] = [next(blocks) for _ in range(count)]
        self.table.copy_(torch.from_numpy(table))
        q_lens = np.array(q_lens, dtype=np.int32)
        return AttentionBatch(q_lens, np.array(kv_lens, dtype=np.int32), slots, self.table)

    def padded(self, batch: AttentionBatch, rows: int) -> AttentionBatch:
        """The decode rows of `batch` and rows of padding."""
        padding = rows - len(batch.slots)
        return AttentionBatch(
            np.ones(rows, np.int32),
            np.concatenate([batch.kv_lens, np.ones(padding, np.int32)]),
            np.concatenate([batch.slots, np.full(padding, MAX_SEQS, np.int32)]),
            batch.block_table,
        )

    def query(self, tokens: int) -> torch.Tensor:
        return torch.randn(tokens, self.heads, DIM, device="cuda").bfloat16()

    def expected(self, batch: AttentionBatch, layer: int, q: torch.Tensor) -> torch.Tensor:
        self.reference.step(batch)
        out = torch.empty_like(q, dtype=torch.float32)
        self.reference.run(layer, q.float(), out)
        return out


class GraphState:
    """What a graph of `bucket` rows has of attention, with an upload of its own."""

    def __init__(self, setup: Setup, bucket: int):
        self.setup, self.bucket = setup, bucket
        shape = StepShape(bucket, bucket, 1)
        self.words = torch.zeros(setup.attention.graph_words(shape), dtype=torch.int32, device="cuda")
        self.state = setup.attention.captured(shape, setup.table, self.words)
        self.run = self.state.run
        none = np.empty(0, np.int32)
        self.plan(AttentionBatch(none, none, none, setup.table))

    def plan(self, batch: AttentionBatch) -> None:
        host = np.full(len(self.words), 99, np.int32)
        self.state.plan(self.setup.padded(batch, self.bucket), host)
        self.words.copy_(torch.from_numpy(host))


STEPS = {
    "decode of one": ([1], [77]),
    "decode": ([1] * 24, [1, 15, 16, 17, 32, 100, 255, 256, 257, 400, 33, 31] * 2),
    "decode of one length": ([1] * 40, [256] * 40),
    "skewed decode": ([1] * 16, [4000] + [50] * 15),
    "prefill": ([100, 17, 640], [100, 17, 640]),
    "long prefill": ([2048], [2048]),
    "chunked prefill": ([512, 300], [1536, 4000]),
    "short chunk over a long prefix": ([5], [4000]),
    "mixed": ([1] * 9 + [300, 700, 2], [60, 900, 1, 16, 17, 3000, 5, 128, 129, 300, 1700, 34]),
}


# XQA's modules of other groups than four heads would be compiled at first use.
CASES = [
    (heads, kv_heads, backend)
    for backend in ("fa2", "xqa", "triton", "auto")
    for heads, kv_heads in HEADS
    if backend != "xqa" or heads // kv_heads == 4
]


def check_layers(name, setup, batch, run, layers=LAYERS):
    """run(layer, q, out): of a step."""
    for layer in range(layers):
        q = setup.query(int(batch.q_lens.sum()))
        out = torch.full_like(q, float("nan"))
        run(layer, q, out)
        try:
            assert_close(out, setup.expected(batch, layer, q))
        except AssertionError as error:
            raise AssertionError(f"{name}, layer {layer}: {error}") from None


def check_graphs(setup):
    """Graphs of decode rows replay other lengths, and fewer rows."""
    for bucket in (32, 4):
        q, out = setup.query(bucket), setup.query(bucket)
        state = GraphState(setup, bucket)
        state.run(0, q, out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            state.run(0, q, out)
        for rows, longest in ((bucket, 300), (bucket - 1, 4000 // bucket), (1, 4700), (bucket // 2, 40)):
            batch = setup.batch([1] * rows, setup.rng.integers(1, longest, rows))
            q.copy_(setup.query(bucket))
            out.fill_(float("nan"))
            state.plan(batch)
            graph.replay()
            assert_close(out[:rows], setup.expected(batch, 0, q[:rows]))
            assert out.isfinite().all()


@pytest.mark.parametrize("heads, kv_heads, backend", CASES)
def test_eager_steps(heads, kv_heads, backend):
    setup = Setup(heads, kv_heads, backend)
    for name, (q_lens, kv_lens) in STEPS.items():
        batch = setup.batch(q_lens, kv_lens)
        setup.attention.step(batch)
        check_layers(name, setup, batch, setup.attention.run)


@pytest.mark.parametrize("heads, kv_heads, backend", CASES)
def test_graph_replays_other_lengths_and_fewer_rows(heads, kv_heads, backend):
    check_graphs(Setup(heads, kv_heads, backend))


def test_a_graph_sees_blocks_that_the_table_gets_after_the_plan():
    """A decode step's newest blocks are entered by the graph itself."""
    setup = Setup(32, 8, "triton")
    rows = 9
    q, out = setup.query(rows), torch.empty(rows, 32, DIM, device="cuda", dtype=torch.bfloat16)
    state = GraphState(setup, rows)
    assert state.state.reads_block_table
    state.run(0, q, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state.run(0, q, out)
    batch = setup.batch([1] * rows, [1, 17, 300, 4000, 16, 33, 64, 65, 999])
    table = setup.table.clone()
    setup.table.zero_()
    state.plan(batch)
    setup.table.copy_(table)
    graph.replay()
    assert_close(out, setup.expected(batch, 0, q))


def test_plans_do_not_overwrite_copies_in_flight():
    """Many steps planned while the GPU is still busy with the first: each must see its own lengths."""
    setup = Setup(32, 8, "fa2")
    rows, steps = 16, 12
    state = GraphState(setup, rows)
    batches, tables, queries = [], [], []
    for _ in range(steps):
        batches.append(setup.batch([1] * rows, setup.rng.integers(1, 240, rows)))
        tables.append(setup.table.clone())
        batches[-1].block_table = tables[-1]
        queries.append(setup.query(rows))
    expected = [setup.expected(batch, 0, q) for batch, q in zip(batches, queries, strict=True)]
    outs = [torch.full_like(q, float("nan")) for q in queries]
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    for batch, q, out in zip(batches, queries, outs, strict=True):
        state.plan(batch)
        state.run(0, q, out)
    for out, reference in zip(outs, expected, strict=True):
        assert_close(out, reference)


def test_refuses_what_it_cannot_do():
    from flashinfer_backend.attention.flashinfer_paged import FlashInferAttention

    caches = [(torch.zeros(2, 16, 8, 96, device="cuda").bfloat16(),) * 2]
    with pytest.raises(ValueError, match="head_dim"):
        FlashInferAttention(KVCache.over(caches), 32, 4, 4)
    setup = Setup(32, 8)
    with pytest.raises(ValueError, match="max_num_seqs"):
        setup.attention.captured(StepShape(MAX_SEQS + 1, MAX_SEQS + 1, 1), setup.table, setup.table[0])
    state = GraphState(setup, 2).state
    for rows in (1, 3):
        with pytest.raises(ValueError, match="2 rows"):
            state.plan(setup.batch([1] * rows, [5, 6, 7][:rows]), np.empty(0, np.int32))
