# SPDX-License-Identifier: Apache-2.0
"""What the steps of one rank share on its device.

State is indexed by slot: block table and last token. One more row than there are slots serves as the dummy
that padded rows of a CUDA graph use; its only block is block 0.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from flashinfer_backend.cache.device import KVCache
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.step import StepPlan
from flashinfer_backend.models.transformer import Transformer
from flashinfer_backend.ops.staging import StagingRing


class DeviceState:
    """Model, KV cache, attention, block table int32 [slots + 1, blocks] and last tokens int32 [slots + 1].

    Steps are enqueued on one stream, so what one of them writes the next one reads.
    """

    def __init__(self, config: EngineConfig, model: Transformer, ops: ModuleType, kv_cache: KVCache) -> None:
        self.model, self.ops, self.device = model, ops, model.device
        self.kv_cache = kv_cache
        self.block_size = kv_cache.format.block_size
        self.max_blocks = -(-config.max_seq_len // self.block_size)
        self.dummy_slot = config.max_num_seqs
        rows = config.max_num_seqs + 1
        self.block_table = torch.zeros((rows, self.max_blocks), dtype=torch.int32, device=self.device)
        self.last_token = torch.zeros(rows, dtype=torch.int32, device=self.device)
        self.staging = StagingRing(16 * config.max_num_tokens, self.device)
        self.attention = self._make_attention(config)

    def _make_attention(self, config: EngineConfig) -> Any:
        num_heads = self.model.spec.attention.heads
        if config.attention_backend == "torch" or self.device.type == "cpu":
            from flashinfer_backend.attention.torch_paged import TorchPagedAttention

            return TorchPagedAttention(self.kv_cache, num_heads)
        from flashinfer_backend.attention.copies import copied_blocks
        from flashinfer_backend.attention.flashinfer_paged import FlashInferAttention

        lengths = config.max_seq_len, config.max_num_tokens
        return FlashInferAttention(
            self.kv_cache,
            num_heads,
            max_num_seqs=config.max_num_seqs,
            max_blocks_per_seq=self.max_blocks,
            decode_backend=config.attention_backend,
            dtype=self.model.dtype,
            copied_blocks=copied_blocks(self.kv_cache.format, self.model.dtype, *lengths, self.device),
        )

    def update_block_table(self, plan: StepPlan) -> None:
        """Enter the step's new blocks, before anything of the step reads the table."""
        updates = plan.block_updates
        if len(updates):
            where, blocks = self.staging.upload(
                [updates[:, 1] * self.max_blocks + updates[:, 2], updates[:, 3]]
            ).view(2, -1)
            self.block_table.view(-1)[where] = blocks

    def cache_locations(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Places in the cache (block * block size + offset), int32 [T], of tokens given by slot and
        position."""
        blocks = self.block_table[slots, positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size
