# SPDX-License-Identifier: Apache-2.0
"""Windows, sinks and soft caps on a GPU against plain torch, at head sizes that models have; and engines with
several cache groups."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from comparing import assert_close
from test_attention import check_layers
from test_engine import DEVICE, SETTINGS, SIZES, make_prompts

from checkpoints import make_checkpoint
from engine.harness import serve, start_core
from flashinfer_backend.attention.batch import AttentionBatch
from flashinfer_backend.attention.contract import Scores, StepShape
from flashinfer_backend.attention.torch_paged import TorchPagedAttention
from flashinfer_backend.cache.device import KVCache
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.ops import fp8

pytestmark = pytest.mark.gpu

BLOCK_SIZE, MAX_SEQS, MAX_BLOCKS, LAYERS, BLOCKS = 16, 64, 2000, 2, 6000
COPIED = 4000  # blocks


class Case(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    window: int | None
    scale: float | None = None
    soft_cap: float | None = None
    sinks: bool = False
    in_fp8: bool = False


CASES = {
    "Mistral 7B": Case(32, 8, 128, 4096),
    "Gemma 3 12B": Case(16, 8, 256, 1024, scale=256**-0.5),
    "Gemma 2 9B": Case(16, 8, 256, 4096, scale=224**-0.5, soft_cap=50.0),
    "GPT-OSS, windows": Case(64, 8, 64, 128, sinks=True),
    "GPT-OSS, full": Case(64, 8, 64, None, sinks=True),
    "short window, e4m3": Case(32, 8, 128, 200, in_fp8=True),
    "sinks, e4m3": Case(64, 8, 64, 128, sinks=True, in_fp8=True),
    "all at once": Case(28, 4, 128, 77, scale=0.2, soft_cap=3.0, sinks=True),
}


class Setup:
    """Two layers of random keys and values. Blocks behind a window are block 0, which is all NaN."""

    def __init__(self, case: Case):
        from flashinfer_backend.attention.flashinfer_paged import FlashInferAttention

        torch.manual_seed(0)
        self.case, self.rng = case, np.random.default_rng(0)
        shape = (BLOCKS, BLOCK_SIZE, case.kv_heads, case.dim)
        scales = ((0.5, 0.25), (0.125, 2.0)) if case.in_fp8 else ()
        caches, wide = [], []
        for layer in range(LAYERS):
            pair = []
            for part in range(2):
                values = torch.randn(shape, device=DEVICE)
                values[0] = torch.nan
                stored = fp8.to_e4m3(values, scales[layer][part]) if scales else values.bfloat16()
                pair.append(stored)
            caches.append(tuple(pair))
            factors = scales[layer] if scales else (1.0, 1.0)
            wide.append(tuple(x.float() * factor for x, factor in zip(pair, factors, strict=True)))
        sinks = torch.linspace(-4, 6, case.heads, device=DEVICE) if case.sinks else None
        scores = [Scores(case.scale or case.dim**-0.5, case.soft_cap, sinks)] * LAYERS
        self.table = torch.zeros(MAX_SEQS + 1, MAX_BLOCKS, dtype=torch.int32, device=DEVICE)
        self.attention = FlashInferAttention(
            KVCache.over(caches, scales),
            case.heads,
            MAX_SEQS,
            MAX_BLOCKS,
            dtype=torch.bfloat16,
            copied_blocks=COPIED if case.in_fp8 else 0,
            window=case.window,
            scores=scores,
        )
        self.reference = TorchPagedAttention(KVCache.over(wide), case.heads, case.window, scores)

    def batch(self, q_lens: list[int], kv_lens: list[int]) -> AttentionBatch:
        slots = self.rng.permutation(MAX_SEQS)[: len(q_lens)].astype(np.int32)
        blocks = iter(self.rng.permutation(np.arange(1, BLOCKS)))
        table = np.zeros((MAX_SEQS + 1, MAX_BLOCKS), dtype=np.int32)
        for slot, q_len, kv_len in zip(slots, q_lens, kv_lens, strict=True):
            seen = kv_len if self.case.window is None else min(kv_len, q_len + self.case.window - 1)
            for column in range((kv_len - seen) // BLOCK_SIZE, -(-kv_len // BLOCK_SIZE)):
                table[slot, column] = next(blocks)
        self.table.copy_(torch.from_numpy(table))
        return AttentionBatch(np.array(q_lens, np.int32), np.array(kv_lens, np.int32), slots, self.table)

    def query(self, tokens: int) -> torch.Tensor:
        return torch.randn(tokens, self.case.heads, self.case.dim, device=DEVICE).bfloat16()

    def expected(self, batch: AttentionBatch, layer: int, q: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q, dtype=torch.float32)
        self.reference.step(batch).run(layer, q.float(), out)
        return out


STEPS = {
    "decode": ([1] * 24, [1, 15, 16, 17, 32, 100, 127, 128, 129, 400, 1023, 1024, 1025, 4095, 4096, 4097] * 1
               + [5, 77, 78, 199, 200, 201, 5000, 16000]),
    "decode of one": ([1], [30000]),
    "prefill": ([100, 17, 640], [100, 17, 640]),
    "long prefill": ([8192], [8192]),
    "chunks": ([512, 300, 77, 129], [1536, 4000, 30000, 5000]),
    "short chunk over a long prefix": ([5], [9000]),
    "mixed": ([1] * 9 + [300, 700, 2], [60, 900, 1, 16, 17, 3000, 5, 128, 129, 300, 6700, 34]),
}  # fmt: skip


def check_eager_steps(setup):
    for step, (q_lens, kv_lens) in STEPS.items():
        batch = setup.batch(q_lens, kv_lens)
        prepared = setup.attention.step(batch)
        check_layers(step, setup, batch, prepared.run)


@pytest.mark.parametrize("name", CASES)
def test_eager_steps(name):
    check_eager_steps(Setup(CASES[name]))


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
@pytest.mark.parametrize("name", CASES)
def test_both_kernels_of_prompts(name, backend, monkeypatch):
    setup = Setup(CASES[name])
    monkeypatch.setattr(setup.attention, "choose_prefill", lambda *_: backend)
    q_lens, kv_lens = [100, 33, 640, 200], [100, 2000, 640, 9000]
    batch = setup.batch(q_lens, kv_lens)
    q = setup.query(sum(q_lens))
    out = torch.full_like(q, float("nan"))
    setup.attention.step(batch).run(1, q, out)
    assert_close(out, setup.expected(batch, 1, q))


@pytest.mark.parametrize("name", CASES)
def test_decode_graphs(name):
    setup, rows = Setup(CASES[name]), 24
    words = torch.zeros(
        setup.attention.graph_words(StepShape(rows, rows, 1)), dtype=torch.int32, device=DEVICE
    )
    state = setup.attention.captured(StepShape(rows, rows, 1), setup.table, words)
    assert state is not None
    q, out = setup.query(rows), setup.query(rows)

    def plan(lens: np.ndarray) -> AttentionBatch:
        batch = setup.batch([1] * rows, lens.tolist())
        host = np.full(len(words), 99, np.int32)
        assert state.plan(batch, host)
        words.copy_(torch.from_numpy(host))
        return batch

    plan(np.ones(rows, np.int64))
    state.run(0, q, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state.run(0, q, out)
    for longest in (40, 300, 3000):
        batch = plan(setup.rng.integers(1, longest, rows))
        q.copy_(setup.query(rows))
        out.fill_(float("nan"))
        graph.replay()
        assert_close(out, setup.expected(batch, 0, q))


@pytest.mark.parametrize("name", CASES)
def test_graphs_of_steps_with_prompts(name):
    """What lies beside the step's rows is left alone."""
    setup, tokens = Setup(CASES[name]), 320
    none = torch.empty(0, dtype=torch.int32, device=DEVICE)
    state = setup.attention.captured(StepShape(tokens, 40, None), setup.table, none)
    assert state is not None
    q, out = setup.query(tokens), setup.query(tokens)
    state.run(0, q, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state.run(0, q * 1, out)
    ran = 0
    for q_lens, kv_lens in (
        ([100, 17, 200], [100, 17, 200]),
        ([1] * 40 + [250], [*range(1, 400, 10), 250]),
        ([1, 1] + [130, 60], [4000, 7, 130, 60]),
        ([1] * 5 + [150, 120], [33, 16, 17, 900, 5, 700, 400]),
        ([1] * 3 + [300], [5, 5000, 60, 2000]),
    ):
        batch, used = setup.batch(q_lens, kv_lens), sum(q_lens)
        if not state.plan(batch, np.empty(0, np.int32)):
            continue
        ran += 1
        q.copy_(setup.query(tokens))
        out.fill_(float("nan"))
        graph.replay()
        assert_close(out[:used], setup.expected(batch, 0, q[:used]))
        assert out[used:].isnan().all()
    assert ran >= 3


KINDS = {
    "mistral": {"sliding_window": 100},
    "qwen3": {
        "use_sliding_window": True,
        "sliding_window": 70,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}


@pytest.mark.parametrize("graphs", ["none", "auto"])
@pytest.mark.parametrize("kind", KINDS)
def test_engines_give_the_best_tokens_beyond_their_windows(kind, graphs, tmp_path):
    """Judged as in test_engine; a second time from cached prefixes."""
    from test_engine import TOLERANCE, shortfalls

    folder = make_checkpoint(kind, tmp_path / "model", **SIZES, **KINDS[kind])
    params = SamplingParams(max_tokens=150, temperature=0.0)
    core = start_core(folder, **SETTINGS, max_seq_len=512, cuda_graph_batch_sizes=graphs)
    assert len(core.runner.state.groups) == (1 if kind == "mistral" else 2)
    assert (core.runner.graphs is None) == (graphs == "none")
    with serve(core, tmp_path / "run") as client:
        for _ in range(2):
            short = shortfalls(folder, client.generate(make_prompts(12), params))
            assert (short == 0).float().mean() > 0.9 and short.max() < TOLERANCE
    assert core.scheduler.prompt_tokens_reused > 0
