# SPDX-License-Identifier: Apache-2.0
"""Steps as graphs without a GPU: they are run again instead of replayed, over attention in plain torch that
takes what the kernels would."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from flashinfer_backend.attention import split
from flashinfer_backend.attention.batch import AttentionBatch
from flashinfer_backend.attention.contract import Captured, Prepared, StepShape
from flashinfer_backend.attention.prefixes import PREFIX_WORDS, PrefixTiles
from flashinfer_backend.attention.torch_paged import TorchPagedAttention
from flashinfer_backend.cache.device import KVCache
from flashinfer_backend.worker import graphs, runner
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


class PlannedAttention:
    """Of steps with one prompt; those with more run in pieces."""

    reads_block_table = False

    def __init__(self, attention: TorchPagedAttention) -> None:
        self._attention = attention
        self.taken = self.refused = 0

    def plan(self, batch: AttentionBatch, host: np.ndarray) -> bool:
        takes = len(batch.slots) - batch.num_single == 1
        self.taken, self.refused = self.taken + takes, self.refused + (not takes)
        if takes:
            self._attention.step(batch)
        return takes

    def ahead(self, tokens: int, lengths: torch.Tensor) -> Prepared:
        raise NotImplementedError

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        self._attention.run(layer, q, out)


class SharingAttention(PlannedAttention):
    """Of steps whose decode rows share prefixes; looks at what it is told of these."""

    def plan(self, batch: AttentionBatch, host: np.ndarray) -> bool:
        assert batch.prefixes is not None
        rows, counts, tokens = batch.prefixes
        assert len(rows) <= batch.num_single < len(batch.slots)
        table, size = batch.block_table[:, :], self._attention._block_size
        for own, shared in zip(np.split(rows, np.cumsum(counts)[:-1]), tokens.tolist(), strict=True):
            blocks = table[batch.slots[own].tolist(), : shared // size]
            assert shared % size == 0 and (batch.kv_lens[own] > shared).all() and (blocks == blocks[0]).all()
        return super().plan(batch, host)


class GraphedAttention:
    """Of one cache group; plain torch where a step is launched layer by layer."""

    def __init__(self, state: DeviceState, group: int) -> None:
        self._state, self._cache, self._window = state, state.caches[group], state.groups[group].window
        self._heads = state.model.spec.attention
        self.step = self._torch().step
        self.planned: list[PlannedAttention] = []  # of steps with prompts
        self.sharing: list[SharingAttention] = []  # those of them whose decode rows share prefixes
        self.sharing_decodes: list[SharedItemAttention] = []

    def _torch(self) -> TorchPagedAttention:
        return TorchPagedAttention(self._cache, self._heads.heads, self._window)

    def graph_words(self, shape: StepShape) -> int:
        if shape.feeds_per_row is None:
            return 0
        tiles = PrefixTiles(shape.rows, self._heads.heads, self._heads.kv_heads)
        items = split.max_items(shape.rows, self._heads.kv_heads, False)
        return items * split.ITEM_WORDS + (tiles.words if shape.shared else 0)

    def captured(
        self, shape: StepShape, block_table: torch.Tensor, words: torch.Tensor, lengths: Any = None
    ) -> Captured | None:
        if shape.shared and self._window is not None:
            return None
        if shape.feeds_per_row is None:
            if shape.tokens > graphs.MIXED_SIZES[-1]:  # as FlashInfer's plan
                return None
            kind, made = (
                (SharingAttention, self.sharing) if shape.shared else (PlannedAttention, self.planned)
            )
            made.append(kind(self._torch()))
            return made[-1]
        if shape.shared:
            found = SharedItemAttention(self._cache, block_table, self._heads.heads, shape.rows, words)
            self.sharing_decodes.append(found)
            return found
        drafts = self._state.drafts.shape[1]
        return ItemAttention(self._cache, block_table, shape, words, self._window, lengths, drafts)


def graphed(state: DeviceState) -> list[GraphedAttention]:
    """Gives the state attention with graphs; that of each cache group."""
    found = [GraphedAttention(state, group) for group in range(len(state.groups))]
    state.attention = state._of_groups(found)
    return found


def replayed(runner: Any, sizes: list[int] = SIZES) -> ReplayedCapture:
    """Give a runner decode graphs whose replays run the step."""
    capture = ReplayedCapture()
    graphed(runner.state)
    runner.graphs = DecodeGraphs(runner.state, sizes, capture, runner.drafting)
    return capture


def replay_graphs(monkeypatch: Any) -> list[ReplayedCapture]:
    """Graphs without a GPU, of up to 48 tokens of a step or 96, and times of theirs that are the same each
    time. What is captured for each runner."""
    captures: list[ReplayedCapture] = []

    def capture() -> ReplayedCapture:
        captures.append(ReplayedCapture())
        return captures[-1]

    monkeypatch.setattr(runner, "GraphCapture", capture)
    monkeypatch.setattr(graphs, "MIXED_SIZES", [8, 16, 32, 48])
    monkeypatch.setattr(graphs, "FURTHER_SIZES", [64, 96])
    monkeypatch.setattr(graphs.MixedGraphs, "_layer_seconds", lambda _, size: float(size))
    monkeypatch.setattr(graphs, "replay_seconds", lambda replay: replay() or 1.0)
    return captures
