# SPDX-License-Identifier: Apache-2.0
"""Decode attention inside a captured CUDA graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from flashinfer_backend.attention import split
from flashinfer_backend.attention.flashinfer_calls import Call

if TYPE_CHECKING:
    from flashinfer_backend.attention.batch import AttentionBatch
    from flashinfer_backend.attention.flashinfer_paged import FlashInferAttention


class DecodeGraphState:
    """Decode attention inside a captured CUDA graph of `bucket` rows.

    Capture `run` for every layer with q and out of exactly `bucket` rows. Before each replay call
    plan(batch, host) on the stream of the replay, with as many rows: pad with rows of one token in a slot
    whose blocks are all block 0.

    block_table and words are device tensors whose addresses the graph keeps. The Triton kernel reads the
    table while the graph runs, and of the step's upload the graph_words(bucket) that `plan` writes to `host`:
    the caller copies them to `words`, before the capture too. FA2 and XQA have no such words; `plan` copies
    what they need, and the blocks that the table has by then.
    """

    def __init__(
        self, attention: FlashInferAttention, bucket: int, block_table: Tensor, words: Tensor
    ) -> None:
        self._attention, self.bucket = attention, bucket
        if attention.decode_backend == "triton":
            self._call = Call("triton", bucket, None, words.view(-1, split.ITEM_WORDS), block_table)
        else:  # a step of padded rows, so that capture can follow at once
            none = np.empty(0, dtype=np.int32)
            self._call = attention.plan_decode(attention.decode_backend, none, none, block_table, bucket)

    @property
    def reads_block_table(self) -> bool:
        """Whether the graph sees what changes in the block table after `plan`."""
        return self._call.table is not None

    def plan(self, batch: AttentionBatch, host: np.ndarray) -> None:
        """Describe the step that the next replay computes. Host work and asynchronous copies only."""
        rows = len(batch.slots)
        if batch.num_single != rows or rows != self.bucket:
            raise ValueError(
                f"a decode graph of {self.bucket} rows was given {batch.num_single} decode rows of {rows}"
            )
        if self._call.items is not None:
            items = host.reshape(-1, split.ITEM_WORDS)
            split.split_rows(batch.kv_lens, batch.slots, len(items), items)
            return
        call = self._attention.plan_decode(
            self._call.backend, batch.kv_lens, batch.slots, batch.block_table, self.bucket
        )
        if call.info is not None and list(call.info) != list(self._call.info):
            raise RuntimeError("FlashInfer's plan no longer matches the captured graph; capture it again")

    def run(self, layer: int, q: Tensor, out: Tensor) -> None:
        """q, out [bucket, Hq, D]; to be captured."""
        self._attention.run_decode(self._call, layer, q, out)
