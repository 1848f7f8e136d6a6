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
from flashinfer_backend.attention.contract import StepShape
from flashinfer_backend.attention.torch_paged import TorchPagedAttention
from flashinfer_backend.cache.device import KVCache
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.worker.device_state import DeviceState
from flashinfer_backend.worker.graphs import DecodeGraphs
from replayed import ReplayedCapture

SIZES = [2, 4, 8]
PROMPTS = [[0, *range(40 + i, 60 + 3 * i)] for i in range(12)]


class ItemAttention:
    """The Triton kernel's view: work items in the step's upload, blocks in the block table, and where there
    are drafts the lengths that the device has."""

    reads_block_table = True

    def __init__(
        self,
        cache: KVCache,
        table: torch.Tensor,
        shape: StepShape,
        words: torch.Tensor,
        window: int | None = None,
        lengths: torch.Tensor | None = None,
        drafts: int = 0,
    ) -> None:
        self._cache, self._table, self._window, self._drafts = cache, table, window, drafts
        self._shape, self._items, self._lengths = shape, words.view(-1, split.ITEM_WORDS), lengths

    def plan(self, batch: Any, host: np.ndarray) -> bool:
        assert len(batch.slots) == self._shape.rows and batch.q_lens.max() <= self._shape.feeds_per_row
        host[:] = 99
        items = host.reshape(-1, split.ITEM_WORDS)
        window = split.planned_window(self._window, self._drafts)
        split.split_rows(batch.kv_lens, batch.slots, len(items), items, window, batch.q_lens)
        return True

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        self._run(layer, q, out, self._shape.feeds_per_row, self._lengths)

    def ahead(self, tokens: int, lengths: torch.Tensor) -> Any:
        return SimpleNamespace(run=lambda layer, q, out: self._run(layer, q, out, 1, lengths, tokens))

    def _run(
        self, layer: int, q: torch.Tensor, out: torch.Tensor, feeds: int, lengths: Any, ahead: int = 0
    ) -> None:
        table, (k_cache, v_cache) = self._table, self._cache.layers[layer]
        used = self._items[self._items[:, 0] >= 0].tolist()
        for row in range(self._shape.rows):
            mine = [item for item in used if item[0] == row]
            assert mine and {item[4] for item in mine} == {len(mine)}
            where = torch.cat([torch.arange(start, end) for _, start, end, *_ in mine])
            slot, fed, length = mine[0][5], mine[0][6], int(where[-1]) + 1
            if lengths is not None:
                length = max(1, int(lengths[slot]) + ahead)
                assert length <= where[-1] + 1, "more keys than were planned"
            for j in range(feeds):
                seen = length if feeds == 1 else min(max(length - fed + 1 + j, 1), length)
                first = 0 if self._window is None else max(0, seen - self._window)
                assert where[0] <= first, "keys that were not planned"
                keys = torch.arange(first, seen)
                blocks, places = table[slot, keys // k_cache.shape[1]], keys % k_cache.shape[1]
                k, v = (cache[blocks, places].transpose(0, 1)[None] for cache in (k_cache, v_cache))
                query = q[row * feeds + j][None, :, None]
                attended = F.scaled_dot_product_attention(query, k, v, enable_gqa=True)
                out[row * feeds + j] = attended[0, :, 0]


class ItemMixer:
    """A cache group's attention, whose decode graphs take ItemAttention."""

    def __init__(self, state: DeviceState, group: int) -> None:
        self._state, self._cache, self._window = state, state.caches[group], state.groups[group].window
        self.step = TorchPagedAttention(self._cache, state.model.spec.attention.heads, self._window).step

    def graph_words(self, shape: StepShape) -> int:
        heads = self._state.model.spec.attention.kv_heads
        return split.max_items(shape.rows, heads, False) * split.ITEM_WORDS

    def captured(self, shape: StepShape, table: Any, words: torch.Tensor, lengths: Any = None) -> Any:
        drafts = self._state.drafts.shape[1]
        return ItemAttention(self._cache, table, shape, words, self._window, lengths, drafts)


def replayed(runner: Any, sizes: list[int] = SIZES) -> ReplayedCapture:
    """Give a runner decode graphs whose replays run the step."""
    capture = ReplayedCapture()
    mixers = [ItemMixer(runner.state, group) for group in range(len(runner.state.groups))]
    runner.state.attention = runner.state._of_groups(mixers)
    runner.graphs = DecodeGraphs(runner.state, sizes, capture, runner.drafting)
    return capture


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
            capture = replayed(core.runner)
        with serve(core, tmp_path / name) as client:
            produced.append(client.generate(PROMPTS, params))
        assert not blocks or core.scheduler.preemptions
    assert capture.replays > 50
    assert produced[0] == produced[1]


def test_ranks_replay_the_same_and_one_of_them_keeps_logits(tmp_path: Path, monkeypatch: Any) -> None:
    prompts, params = PROMPTS[:6], [SamplingParams(max_tokens=8, temperature=0.7 * (i % 2)) for i in range(6)]
    graphs: dict[int, tuple[ReplayedCapture, Any]] = {}

    def replace(runner: Any) -> None:
        graphs[runner.state.model.spec.shard.rank] = replayed(runner), runner.graphs

    produced = []
    for core in (start_core(Path("bundled")), start_ranks(Path("bundled"), 2, monkeypatch, replace)):
        with serve(core, tmp_path / str(len(produced))) as client:
            produced.append(client.generate(prompts, params))
        core.close()
    assert produced[0] == produced[1]
    assert graphs[0][0].replays == graphs[1][0].replays > 5
    assert [len(graphs[rank][1]._logits) for rank in (0, 1)] == [8, 0]
