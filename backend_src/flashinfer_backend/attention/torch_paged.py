# SPDX-License-Identifier: Apache-2.0
"""Attention over the paged cache in plain torch: any device, any floating dtype, e4m3 with scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flashinfer_backend.attention.batch import AttentionBatch
from flashinfer_backend.attention.contract import Prepared, Scores, StepShape
from flashinfer_backend.cache.device import KVCache
from flashinfer_backend.ops.fp8 import E4M3

# Prefill rows attended at a time, so that a mask holds at most this many rows of a long prompt.
_QUERY_ROWS = 1024

# Keys that one group of decode rows gathers, padding included, unless a single row has more.
_GROUP_TOKENS = 4096


class _DecodeGroup(NamedTuple):
    """Decode rows of similar length, attended together."""

    rows: Tensor | slice  # int64[B], rows of q
    tokens: Tensor  # int64[B * L], cache locations of every row's keys, padded to the longest row
    mask: Tensor | None  # bool[B, 1, 1, L], False on padding; None without any
    own: Tensor  # int64[B, 1, 1, 1], which of its keys is the row's own


class _Part(NamedTuple):
    """Rows first to last of a chunk, attended together."""

    first: int
    last: int
    key: int  # the first that any of them sees
    mask: Tensor | None  # bool[rows, keys]; None where all is causal
    own: Tensor  # int64[rows, 1], which of these keys is each row's own


class _Prefill(NamedTuple):
    """One request's chunk of a prompt."""

    start: int  # first row in q
    tokens: Tensor  # int64[keys], cache locations of the keys that any of the chunk's rows sees
    parts: list[_Part]


class TorchPagedAttention:
    """step(batch) once per step, then run(layer, q, out) once per layer.

    This step's keys and values are in the cache before run(). num_heads: query heads. A request's q rows
    are the last q_len positions of its kv_len, so the causal mask is aligned to the lower right corner.
    window: the latest keys that a query sees, its own included; None: all. Blocks behind it are not read.
    scores: of each layer; None: scales of 1 / sqrt(head_dim).
    """

    def __init__(
        self,
        cache: KVCache,
        num_heads: int,
        window: int | None = None,
        scores: Sequence[Scores] | None = None,
    ) -> None:
        shape = cache.format
        num_kv_heads, head_dim, block_size = shape.num_kv_heads, shape.head_dim, shape.block_size
        # Token granularity: [blocks * block_size, Hkv, D] views of the same memory.
        # E4m3 as bytes: not every torch can index it on every device.
        kind = torch.uint8 if shape.scales else shape.dtype
        self._flat = [
            tuple(part.view(kind).view(-1, num_kv_heads, head_dim) for part in pair) for pair in cache.layers
        ]
        self._device = cache.device
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self._block_size = block_size
        self._scales = shape.scales
        self._window = window
        self._scores = scores or [Scores(head_dim**-0.5)] * shape.num_layers
        # The gathered keys and values of one group or request, reused by every layer and step: fresh
        # memory of this size costs more in page faults than the attention itself.
        self._scratch = [cache[:0] for cache in self._flat[0]]
        self._decode: list[_DecodeGroup] = []
        self._prefill: list[_Prefill] = []

    def step(self, batch: AttentionBatch) -> Prepared:
        """Prepare the gathers and masks of one step; every layer shares them."""
        batch = batch.exact()
        self._decode = self._plan_decode(batch)
        self._prefill = []
        start = batch.num_single
        for row in range(batch.num_single, len(batch.q_lens)):
            q_len, kv_len = int(batch.q_lens[row]), int(batch.kv_lens[row])
            seen = self._seen(q_len, kv_len)
            positions = torch.arange(kv_len - seen, kv_len, device=self._device)
            tokens = self._cache_locations(batch.block_table[int(batch.slots[row])], positions)
            self._prefill.append(_Prefill(start, tokens, self._prefill_parts(q_len, seen)))
            start += q_len
        gathers = [group.tokens for group in self._decode] + [chunk.tokens for chunk in self._prefill]
        longest = max(map(len, gathers), default=0)
        if longest > self._scratch[0].shape[0]:
            # A tensor made in inference mode could not be written outside of it later.
            with torch.inference_mode(False):
                self._scratch = [cache.new_empty(longest, *cache.shape[1:]) for cache in self._flat[0]]
        return self

    def run(self, layer: int, q: Tensor, out: Tensor) -> None:
        """Attend q[T, Hq, D] to the layer's cache and write out[T, Hq, D], rows as in step()."""
        heads, dim, scores = self._num_kv_heads, self._head_dim, self._scores[layer]
        for group in self._decode:
            # Query heads that share a key/value head become rows of one attention: nothing is repeated.
            queries = q[group.rows].view(-1, heads, self._num_heads // heads, dim)
            shape = (queries.shape[0], -1, heads, dim)
            k, v = (x.view(shape).transpose(1, 2) for x in self._gather(layer, group.tokens, q.dtype))
            attended = _attend(queries, k, v, group.mask, group.own, scores)
            out[group.rows] = attended.reshape(-1, self._num_heads, dim)
        for request in self._prefill:
            k, v = (x.transpose(0, 1).unsqueeze(0) for x in self._gather(layer, request.tokens, q.dtype))
            for first, last, key, mask, position in request.parts:
                rows = slice(request.start + first, request.start + last)
                keys = slice(key, None if mask is None else key + mask.shape[1])
                own = q[rows].transpose(0, 1).unsqueeze(0)
                seen = k[:, :, keys], v[:, :, keys]
                attended = _attend(own, *seen, mask, position, scores, mask is None)
                out[rows] = attended[0].transpose(0, 1)

    def graph_words(self, shape: StepShape) -> int:
        """None: steps are not captured."""
        return 0

    def captured(
        self, shape: StepShape, block_table: Tensor, words: Tensor, lengths: Tensor | None = None
    ) -> None:
        """None: the host decides what each step gathers, so that a graph would repeat one step."""
        return None

    def _gather(self, layer: int, tokens: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """Keys and values [len(tokens), Hkv, D] of cache slots, valid until the next call. dtype: of queries,
        and of what a cache of e4m3 becomes."""
        found = [
            torch.index_select(cache, 0, tokens, out=scratch[: len(tokens)])
            for cache, scratch in zip(self._flat[layer], self._scratch, strict=True)
        ]
        if not self._scales:
            return found
        return [
            (x.view(E4M3).float() * scale).to(dtype)
            for x, scale in zip(found, self._scales[layer], strict=True)
        ]

    def _cache_locations(self, table: Tensor, positions: Tensor) -> Tensor:
        """Where positions[..., L] lie (block * P + offset) under the block tables table[..., columns]."""
        columns = (positions // self._block_size).clamp(max=table.shape[-1] - 1)  # drafts may reach beyond
        blocks = table.long().gather(-1, columns)
        return blocks * self._block_size + positions % self._block_size

    def _plan_decode(self, batch: AttentionBatch) -> list[_DecodeGroup]:
        """Group decode rows by length: padding at most doubles what a group reads, and a group's keys stay
        in a processor's cache between gather and use."""
        lens = self._decode_lens(batch)[: batch.num_single]
        order = np.argsort(-lens, kind="stable")
        groups = []
        first = 0
        while first < len(order):
            longest = int(lens[order[first]])
            similar = int(np.count_nonzero(2 * lens[order[first:]] >= longest))
            last = first + min(similar, max(1, _GROUP_TOKENS // longest))
            whole = last - first == len(order)
            rows = np.arange(len(order)) if whole else order[first:last]
            groups.append(self._decode_group(batch, rows, slice(0, len(order)) if whole else None))
            first = last
        return groups

    def _decode_group(self, batch: AttentionBatch, rows: np.ndarray, as_slice: slice | None) -> _DecodeGroup:
        lens = self._decode_lens(batch)[rows]
        kv_lens = torch.as_tensor(lens, dtype=torch.int64, device=self._device).unsqueeze(1)
        behind = torch.as_tensor(batch.kv_lens[rows] - lens, dtype=torch.int64, device=self._device)
        slots = torch.as_tensor(batch.slots[rows], dtype=torch.int64, device=self._device)
        positions = torch.arange(int(lens.max()), device=self._device).expand(len(rows), -1)
        valid = positions < kv_lens
        # Padding reads the first token that the row sees: a masked key must still be finite, and neither the
        # rest of a block nor the rest of a block table has been written.
        positions = torch.where(valid, positions, 0) + behind.unsqueeze(1)
        tokens = self._cache_locations(batch.block_table[slots], positions)
        mask = None if lens.min() == lens.max() else valid[:, None, None, :]
        where = as_slice or torch.as_tensor(rows, dtype=torch.int64, device=self._device)
        return _DecodeGroup(where, tokens.reshape(-1), mask, (kv_lens - 1).view(-1, 1, 1, 1))

    def _seen(self, q_len: int, kv_len: int) -> int:
        """How many of a request's last keys any of its last q_len rows sees."""
        return kv_len if self._window is None else min(kv_len, q_len + self._window - 1)

    def _decode_lens(self, batch: AttentionBatch) -> np.ndarray:
        """How many keys a row sees that is one query token."""
        return batch.kv_lens if self._window is None else np.minimum(batch.kv_lens, self._window)

    def _prefill_parts(self, q_len: int, seen: int) -> list[_Part]:
        """Rows of a chunk of q_len, whose keys are the last `seen` up to its end."""
        window = self._window or seen
        rows = torch.arange(min(q_len, _QUERY_ROWS), device=self._device).unsqueeze(1)
        if q_len == seen <= min(_QUERY_ROWS, window):
            return [_Part(0, q_len, 0, None, rows)]
        parts: list[_Part] = []
        for first in range(0, q_len, _QUERY_ROWS):
            last = min(first + _QUERY_ROWS, q_len)
            end = seen - q_len + last
            key = max(0, end - (last - first) - window + 1)
            own = end - (last - first) - key  # the column of the first row's own key
            ones = torch.ones(last - first, end - key, dtype=torch.bool, device=self._device)
            mask = ones.tril(own).triu(own - window + 1)
            parts.append(_Part(first, last, key, mask, rows[: last - first] + own))
        return parts


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, own: Tensor, scores: Scores, causal: bool = False
) -> Tensor:
    """q [B, H, Q, D]; k, v [B, Hkv, L, D] -> [B, H, Q, D]. Heads of queries are H or, where those of a key's
    head are the Q of q, H * Q. mask (bool, true where a query sees a key) broadcasts to [B, H, Q, L], own
    (int64, which key is the query's own) to [B, H, Q, 1]. causal: query i sees keys 0 to i."""
    if scores.soft_cap is None and scores.sinks is None and scores.variant is None:
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scores.scale, enable_gqa=gqa
        )
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    weights = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * scores.scale
    if scores.soft_cap is not None:
        weights = torch.tanh(weights / scores.soft_cap) * scores.soft_cap
    if causal:
        mask = torch.ones(weights.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if scores.variant is not None and scores.by_head is not None:
        keys, by_head = torch.arange(k.shape[2], device=k.device), scores.by_head.view(q.shape[1], -1, 1)
        weights = scores.variant.scores(weights, keys, own, by_head)
    if mask is not None:
        weights = weights.masked_fill(~mask, float("-inf"))
    if scores.sinks is not None:
        sinks = scores.sinks.view(q.shape[1], -1, 1).expand(*weights.shape[:-1], 1)
        weights = torch.cat([weights, sinks.to(weights)], dim=-1)
    return weights.softmax(-1)[..., : k.shape[2]].to(v.dtype) @ v
