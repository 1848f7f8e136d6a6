# SPDX-License-Identifier: Apache-2.0
"""Decode rows that share prefixes: the kernels against plain torch, and a whole engine."""

import faulthandler
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attending import BLOCK_SIZE, MAX_BLOCKS, MAX_SEQS, DecodeGraph, Setup, StepGraph, check_close
from test_engine import SIZES, TOLERANCE, shortfalls

from checkpoints import make_checkpoint
from engine.harness import serve, start_core
from flashinfer_backend.attention.batch import AttentionBatch
from flashinfer_backend.attention.prefixes import find_prefixes
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.worker import prefixes

pytestmark = pytest.mark.gpu

LONGEST = 90  # seconds of a test; kernels that never end cannot be stopped otherwise


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """FlashInfer compiles its kernels before a test's time counts: that takes a minute or two."""
    Setup(32, 8)


@pytest.fixture(autouse=True)
def bounded(compiled: None, capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """A test that takes longer says where it stands, and ends its process."""
    with capfd.disabled():
        shown = os.dup(2)
    faulthandler.dump_traceback_later(LONGEST, exit=True, file=shown)
    yield
    faulthandler.cancel_dump_traceback_later()
    os.close(shown)


# Rows of each set and what they share; lengths of rows that share nothing.
STEPS: dict[str, tuple[list[tuple[int, int]], list[int]]] = {
    "a document": ([(64, 4096)], []),
    "few rows": ([(3, 4000)], []),
    "system prompts": ([(4, 704)] * 16, []),
    "sets of all kinds": ([(2, 800), (17, 336), (9, 2000), (16, 144)], [1, 3000, 64, 77]),
    "nothing": ([], [1, 700, 30, 4000]),
}


def shared_batch(
    setup: Setup, sets: list[tuple[int, int]], others: list[int], prompts: list[int] | None = None
) -> AttentionBatch:
    """A step of decode rows in random order, and slots; behind them prompts of these lengths."""
    rng, free = setup.rng, iter(setup.rng.permutation(np.arange(1, setup.blocks)).tolist())
    rows = [([], length) for length in others]
    for count, tokens in sets:
        blocks = [next(free) for _ in range(tokens // BLOCK_SIZE)]
        rows += [(blocks, tokens + int(rng.integers(1, 200))) for _ in range(count)]
    decodes, behind = len(rows), prompts or []
    rows += [([], length) for length in behind]
    slots = rng.permutation(MAX_SEQS)[: len(rows)].astype(np.int32)
    table, lens = np.zeros((MAX_SEQS + 1, MAX_BLOCKS), np.int32), np.zeros(len(rows), np.int32)
    for row, place in enumerate([*rng.permutation(decodes).tolist(), *range(decodes, len(rows))]):
        blocks, lens[row] = rows[place]
        own = [*blocks, *(next(free) for _ in range(-(-int(lens[row]) // BLOCK_SIZE) - len(blocks)))]
        table[slots[row], : len(own)] = own
    setup.table.copy_(torch.from_numpy(table))
    found = find_prefixes(table, slots[:decodes], (lens[:decodes] - 1) // BLOCK_SIZE, BLOCK_SIZE)
    assert (found is None) == (not sets)
    q_lens = np.array([1] * decodes + behind, np.int32)
    return AttentionBatch(q_lens, lens, slots, setup.table, prefixes=found)


@pytest.mark.parametrize("heads, kv_heads", [(32, 8), (28, 4), (16, 8), (32, 32), (8, 1)])
def test_a_graph_reads_what_rows_share_once(heads: int, kv_heads: int) -> None:
    """Its replays have other sets, fewer rows, and none that share anything."""
    setup = Setup(heads, kv_heads)
    graph = DecodeGraph(setup, MAX_SEQS, layer=1, shared=True)
    for name, case in [*STEPS.items(), *STEPS.items()]:
        batch = shared_batch(setup, *case)
        setup.attention.workspace.out.fill_(float("nan"))
        graph.replay(batch)
        rows = len(batch.slots)
        check_close(name, graph.out[:rows], setup.expected(batch, 1, graph.q[:rows]))
        assert graph.out.isfinite().all()
    assert not setup.attention.workspace.counters.any()


def test_a_graph_of_steps_with_prompts_reads_what_decode_rows_share_once() -> None:
    """Beside prompts, of which none shares anything here; its replays have other sets, and none."""
    setup = Setup(32, 8)
    graph = StepGraph(setup, 320, MAX_SEQS, shared=True)
    for name in ("system prompts", "sets of all kinds", "few rows", "nothing", "system prompts"):
        sets, others = STEPS[name]
        batch = shared_batch(setup, sets[:12], others, prompts=[150, 60])
        setup.attention.workspace.out.fill_(float("nan"))
        assert graph.replay(batch)
        fed = int(batch.q_lens.sum())
        for layer in range(setup.layers):
            q = graph.q[layer, :fed]
            check_close(name, graph.out[layer, :fed], setup.expected(batch, layer, q))


def test_an_engine_whose_rows_share_prefixes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are the best ones, or nearly, as those of one whose rows share nothing."""
    folder = make_checkpoint("llama", tmp_path / "model", **SIZES)
    generator = torch.Generator().manual_seed(0)

    def some(count: int) -> list[int]:
        return torch.randint(3, 250, (count,), generator=generator).tolist()

    documents = [some(160), some(130)]
    prompts = [[*documents[i % 2], *some(3 + i)] for i in range(20)]
    steps: list[Any] = []
    of = prefixes.SharedPrefixes.of

    def counted(self: Any, plan: Any) -> Any:
        steps.append(of(self, plan))
        return steps[-1]

    monkeypatch.setattr(prefixes.SharedPrefixes, "of", counted)
    monkeypatch.setattr(prefixes, "LEAST_SAVED", 1 << 16)
    settings = {"max_num_tokens": 512, "max_num_tokens_while_decoding": 256, "max_num_seqs": 16}
    once = {"tokens_per_block": 16, "read_shared_prefixes_once": True}
    core = start_core(folder, device="cuda", **settings, **once)
    with serve(core, tmp_path / "run") as client:
        produced = client.generate(prompts, SamplingParams(max_tokens=32, temperature=0.0))
    assert sum(found is not None for found in steps) > 20
    short = shortfalls(folder, produced, prompts)
    assert (short == 0).float().mean() > 0.9, f"{(short > 0).sum()} of {len(short)} tokens are not the best"
    assert short.max() < TOLERANCE, f"a token is {short.max():.2f} below the best logit"
