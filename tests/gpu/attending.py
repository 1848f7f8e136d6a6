# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's attention next to plain torch's over the same blocks, step by step and in CUDA graphs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from comparing import assert_close, capture

from flashinfer_backend.attention.batch import AttentionBatch
from flashinfer_backend.attention.contract import Scores, StepShape
from flashinfer_backend.attention.torch_paged import TorchPagedAttention
from flashinfer_backend.cache.device import KVCache
from flashinfer_backend.ops import fp8

DIM, BLOCK_SIZE, MAX_SEQS, MAX_BLOCKS = 128, 16, 64, 300
HEADS = [(32, 8), (28, 4), (16, 8), (32, 32)]
NO_WORDS = np.empty(0, np.int32)

Scales = tuple[tuple[float, float], ...]  # of keys and values, a layer each
Steps = Mapping[str, tuple[list[int], list[int]]]  # q_lens and kv_lens


def random_cache(
    layers: int, shape: tuple[int, ...], scales: Scales = (), wide: torch.dtype = torch.float32,
    spoilt: bool = False,
) -> tuple[KVCache, KVCache]:  # fmt: skip
    """Layers of keys and values [blocks, block_size, Hkv, D] in bfloat16 or, with scales, in e4m3; and what
    these mean, in `wide`. spoilt: block 0 is all NaN."""
    stored, meant = [], []
    for factors in scales or [(1.0, 1.0)] * layers:
        pair = [torch.randn(shape, device="cuda") for _ in "kv"]
        if spoilt:
            for part in pair:
                part[0] = torch.nan
        keys, values = (
            fp8.to_e4m3(part, factor) if scales else part.bfloat16()
            for part, factor in zip(pair, factors, strict=True)
        )
        stored.append((keys, values))
        meant.append((keys.to(wide) * factors[0], values.to(wide) * factors[1]))
    return KVCache.over(stored, scales), KVCache.over(meant)


class Setup:
    """Random caches, a random block table over distinct blocks, and both implementations.

    wide, spoilt: as in random_cache. With a window, blocks behind it are block 0.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        backend: str = "auto",
        *,
        dim: int = DIM,
        layers: int = 2,
        blocks: int = 4000,
        max_blocks: int = MAX_BLOCKS,
        scales: Scales = (),
        wide: torch.dtype = torch.float32,
        spoilt: bool = False,
        copied_blocks: int = 4000,
        window: int | None = None,
        scores: Sequence[Scores] | None = None,
    ) -> None:
        from flashinfer_backend.attention.flashinfer_paged import FlashInferAttention

        torch.manual_seed(0)
        self.rng = np.random.default_rng(0)
        self.heads, self.dim, self.layers, self.blocks, self.window = heads, dim, layers, blocks, window
        cache, meant = random_cache(layers, (blocks, BLOCK_SIZE, kv_heads, dim), scales, wide, spoilt)
        # The last row is the slot of padded rows: all of its blocks are block 0.
        self.table = torch.zeros(MAX_SEQS + 1, max_blocks, dtype=torch.int32, device="cuda")
        self.attention: Any = FlashInferAttention(
            cache,
            heads,
            MAX_SEQS,
            max_blocks,
            backend,
            dtype=torch.bfloat16,
            copied_blocks=copied_blocks,
            window=window,
            scores=scores,
        )
        self.wide, self.reference = wide, TorchPagedAttention(meant, heads, window, scores)

    def batch(self, q_lens: list[int], kv_lens: Sequence[int]) -> AttentionBatch:
        slots = self.rng.permutation(MAX_SEQS)[: len(q_lens)].astype(np.int32)
        blocks = iter(self.rng.permutation(np.arange(1, self.blocks)))
        table = np.zeros(self.table.shape, np.int32)
        for slot, q_len, kv_len in zip(slots, q_lens, kv_lens, strict=True):
            seen = kv_len if self.window is None else min(kv_len, q_len + self.window - 1)
            for column in range((kv_len - seen) // BLOCK_SIZE, -(-kv_len // BLOCK_SIZE)):
                table[slot, column] = next(blocks)
        self.table.copy_(torch.from_numpy(table))
        return AttentionBatch(np.array(q_lens, np.int32), np.array(kv_lens, np.int32), slots, self.table)

    def padded(self, batch: AttentionBatch, rows: int) -> AttentionBatch:
        """The decode rows of `batch` and rows of padding."""
        padding = rows - len(batch.slots)
        return AttentionBatch(
            np.ones(rows, np.int32),
            np.concatenate([batch.kv_lens, np.ones(padding, np.int32)]),
            np.concatenate([batch.slots, np.full(padding, MAX_SEQS, np.int32)]),
            batch.block_table,
            prefixes=batch.prefixes,
        )

    def query(self, tokens: int) -> torch.Tensor:
        return torch.randn(tokens, self.heads, self.dim, device="cuda").bfloat16()

    def expected(self, batch: AttentionBatch, layer: int, q: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q, dtype=self.wide)
        self.reference.step(batch).run(layer, q.to(self.wide), out)
        return out


class DecodeGraph:
    """A graph of `rows` decode rows, whose words are uploaded separately."""

    def __init__(self, setup: Setup, rows: int, layer: int = 0, shared: bool = False) -> None:
        self.setup, self.rows = setup, rows
        shape = StepShape(rows, rows, 1, shared=shared)
        self.words = torch.zeros(setup.attention.graph_words(shape), dtype=torch.int32, device="cuda")
        self.state = setup.attention.captured(shape, setup.table, self.words)
        assert self.state is not None
        none = np.empty(0, np.int32)
        self.plan(AttentionBatch(none, none, none, setup.table))
        self.q, self.out = setup.query(rows), setup.query(rows)
        self.graph, _ = capture(lambda: self.state.run(layer, self.q, self.out))

    def plan(self, batch: AttentionBatch) -> None:
        host = np.full(len(self.words), 99, np.int32)
        assert self.state.plan(self.setup.padded(batch, self.rows), host)
        self.words.copy_(torch.from_numpy(host))

    def replay(self, batch: AttentionBatch) -> None:
        self.q.copy_(self.setup.query(self.rows))
        self.out.fill_(float("nan"))
        self.plan(batch)
        self.graph.replay()


class StepGraph:
    """A graph of steps with prompts, of all layers."""

    def __init__(self, setup: Setup, tokens: int, decode_rows: int, shared: bool = False) -> None:
        self.setup = setup
        words = torch.empty(0, dtype=torch.int32, device="cuda")
        shape = StepShape(tokens, decode_rows, None, shared=shared)
        self.state = setup.attention.captured(shape, setup.table, words)
        assert self.state is not None
        sizes = setup.layers, tokens, setup.heads, setup.dim
        self.q, self.out = (torch.zeros(sizes, device="cuda", dtype=torch.bfloat16) for _ in "qo")
        self.graph, _ = capture(self._run)

    def _run(self) -> None:
        for layer in range(self.setup.layers):
            # As in a step: what writes q ends before attention starts.
            self.state.run(layer, self.q[layer] * 1, self.out[layer])

    def replay(self, batch: AttentionBatch) -> bool:
        """False, and nothing done, where the graph cannot compute the step."""
        if not self.state.plan(batch, NO_WORDS):
            return False
        self.q.normal_()
        self.out.fill_(float("nan"))
        self.graph.replay()
        return True

    def check(self, name: str, batch: AttentionBatch) -> None:
        """All layers, and that what lies behind the step's rows is left alone."""
        used = int(batch.q_lens.sum())
        for layer in range(self.setup.layers):
            q, out = self.q[layer], self.out[layer]
            check_close(f"{name}, layer {layer}", out[:used], self.setup.expected(batch, layer, q[:used]))
            assert out[used:].isnan().all(), name


def check_close(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    try:
        assert_close(actual, expected)
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from None


def check_layers(
    name: str, setup: Setup, batch: AttentionBatch, run: Callable[[int, torch.Tensor, torch.Tensor], None]
) -> None:
    """run(layer, q, out): of a step."""
    for layer in range(setup.layers):
        q = setup.query(int(batch.q_lens.sum()))
        out = torch.full_like(q, float("nan"))
        run(layer, q, out)
        check_close(f"{name}, layer {layer}", out, setup.expected(batch, layer, q))


def check_eager_steps(setup: Setup, steps: Steps) -> None:
    for name, (q_lens, kv_lens) in steps.items():
        batch = setup.batch(q_lens, kv_lens)
        check_layers(name, setup, batch, setup.attention.step(batch).run)


def check_decode_replays(setup: Setup, rows: int, replays: Iterable[tuple[int, int]]) -> None:
    """A graph of `rows` decode rows replays other lengths, and fewer rows. replays: rows of up to how many
    tokens."""
    graph = DecodeGraph(setup, rows)
    for count, longest in replays:
        batch = setup.batch([1] * count, setup.rng.integers(1, longest, count).tolist())
        graph.replay(batch)
        assert_close(graph.out[:count], setup.expected(batch, 0, graph.q[:count]))
        assert graph.out.isfinite().all()


def check_graphs(setup: Setup) -> None:
    for rows in (32, 4):
        check_decode_replays(setup, rows, [(rows, 300), (rows - 1, 4000 // rows), (1, 4700), (rows // 2, 40)])
