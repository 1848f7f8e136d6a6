# SPDX-License-Identifier: Apache-2.0
"""Attention of decode rows and prompts together inside one captured CUDA graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from flashinfer_backend.attention import split, triton_decode
from flashinfer_backend.attention.batch import AttentionBatch

if TYPE_CHECKING:
    from flashinfer_backend.attention.flashinfer_paged import FlashInferAttention

MAX_PROMPTS = 16  # of a step
SERIAL_TOKENS = 64  # of a step whose products start before the kernel before them has ended: one stream
LARGEST = 1024  # tokens of a graph: FlashInfer lays out its plan for so many, and so alike for all graphs


class StepGraphState:
    """Attention of a step of up to `tokens` tokens: decode rows first, at most `decode_rows`, then prompts.

    Decode rows take the Triton kernel, prompts FA3: both read what is different from step to step from the
    device, so one capture serves every step that `plan` accepts. Capture `run` for every layer with q and
    out of exactly `tokens` rows (at most LARGEST); before each replay call plan(batch) on the stream of the
    replay. Rows beyond the batch's are left alone.
    """

    def __init__(
        self, attention: FlashInferAttention, tokens: int, decode_rows: int, block_table: Tensor
    ) -> None:
        if tokens > LARGEST:
            raise ValueError(f"a step graph of {tokens} tokens is above {LARGEST}, its plan's room")
        self._attention, self._decode_rows, self._table = attention, decode_rows, block_table
        self._items = attention.items[: split.max_items(decode_rows, attention.num_kv_heads)]
        self._tokens = tokens
        none = np.empty(0, np.int32)
        attention.plan_items(none, none, self._items)  # a step of nothing, so that capture can follow at once
        self._info = self._plan_prompts(none, none, none, 0, block_table)

    def plan(self, batch: AttentionBatch) -> bool:
        """Describe the step that the next replay computes; False, and nothing done, where it cannot. Host
        work and asynchronous copies only."""
        decode = batch.num_single
        q_lens, kv_lens = batch.q_lens[decode:], batch.kv_lens[decode:]
        if decode > self._decode_rows or not 1 <= len(q_lens) <= MAX_PROMPTS:
            return False
        if not decode and self._tokens <= SERIAL_TOKENS:
            # A decode kernel without work would not wait for the prompts'; what follows waits for it only.
            return False
        if self._attention.choose_prefill(q_lens, kv_lens) != "fa3":
            return False
        self._attention.plan_items(batch.kv_lens[:decode], batch.slots[:decode], self._items)
        info = self._plan_prompts(q_lens, kv_lens, batch.slots[decode:], decode, batch.block_table)
        if info != self._info:
            raise RuntimeError("FlashInfer's plan no longer matches the captured graph; capture it again")
        return True

    def run(self, layer: int, q: Tensor, out: Tensor) -> None:
        """q, out [tokens, Hq, D]; to be captured."""
        attention, cache, rows = self._attention, self._attention.layers[layer], self._decode_rows
        attention.side_by_side(
            self._tokens,
            lambda: attention.run_prompts("fa3", self._info, q, cache, out, MAX_PROMPTS),
            lambda: triton_decode.decode(
                q[:rows], cache, out[:rows], self._items, self._table, attention.workspace, attention.sm_scale
            ),
        )

    def _plan_prompts(
        self, q_lens: np.ndarray, kv_lens: np.ndarray, slots: np.ndarray, first: int, table: Tensor
    ) -> list[int]:
        padded = np.zeros(MAX_PROMPTS, np.int32)
        padded[: len(q_lens)] = q_lens
        return list(self._attention.plan_prompts("fa3", padded, kv_lens, slots, table, first, LARGEST))
