# SPDX-License-Identifier: Apache-2.0
"""What decode graphs are given, without a GPU: steps run eagerly, over attention that reads work items."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine.harness import serve, start_core
from engine.ranks_in_threads import start_ranks
from flashinfer_backend.attention import split
from flashinfer_backend.cache.device import KVCache
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.worker.graphs import DecodeGraphs, DecodeStep

SIZES = [2, 4, 8]
PROMPTS = [[0, *range(40 + i, 60 + 3 * i)] for i in range(12)]


class ItemAttention:
    """The Triton kernel's view: work items in the step's upload, blocks in the block table."""

    reads_block_table = True

    def __init__(
        self,
        cache: KVCache,
        table: torch.Tensor,
        bucket: int,
        words: torch.Tensor,
        window: int | None = None,
    ) -> None:
        self._cache, self._table, self._window = cache, table, window
        self.bucket, self._items = bucket, words.view(-1, split.ITEM_WORDS)

    def plan(self, batch: Any, host: np.ndarray) -> bool:
        assert len(batch.slots) == batch.num_single == self.bucket
        host[:] = 99
        items = host.reshape(-1, split.ITEM_WORDS)
        split.split_rows(batch.kv_lens, batch.slots, len(items), items, self._window)
        return True

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        table, (k_cache, v_cache) = self._table, self._cache.layers[layer]
        used = self._items[self._items[:, 0] >= 0].tolist()
        for row in range(self.bucket):
            mine = [item for item in used if item[0] == row]
            assert mine and {item[4] for item in mine} == {len(mine)}
            where = torch.cat([torch.arange(start, end) for _, start, end, *_ in mine])
            blocks, places = table[mine[0][5], where // k_cache.shape[1]], where % k_cache.shape[1]
            k, v = (cache[blocks, places].transpose(0, 1)[None] for cache in (k_cache, v_cache))
            out[row] = F.scaled_dot_product_attention(q[row][None, :, None], k, v, enable_gqa=True)[0, :, 0]


class EagerGraphs(DecodeGraphs):
    """Replays by running the step."""

    def _capture(self, size: int, capture: Any) -> DecodeStep:
        own = split.max_items(size, self._state.model.spec.attention.kv_heads, False) * split.ITEM_WORDS
        inputs = torch.full((own + self._columns * size,), 99, dtype=torch.int32)
        attention = ItemAttention(self._state.kv_cache, self._state.block_table, size, inputs[:own])
        tokens = torch.zeros(size, dtype=torch.int32)
        self.steps = 0

        def replay() -> None:
            tokens.copy_(self._step(inputs[own:], attention, size))
            self.steps += 1

        graph: Any = SimpleNamespace(replay=replay)
        return DecodeStep(graph, inputs, attention, tokens, self._logits[:size])


@pytest.mark.parametrize("blocks", [0, 300])
def test_steps_of_graphs_give_the_tokens_of_steps_without(blocks: int, tmp_path: Path) -> None:
    """Sequences of several blocks come and go, with rows of padding; with few blocks some are preempted."""
    params = [
        SamplingParams(max_tokens=30 + 4 * i, temperature=0.7 * (i % 2), seed=2**40 + i)
        for i in range(len(PROMPTS))
    ]
    params[3].min_tokens, params[3].end_id = 20, 70
    produced = []
    for name in ("eager", "graphs"):
        core = start_core(
            Path("bundled"), tokens_per_block=16, max_num_seqs=8, max_tokens_in_paged_kv_cache=blocks
        )
        if name == "graphs":
            core.runner.graphs = EagerGraphs(core.runner.state, SIZES, None)
        with serve(core, tmp_path / name) as client:
            produced.append(client.generate(PROMPTS, params))
        assert not blocks or core.scheduler.preemptions
    assert isinstance(core.runner.graphs, EagerGraphs) and core.runner.graphs.steps > 50
    assert produced[0] == produced[1]


def test_ranks_replay_the_same_and_one_of_them_keeps_logits(tmp_path: Path, monkeypatch: Any) -> None:
    prompts, params = PROMPTS[:6], [SamplingParams(max_tokens=8, temperature=0.7 * (i % 2)) for i in range(6)]
    graphs: dict[int, EagerGraphs] = {}

    def replace(runner: Any) -> None:
        graphs[runner.state.model.spec.shard.rank] = runner.graphs = EagerGraphs(runner.state, SIZES, None)

    produced = []
    for core in (start_core(Path("bundled")), start_ranks(Path("bundled"), 2, monkeypatch, replace)):
        with serve(core, tmp_path / str(len(produced))) as client:
            produced.append(client.generate(prompts, params))
        core.close()
    assert produced[0] == produced[1]
    assert graphs[0].steps == graphs[1].steps > 5
    assert [len(graphs[rank]._logits) for rank in (0, 1)] == [8, 0]
