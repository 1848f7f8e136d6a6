# SPDX-License-Identifier: Apache-2.0
"""What decode graphs are given, without a GPU: steps run eagerly, over attention that reads work items."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine.harness import serve, shallow_model, start_core
from engine.ranks_in_threads import start_ranks
from flashinfer_backend.attention import prefixes as attention_prefixes
from flashinfer_backend.attention import split
from flashinfer_backend.attention.contract import StepShape
from flashinfer_backend.attention.prefixes import PREFIX_WORDS, PrefixTiles
from flashinfer_backend.attention.torch_paged import TorchPagedAttention
from flashinfer_backend.cache.device import KVCache
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.worker import graphs, prefixes
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
                columns = (keys // k_cache.shape[1]).clamp(max=table.shape[1] - 1)  # drafts may reach beyond
                blocks, places = table[slot, columns], keys % k_cache.shape[1]
                k, v = (cache[blocks, places].transpose(0, 1)[None] for cache in (k_cache, v_cache))
                query = q[row * feeds + j][None, :, None]
                attended = F.scaled_dot_product_attention(query, k, v, enable_gqa=True)
                out[row * feeds + j] = attended[0, :, 0]


class SharedItemAttention:
    """The same of rows that share prefixes: what each of their tiles finds goes to the cells of its rows, and
    is added up with what their own items find."""

    reads_block_table = True

    def __init__(
        self, cache: KVCache, table: torch.Tensor, heads: int, rows: int, words: torch.Tensor
    ) -> None:
        self._cache, self._table, self._heads = cache, table, heads
        self._tiles = PrefixTiles(rows, heads, cache.format.num_kv_heads)
        own, tiles, self._order = words.split_with_sizes([len(words) - self._tiles.words, *self._tiles.sizes])
        self._items, self._prefix_items = own.view(-1, split.ITEM_WORDS), tiles.view(-1, PREFIX_WORDS)
        self.saved = 0  # tokens of all steps

    def plan(self, batch: Any, host: np.ndarray) -> bool:
        host[:] = 99
        own = self._items.numel()
        shared = self._tiles.split(batch.prefixes, batch.slots, len(self._items), host[own:])
        items = host[:own].reshape(-1, split.ITEM_WORDS)
        split.split_rows(batch.kv_lens, batch.slots, len(items), items, shared=shared)
        self.saved += 0 if batch.prefixes is None else batch.prefixes.saved
        return True

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        found: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {row: [] for row in range(len(q))}
        cells: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for first, count, start, end, cell, stride, slot, _ in self._prefix_items.tolist():
            for place, row in enumerate(self._order[first : first + count].tolist()):
                cells[cell + place * stride] = self._part(layer, q[row], slot, start, end)
        for row, start, end, _, _, slot, parts, first in self._items.tolist():
            if row >= 0:
                if not found[row]:
                    found[row] += [cells[first + part] for part in range(parts)]
                found[row].append(self._part(layer, q[row], slot, start, end))
        for row, parts in found.items():
            weights = torch.stack([peak for peak, _ in parts]).softmax(0)
            out[row] = (weights[..., None] * torch.stack([mean for _, mean in parts])).sum(0)

    def _part(
        self, layer: int, q: torch.Tensor, slot: int, start: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The logarithm of the sum of one row's weights [Hq], and the mean of the values by them [Hq, D]."""
        keys, size = torch.arange(start, end), self._cache.format.block_size
        blocks, places = self._table[slot, keys // size], keys % size
        k, v = (
            cache[blocks, places].repeat_interleave(self._heads // cache.shape[2], dim=1)
            for cache in self._cache.layers[layer]
        )
        scores = torch.einsum("hd,thd->ht", q, k) * q.shape[-1] ** -0.5
        return scores.logsumexp(1), torch.einsum("ht,thd->hd", scores.softmax(1), v)


class ItemMixer:
    """A cache group's attention, whose decode graphs take ItemAttention."""

    def __init__(self, state: DeviceState, group: int) -> None:
        self.sharing: list[SharedItemAttention] = []
        self._state, self._cache, self._window = state, state.caches[group], state.groups[group].window
        self.step = TorchPagedAttention(self._cache, state.model.spec.attention.heads, self._window).step

    def graph_words(self, shape: StepShape) -> int:
        own = self._state.model.spec.attention
        shared = PrefixTiles(shape.rows, own.heads, own.kv_heads).words if shape.shared else 0
        return split.max_items(shape.rows, own.kv_heads, False) * split.ITEM_WORDS + shared

    def captured(self, shape: StepShape, table: Any, words: torch.Tensor, lengths: Any = None) -> Any:
        drafts = self._state.drafts.shape[1]
        if shape.shared:
            if self._window is not None:
                return None
            heads = self._state.model.spec.attention.heads
            self.sharing.append(SharedItemAttention(self._cache, table, heads, shape.rows, words))
            return self.sharing[-1]
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
            shallow_model(), tokens_per_block=16, max_num_seqs=8, max_tokens_in_paged_kv_cache=blocks
        )
        if name == "graphs":
            capture = replayed(core.runner)
        with serve(core, tmp_path / name) as client:
            produced.append(client.generate(PROMPTS, params))
        assert not blocks or core.scheduler.preemptions
    assert capture.replays > 50
    assert produced[0] == produced[1]


def test_steps_are_timed_behind_a_context(monkeypatch: Any) -> None:
    options = {"speculative_method": "ngram", "max_draft_len": 3, "max_seq_len": 1024, "tokens_per_block": 16}
    core = start_core(shallow_model(), **options)
    replayed(core.runner)
    lengths, seen = core.runner.state.lengths, []

    def timed(replay: Any) -> float:
        replay()
        seen.append(int(lengths[0]) - graphs.TIMED_CONTEXT)
        return 1.0

    monkeypatch.setattr(graphs, "replay_seconds", timed)
    costs = core.runner.graphs.step_seconds()
    assert all(1 <= kept <= 1 + count for kept, (_, count) in zip(seen, costs, strict=True))
    assert (8, 3) in costs and (2, 0) in costs and not lengths.any()


DOCUMENTS = [[0, *range(40 + 500 * i, 40 + 500 * i + 150 + 70 * i)] for i in range(3)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_that_share_prefixes_read_them_once(ranks: int, tmp_path: Path, monkeypatch: Any) -> None:
    """Sequences over three documents and over none come and go, some as several answers to one prompt."""
    monkeypatch.setattr(prefixes, "LEAST_SAVED", 1 << 18)
    monkeypatch.setattr(attention_prefixes, "_LEAST_PART", 64)
    prompts = [[*([*DOCUMENTS, [0]][i % 4]), *range(1600 + 9 * i, 1607 + 9 * i + i)] for i in range(26)]
    params = [
        SamplingParams(max_tokens=8 + 3 * (i % 5), temperature=0.7 * (i % 2), seed=2**40 + i)
        for i in range(len(prompts))
    ]
    settings = {"tokens_per_block": 16, "max_num_seqs": 16, "max_seq_len": 512, "max_num_tokens": 512}
    settings["read_shared_prefixes_once"] = True
    produced, runners = [], []

    def replace(runner: Any) -> None:
        runners.append((runner, replayed(runner, [4, 16])))

    for once in (False, True):
        if not once:
            core = start_core(shallow_model(), **settings)
        elif ranks == 1:
            replace((core := start_core(shallow_model(), **settings)).runner)
        else:
            core = start_ranks(shallow_model(), ranks, monkeypatch, replace, **settings)
        with serve(core, tmp_path / str(once)) as client:
            produced.append(client.generate(prompts, params))
            shared = [client.submit(prompts[0], each) for each in params[:1]]
            shared += [client.submit(prompts[0], each, shared[0]) for each in params[1:6]]
            client.wait(shared)
            produced[-1] += [client.tokens[i] for i in shared]
        core.close()
    assert produced[0] == produced[1]
    saved = [sum(own.saved for own in runner.state.attention.sharing) for runner, _ in runners]
    assert len(saved) == ranks and saved[0] == saved[-1] > 5000


def test_ranks_replay_the_same_and_one_of_them_keeps_logits(tmp_path: Path, monkeypatch: Any) -> None:
    prompts, params = PROMPTS[:6], [SamplingParams(max_tokens=8, temperature=0.7 * (i % 2)) for i in range(6)]
    params[2].frequency_penalty = 1.5
    graphs: dict[int, tuple[ReplayedCapture, Any]] = {}

    def replace(runner: Any) -> None:
        graphs[runner.state.model.spec.shard.rank] = replayed(runner), runner.graphs

    produced = []
    for core in (start_core(shallow_model()), start_ranks(shallow_model(), 2, monkeypatch, replace)):
        with serve(core, tmp_path / str(len(produced))) as client:
            produced.append(client.generate(prompts, params))
        core.close()
    assert produced[0] == produced[1]
    assert graphs[0][0].replays == graphs[1][0].replays > 5
    assert [len(graphs[rank][1]._logits) for rank in (0, 1)] == [8, 0]
