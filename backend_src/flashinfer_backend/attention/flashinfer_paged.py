# SPDX-License-Identifier: Apache-2.0
"""Attention over the paged cache: FlashInfer's FA2 and FA3, and the Triton decode kernel.

Decode rows (one query token) and prefill rows of a step are two kernel calls per layer, each over its own
slice of `q` and `out`.

Stream order is what makes sharing buffers safe: metadata of step N + 1 is copied behind step N's kernels on
the same stream, which has waited for the side stream's. Only pinned host memory can be overwritten too early:
it comes from a ring guarded by events.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashinfer_backend.attention import split, triton_copy, triton_decode
from flashinfer_backend.attention.batch import AttentionBatch
from flashinfer_backend.attention.contract import Captured, Prepared, Scores, StepShape
from flashinfer_backend.attention.copies import MAX_PROMPTS, copies_pay, has_fa3
from flashinfer_backend.attention.flashinfer_calls import INT_WORKSPACE, Call, PagedCalls, Shape
from flashinfer_backend.attention.metadata import PagedMetadata, PinnedRing
from flashinfer_backend.attention.prefixes import PREFIX_WORDS, Prefixes, PrefixTiles
from flashinfer_backend.attention.triton_prefix import SharedWork, prefix_parts
from flashinfer_backend.cache.device import KVCache
from flashinfer_backend.core.config import GPU_HEAD_DIMS
from flashinfer_backend.ops import device
from flashinfer_backend.ops.fp8 import E4M3

# Tokens of a graph: FlashInfer lays out its plan for this number, so alike for all graphs. Of larger steps
# what lies between the attention of two layers is a graph.
LARGEST_GRAPH = 1024


class FlashInferAttention:
    """step(batch) once a step, run(layer, q, out) once a layer; eager steps of decode and prefill rows.

    cache: of bfloat16, float16 or e4m3, on a CUDA device; num_heads: query heads. dtype: of queries, if the
    cache's is another.
    max_num_seqs: most rows in a step. max_blocks_per_seq: columns of the block table.
    decode_backend: FlashInfer's "fa2", the "triton" kernel next to this file, or "auto", which takes what
    measured faster (docs/notes/performance-notes.md).
    most_drafts: by the number of decode rows of a step, how many drafts each of them checks at most; only the
    Triton kernel checks any.
    copied_blocks: how many blocks the prompts of a step may read for FA3 over copies in the type of queries
    (attention/copies.py); prompts that read more take FA3 over the cache, or FA2 over one of e4m3.
    window: the latest tokens that a token sees, itself included; None: all. scores: of each layer; None:
    scales of 1 / sqrt(head_dim). like: that of another cache group, which shares scratch memory with it.
    All calls must come from one thread with one current stream.
    worker/formats.py has refused sizes of heads that these kernels do not have, and what a checkpoint's
    layers and a decode backend do not have together. Raises ValueError for drafts without the Triton kernel.
    """

    def __init__(
        self,
        cache: KVCache,
        num_heads: int,
        max_num_seqs: int,
        max_blocks_per_seq: int,
        decode_backend: str = "auto",
        dtype: torch.dtype | None = None,
        copied_blocks: int = 0,
        most_drafts: Callable[[int], int] | None = None,
        window: int | None = None,
        scores: Sequence[Scores] | None = None,
        like: FlashInferAttention | None = None,
    ) -> None:
        shape, dtype = cache.format, dtype or cache.format.dtype
        num_kv_heads, head_dim, block_size = shape.num_kv_heads, shape.head_dim, shape.block_size
        own = Shape(num_heads, num_kv_heads, head_dim, block_size, dtype, shape.dtype)
        assert head_dim in GPU_HEAD_DIMS  # worker/formats.py checks it
        self._scores = list(scores or [Scores(1.0 / math.sqrt(head_dim))] * shape.num_layers)
        check_scores(self._scores, window)
        soft_cap = self._scores[0].soft_cap is not None
        self._window = window
        self._planned_window = split.planned_window(window, 0 if most_drafts is None else most_drafts(1))
        self.layers = cache.layers
        self._scales = [shape.scales_of(layer) for layer in range(shape.num_layers)]
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.max_num_seqs = max_num_seqs
        variants = list(dict.fromkeys(each.variant for each in self._scores))
        varied = variants != [None]
        # The Triton kernel measured fastest or within 3 % of it from 1 to 256 rows
        # (docs/notes/performance-notes.md). It has no variants.
        fastest = "fa2" if varied else "triton"
        self.decode_backend = fastest if decode_backend == "auto" else decode_backend
        where = cache.device
        if most_drafts is not None and self.decode_backend != "triton":
            cure = "" if varied else "attention_backend to auto, or "
            raise ValueError(
                f"attention_backend {self.decode_backend} takes lengths from the host, which learns late how"
                f" many drafts were accepted: set {cure}speculative_method to none"
            )
        self._calls: PagedCalls = PagedCalls(
            own, where, window, soft_cap, None if like is None else like._calls, variants
        )
        self._fp8_cache = shape.dtype == E4M3
        plain = not varied and not soft_cap and all(each.sinks is None for each in self._scores)
        # Rows that share a prefix read it once where all layers see it whole, in 16 bits and without drafts.
        self._shares = (
            self.decode_backend == "triton" and plain and window is None and most_drafts is None
            and not self._fp8_cache and PrefixTiles.fit(num_heads, num_kv_heads)
        )  # fmt: skip
        tiles = self.prefix_tiles(max_num_seqs) if self._shares else None
        items = parts = split.most_items(max_num_seqs, num_kv_heads, self._fp8_cache)
        if tiles is not None:
            items, parts = items + tiles.words // split.ITEM_WORDS, parts + tiles.cells
        rows = max(max_num_seqs, MAX_PROMPTS)  # a step graph's prompts, padding included
        self._ring = PinnedRing(6, INT_WORKSPACE, rows, items)
        self.items = torch.zeros((items, split.ITEM_WORDS), dtype=torch.int32, device=where)
        if most_drafts is not None:
            drafted = (self.max_items(rows) * (1 + most_drafts(rows)) for rows in range(1, max_num_seqs + 1))
            parts = max(parts, *drafted)
        self.workspace = triton_decode.DecodeWorkspace(
            max_num_seqs, parts, num_heads, num_kv_heads, head_dim, where
        )
        self._decode = PagedMetadata(self._ring, rows, max_blocks_per_seq, block_size, where)
        self._prefill = PagedMetadata(self._ring, rows, max_blocks_per_seq, block_size, where)
        self._decode_call = Call("none", 0)
        self._prefill_call = Call("none", 0)
        self._side_stream: torch.cuda.Stream = torch.cuda.Stream(where) if like is None else like._side_stream
        self._fa3 = has_fa3(where) and not varied and (copied_blocks > 0 or not self._fp8_cache)
        self._group = num_heads // num_kv_heads
        self._copies: triton_copy.Copies | None = None
        if self._fa3 and copied_blocks:
            shared = None if like is None else like._copies
            self._copies = shared or triton_copy.Copies(shape, dtype, copied_blocks, where)
        self._calls.load(["fa2", "fa3"] if self._fa3 else ["fa2"])

    def step(self, batch: AttentionBatch) -> Prepared:
        """Describe an eager step. Host work and asynchronous copies only; no synchronisation."""
        rows = len(batch.slots)
        decode = rows if batch.drafted > 1 else batch.num_single
        self._decode_call = Call("none", 0)
        self._prefill_call = Call("none", 0)
        if decode and batch.lengths is not None:
            items = self.items[: self.max_items(decode)]
            self.plan_items(batch.kv_lens[:decode], batch.slots[:decode], items, batch.q_lens[:decode])
            lengths = split.Lengths(batch.lengths, batch.drafted, batch.ahead, batch.drafted > 1)
            self._decode_call = Call("triton", decode, None, items, batch.block_table, lengths)
        elif decode:
            self._decode_call = self.plan_decode(
                self.decode_backend, batch.kv_lens[:decode], batch.slots[:decode], batch.block_table
            )
        if rows > decode:
            self._prefill_call = self._plan_prefill(batch, decode)
        return self

    def run(self, layer: int, q: Tensor, out: Tensor) -> None:
        """Attend q[T, Hq, D] of the planned step to the layer's cache and write out[T, Hq, D]."""
        decode, call = self._decode_call.rows, self._prefill_call
        if self._decode_call.lengths is not None and self._decode_call.lengths.ragged:
            decode = len(q)

        def prompts() -> None:
            self.run_prompts(call.backend, call.info, layer, q[decode:], out[decode:], call.rows)

        if decode and call.rows:
            self.side_by_side(
                len(q), prompts, lambda: self.run_decode(self._decode_call, layer, q[:decode], out[:decode])
            )
        elif decode:
            self.run_decode(self._decode_call, layer, q[:decode], out[:decode])
        elif call.rows:
            prompts()

    def graph_words(self, shape: StepShape) -> int:
        """How many int32 words a graph wants in the step's upload; a multiple of 8. For decode rows alone,
        the Triton kernel's work items; steps with prompts upload theirs themselves."""
        if self.decode_backend != "triton" or shape.feeds_per_row is None:
            return 0
        shared = self.prefix_tiles(shape.rows).words if shape.shared and self._shares else 0
        return self.max_items(shape.rows) * split.ITEM_WORDS + shared

    def captured(
        self, shape: StepShape, block_table: Tensor, words: Tensor, lengths: Tensor | None = None
    ) -> Captured | None:
        """State for a CUDA graph: of decode rows alone, see DecodeGraphState; of steps with prompts, see
        StepGraphState, and None where a decode backend was forced, which plans every step again, where there
        is no FA3, and of more than LARGEST_GRAPH tokens. Of shared prefixes, None where they are not read
        once."""
        if shape.shared and not self._shares:
            return None
        if shape.feeds_per_row is None:
            if self.decode_backend != "triton" or not self._fa3 or shape.tokens > LARGEST_GRAPH:
                return None
            return StepGraphState(self, shape, block_table, lengths)
        if not 1 <= shape.rows <= self.max_num_seqs:
            raise ValueError(f"graph bucket {shape.rows} is outside 1..{self.max_num_seqs} (max_num_seqs)")
        return DecodeGraphState(self, shape, block_table, words, lengths)

    # What follows is shared with DecodeGraphState.

    def plan_decode(
        self, backend: str, kv_lens: np.ndarray, slots: np.ndarray, block_table: Tensor, bucket: int = 0
    ) -> Call:
        """Upload lengths and blocks of decode rows; bucket > 0 pads to that many rows for a graph of FA2."""
        rows = bucket or len(slots)
        if backend == "triton":
            items = self.items[: self.max_items(rows)]
            self.plan_items(kv_lens, slots, items)
            return Call(backend, rows, None, items, block_table)
        entry = self._decode.upload(None, kv_lens, slots, rows)
        self._decode.gather(block_table, entry)
        info = self._calls.plan("fa2", False, entry, rows, rows, bucket > 0)
        self._ring.release(entry)
        return Call(backend, rows, info)

    def run_decode(self, call: Call, layer: int, q: Tensor, out: Tensor) -> None:
        """q, out [tokens, Hq, D] of planned decode rows."""
        cache, rows, scales = self.layers[layer], call.rows, self._scales[layer]
        if call.backend == "fa2":
            where, how = (q, cache, out, self._decode, rows), self._scores[layer]
            self._calls.run("fa2", False, call.info, *where, scales, scores=how)
        else:
            assert call.items is not None and call.table is not None
            how, shared = self._scores[layer], call.shared
            if shared is not None:
                prefix_parts(q, cache, shared, call.table, self.workspace, how.scale)
            triton_decode.decode(
                q, cache, out, call.items, call.table, self.workspace, how.scale, scales,
                soft_cap=how.soft_cap, sinks=how.sinks, rows=rows, lengths=call.lengths, window=self._window,
                shared=shared is not None,
            )  # fmt: skip

    def _plan_prefill(self, batch: AttentionBatch, first: int) -> Call:
        q_lens, kv_lens = batch.q_lens[first:], batch.kv_lens[first:]
        backend = self.choose_prefill(q_lens, kv_lens)
        info = self.plan_prompts(backend, q_lens, kv_lens, batch.slots[first:], batch.block_table)
        return Call(backend, len(q_lens), info)

    # StepGraphState also shares what follows.

    def behind(self, q_lens: np.ndarray, kv_lens: np.ndarray) -> np.ndarray | None:
        """How many blocks of each row its queries do not read; None: they read all."""
        if self._window is None:
            return None
        return np.maximum(kv_lens - q_lens - (self._window - 1), 0) // self._prefill.block_size

    def max_items(self, rows: int) -> int:
        """The Triton kernel's work items for a number of decode rows."""
        return split.max_items(rows, self.num_kv_heads, self._fp8_cache)

    def prefix_tiles(self, rows: int) -> PrefixTiles:
        """How what decode rows share is cut up."""
        return PrefixTiles(rows, self.num_heads, self.num_kv_heads)

    def work(self, items: Tensor, rows: int, tiles: PrefixTiles | None) -> tuple[Tensor, SharedWork | None]:
        """What `split` wrote of up to `rows` rows, as the kernels take it."""
        own, shared = items.split_with_sizes([self.max_items(rows), len(items) - self.max_items(rows)])
        if tiles is None:
            return own, None
        words, order = shared.view(-1).split_with_sizes(tiles.sizes)
        return own, SharedWork(words.view(-1, PREFIX_WORDS), order)

    def split(
        self,
        kv_lens: np.ndarray,
        slots: np.ndarray,
        items: np.ndarray,
        q_lens: np.ndarray | None = None,
        tiles: PrefixTiles | None = None,
        prefixes: Prefixes | None = None,
    ) -> None:
        """The Triton kernel's work for decode rows, to int32 [n, ITEM_WORDS]; behind it, what `tiles` says of
        their prefixes."""
        shared = None
        if tiles is not None:
            items, words = np.split(items, [len(items) - tiles.words // split.ITEM_WORDS])
            shared = tiles.split(prefixes, slots, len(items), words.reshape(-1))
        split.split_rows(kv_lens, slots, len(items), items, self._planned_window, q_lens, shared)

    def plan_items(
        self,
        kv_lens: np.ndarray,
        slots: np.ndarray,
        items: Tensor,
        q_lens: np.ndarray | None = None,
        tiles: PrefixTiles | None = None,
        prefixes: Prefixes | None = None,
    ) -> None:
        """Upload the Triton kernel's work for decode rows (if any) to `items`, the first of self.items."""
        entry = self._ring.next()
        if len(slots):
            self.split(kv_lens, slots, entry.items.numpy()[: len(items)], q_lens, tiles, prefixes)
        else:
            entry.items[:, 0], entry.items[:, 1] = -1, 0  # no row's, and a tile of no rows
        items.copy_(entry.items[: len(items)], non_blocking=True)
        self._ring.release(entry)

    def plan_prompts(
        self,
        backend: str,
        q_lens: np.ndarray,
        kv_lens: np.ndarray,
        slots: np.ndarray,
        block_table: Tensor,
        first: int = 0,
        graph_tokens: int = 0,
    ) -> Any:
        """FlashInfer's plan of prompts whose queries begin at row `first` of q. graph_tokens > 0: one that is
        laid out alike for all steps of up to that many tokens; q_lens is padded with zeros then."""
        rows, tokens = len(q_lens), graph_tokens or int(q_lens.sum())
        behind = self.behind(q_lens[: len(kv_lens)], kv_lens)
        if behind is not None:
            kv_lens = kv_lens - behind * self._prefill.block_size
        entry = self._prefill.upload(q_lens, kv_lens, slots, rows, first, behind)
        self._prefill.gather(block_table, entry)
        starts = None
        if backend == "copied":
            assert self._copies is not None
            begins = self._copies.starts(entry.host(rows).kv_indptr.numpy())
            assert begins[-1] <= len(self._copies.layer[0]), "more is read than copies have room for"
            starts = torch.from_numpy(begins)
        info = self._calls.plan(backend, True, entry, tokens, rows, graph_tokens > 0, starts)
        self._ring.release(entry)
        return info

    def side_by_side(self, tokens: int, prompts: Callable[[], None], decode: Callable[[], None]) -> None:
        """Launch both kinds of attention of a step of `tokens`.

        Prompts occupy few SMs for long, decode rows all SMs for a short time. Together they take little
        longer than one of them alone. Steps of few tokens have products that start before the kernel before
        them has ended, which works along one stream only. FA2 shares its workspace with prompts of FA2.
        """
        main = torch.cuda.current_stream()
        serial = tokens <= device.active().prompt_attention.serial_tokens or self.decode_backend != "triton"
        side = main if serial else self._side_stream
        if side is not main:
            side.wait_stream(main)
        with torch.cuda.stream(side):
            prompts()
        decode()
        if side is not main:
            main.wait_stream(side)

    def run_prompts(self, backend: str, info: Any, layer: int, q: Tensor, out: Tensor, rows: int) -> None:
        """q, out [T, Hq, D] of planned prompts."""
        cache, scales, metadata = self.layers[layer], self._scales[layer], self._prefill
        if backend == "copied":
            assert self._copies is not None
            # On the stream of FA3, which has read the last layer's copies when these are written.
            self._copies.write(cache, metadata, rows)
            cache = self._copies.layer
        self._calls.run(backend, True, info, q, cache, out, metadata, rows, scales, self._scores[layer])

    def choose_prefill(self, q_lens: np.ndarray, kv_lens: np.ndarray) -> str:
        """How these prefill rows are computed: by FA3 over copies ("copied"), or over the cache where copies
        would cost more than they bring (core/tuned) or have no room; by FA2 where FA3's tiles do not fit the
        rows, or it would read a cache of e4m3."""
        behind = self.behind(q_lens, kv_lens)
        if behind is not None:
            kv_lens = kv_lens - behind * self._prefill.block_size
        # A program of FA3 takes 128 queries of one head over the whole length: short rows waste the tile,
        # and few tiles over a long prefix leave SMs idle where FA2 splits the sequence.
        numbers, tiles = device.active().prompt_attention, int(((q_lens + 127) // 128).sum()) * self.num_heads
        wasteful = tiles > device.sms() and int(q_lens.sum()) < numbers.short_queries * len(q_lens)
        idle = tiles < numbers.few_tiles and int(kv_lens.max()) > numbers.long_prefix
        if not self._fa3 or wasteful or idle:
            return "fa2"
        where = self._prefill.block_size, self._group, self._fp8_cache, self._window
        if self._copies is not None and copies_pay(q_lens, kv_lens, self._copies.blocks, *where):
            return "copied"
        return "fa2" if self._fp8_cache else "fa3"

    @property
    def graphed_prompts(self) -> str:
        """What prompts of steps that are graphs take. A graph would copy for few queries as for many, so it
        reads the cache where FA3 can."""
        return "copied" if self._fp8_cache else "fa3"


class DecodeGraphState:
    """Decode attention inside a captured CUDA graph of shape.rows rows, of shape.feeds_per_row tokens each.

    Capture `run` for every layer with q and out of exactly shape.tokens rows. Before each replay call
    plan(batch, host) on the stream of the replay, with as many rows: pad with rows in a slot whose blocks are
    all block 0.

    block_table, words and lengths are device tensors whose addresses the graph keeps. The Triton kernel reads
    table and lengths while the graph runs, and of the step's upload the graph_words that `plan` writes to
    `host`: the caller copies them to `words`, before the capture too. FA2 has no such words, nor several
    tokens a row; `plan` copies what it needs, and the blocks that the table has by then. Of shape.shared,
    what the batch's rows share is read by a kernel of its own before each layer's.
    """

    def __init__(
        self,
        attention: FlashInferAttention,
        shape: StepShape,
        block_table: Tensor,
        words: Tensor,
        lengths: Tensor | None,
    ) -> None:
        self._attention, self._shape = attention, shape
        self._tiles: PrefixTiles | None = None
        if attention.decode_backend == "triton":
            ends = None
            if lengths is not None:
                ends = split.Lengths(lengths, shape.feeds_per_row or 1)
            self._tiles = attention.prefix_tiles(shape.rows) if shape.shared else None
            work = attention.work(words.view(-1, split.ITEM_WORDS), shape.rows, self._tiles)
            self._call = Call("triton", shape.rows, None, work[0], block_table, ends, work[1])
        else:  # a step of padded rows, so that capture can follow at once
            none = np.empty(0, dtype=np.int32)
            self._call = attention.plan_decode(attention.decode_backend, none, none, block_table, shape.rows)

    @property
    def reads_block_table(self) -> bool:
        return self._call.table is not None

    def plan(self, batch: AttentionBatch, host: np.ndarray) -> bool:
        """Describe the step that the next replay computes, always. Host work and asynchronous copies only."""
        rows = len(batch.slots)
        feeds = self._shape.feeds_per_row
        if rows != self._shape.rows or batch.q_lens.max() > (feeds or 1):
            raise ValueError(
                f"a decode graph of {self._shape.rows} rows of {feeds} tokens was given {rows} of up to "
                f"{batch.q_lens.max()}"
            )
        if self._call.items is not None:
            items = host.reshape(-1, split.ITEM_WORDS)
            q_lens = batch.q_lens if self._call.lengths is not None else None
            self._attention.split(batch.kv_lens, batch.slots, items, q_lens, self._tiles, batch.prefixes)
            return True
        call = self._attention.plan_decode(
            self._call.backend, batch.kv_lens, batch.slots, batch.block_table, self._shape.rows
        )
        if list(call.info) != list(self._call.info):
            raise RuntimeError("FlashInfer's plan no longer matches the captured graph; capture it again")
        return True

    def run(self, layer: int, q: Tensor, out: Tensor) -> None:
        self._attention.run_decode(self._call, layer, q, out)

    def ahead(self, tokens: int, lengths: Tensor) -> Prepared:
        """See Captured. Its q and out are [shape.rows, Hq, D]."""
        ends = split.Lengths(lengths, 1, tokens)
        return _Ahead(self._attention, self._call._replace(lengths=ends))


class _Ahead:
    """One query a row over the work items of a graph's step."""

    def __init__(self, attention: FlashInferAttention, call: Call) -> None:
        self._attention, self._call = attention, call

    def run(self, layer: int, q: Tensor, out: Tensor) -> None:
        self._attention.run_decode(self._call, layer, q, out)


class StepGraphState:
    """Attention of a step of up to `tokens` tokens: decode rows first, at most `decode_rows`, then prompts.

    Decode rows take the Triton kernel, prompts FA3, over copies where the cache is of e4m3; all of them read
    what is different from step to step from the device, so one capture serves every step that `plan` accepts.
    Capture `run` for every layer with q and out of exactly `tokens` rows (at most LARGEST_GRAPH); before each
    replay call plan(batch, host), host empty, on the stream of the replay. Rows beyond the batch's are left
    alone.
    """

    def __init__(
        self, attention: FlashInferAttention, shape: StepShape, block_table: Tensor, lengths: Tensor | None
    ) -> None:
        tokens, decode_rows = shape.tokens, shape.rows
        self._attention, self._decode_rows = attention, decode_rows
        self._tiles = attention.prefix_tiles(decode_rows) if shape.shared else None
        own = attention.max_items(decode_rows)
        if self._tiles is not None:
            own += self._tiles.words // split.ITEM_WORDS
        self._items, self._tokens = attention.items[:own], tokens
        ends = None if lengths is None else split.Lengths(lengths)
        items, work = attention.work(self._items, decode_rows, self._tiles)
        self._call = Call("triton", decode_rows, None, items, block_table, ends, work)
        none = np.empty(0, np.int32)
        attention.plan_items(none, none, self._items)  # a step of nothing, so that capture can follow at once
        self._info = self._plan_prompts(none, none, none, 0, block_table)

    @property
    def reads_block_table(self) -> bool:
        """No: prompts have the blocks that the table has when they are planned."""
        return False

    def plan(self, batch: AttentionBatch, host: np.ndarray) -> bool:
        """Describe the step that the next replay computes; False, and nothing done, where it cannot. Host
        work and asynchronous copies only."""
        decode = batch.num_single
        q_lens, kv_lens = batch.q_lens[decode:], batch.kv_lens[decode:]
        if decode > self._decode_rows or not 1 <= len(q_lens) <= MAX_PROMPTS:
            return False
        if not decode and self._tokens <= device.active().prompt_attention.serial_tokens:
            # A decode kernel without work would not wait for the prompts'; what follows waits for it only.
            return False
        if self._attention.choose_prefill(q_lens, kv_lens) == "fa2":
            return False
        self._attention.plan_items(
            batch.kv_lens[:decode], batch.slots[:decode], self._items, None, self._tiles, batch.prefixes
        )
        info = self._plan_prompts(q_lens, kv_lens, batch.slots[decode:], decode, batch.block_table)
        if info != self._info:
            raise RuntimeError("FlashInfer's plan no longer matches the captured graph; capture it again")
        return True

    def run(self, layer: int, q: Tensor, out: Tensor) -> None:
        attention, rows, call = self._attention, self._decode_rows, self._call
        backend = attention.graphed_prompts
        attention.side_by_side(
            self._tokens,
            lambda: attention.run_prompts(backend, self._info, layer, q, out, MAX_PROMPTS),
            lambda: attention.run_decode(call, layer, q[:rows], out[:rows]),
        )

    def ahead(self, tokens: int, lengths: Tensor) -> Prepared:
        """See Captured: a step with prompts has none."""
        raise NotImplementedError("steps with prompts propose drafts outside their graphs")

    def _plan_prompts(
        self, q_lens: np.ndarray, kv_lens: np.ndarray, slots: np.ndarray, first: int, table: Tensor
    ) -> list[int]:
        padded = np.zeros(MAX_PROMPTS, np.int32)
        padded[: len(q_lens)] = q_lens
        where = kv_lens, slots, table, first, LARGEST_GRAPH
        return list(self._attention.plan_prompts(self._attention.graphed_prompts, padded, *where))


def check_scores(scores: list[Scores], window: int | None) -> None:
    """Raises ValueError for layers that the kernels do not have together in a cache group, as a drafter's
    are with its target's."""
    if len({each.soft_cap is None for each in scores}) > 1:
        raise ValueError("FlashInfer attention has soft caps of all layers of a cache group, or of none")
    capped = any(each.soft_cap or each.sinks is not None for each in scores)
    if any(each.variant for each in scores) and (window or capped):
        raise ValueError(
            "FlashInfer attention has no windows, sinks or soft caps in a cache group with a variant of"
            " attention: use attention_backend torch"
        )
