# SPDX-License-Identifier: Apache-2.0
"""Runs planned steps on the device.

Device state is indexed by slot: block table and last token. One more row than there are slots
serves as the dummy that padded rows of a CUDA graph use; its only block is block 0.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from flashinfer_backend.attention.batch import AttentionBatch
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.step import StepPlan
from flashinfer_backend.models.transformer import Attention, Transformer
from flashinfer_backend.ops.staging import Download, ReadbackRing, StagingRing
from flashinfer_backend.sampling.logprobs import Report, keep_context_logits
from flashinfer_backend.sampling.sampler import Sampler
from flashinfer_backend.worker.full_graphs import DecodeGraphs
from flashinfer_backend.worker.piecewise_graphs import TokenGraphs


@dataclass
class Launched:
    """A step on its way; `download` gives the sampled tokens, int32 [sampling rows], and behind them what
    `report` reads."""

    plan: StepPlan
    download: Download
    report: Report | None


@dataclass
class _Reporting:
    """Attention that calls `progress` after every layer."""

    attention: Attention
    progress: Callable[[], None]

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        self.attention.run(layer, q, out)
        self.progress()


class Runner:
    """Owns the device: KV cache, block tables, last tokens, graphs."""

    def __init__(self, config: EngineConfig, model: Transformer, ops: ModuleType, num_blocks: int) -> None:
        self.model, self.ops, self.device = model, ops, model.device
        self.block_size = config.tokens_per_block
        shape = (num_blocks, self.block_size, model.config.num_kv_heads, model.config.head_dim)
        self.kv_caches = [
            (
                torch.zeros(shape, dtype=model.dtype, device=self.device),
                torch.zeros(shape, dtype=model.dtype, device=self.device),
            )
            for _ in range(model.config.num_layers)
        ]
        self.max_blocks = -(-config.max_seq_len // self.block_size)
        self.dummy_slot = config.max_num_seqs
        rows = config.max_num_seqs + 1
        self.block_table = torch.zeros((rows, self.max_blocks), dtype=torch.int32, device=self.device)
        self.last_token = torch.zeros(rows, dtype=torch.int32, device=self.device)
        self._staging = StagingRing(16 * config.max_num_tokens, self.device)
        self._readback = ReadbackRing(2 * config.max_num_seqs, self.device)  # tokens, log probabilities
        vocab = model.config.vocab_size
        self.sampler = Sampler(ops, vocab, config, self.device, self._staging, self.last_token)
        self.attention = self._make_attention(config)
        self.graphs: DecodeGraphs | None = None
        self.token_graphs: TokenGraphs | None = None

    def _make_attention(self, config: EngineConfig) -> Any:
        heads = self.model.config
        shape = (self.kv_caches, heads.num_heads, heads.num_kv_heads, heads.head_dim, self.block_size)
        if config.attention_backend == "torch" or self.device.type == "cpu":
            from flashinfer_backend.attention.torch_paged import TorchPagedAttention

            return TorchPagedAttention(*shape)
        from flashinfer_backend.attention.flashinfer_paged import FlashInferAttention

        return FlashInferAttention(
            *shape,
            max_num_seqs=config.max_num_seqs,
            max_pages_per_seq=self.max_blocks,
            decode_backend=config.attention_backend,
            dtype=self.model.dtype,
        )

    def capture_graphs(self, sizes: list[int]) -> None:
        """Capture decode-only steps for the given numbers of rows, and small mixed steps."""
        gc.collect()
        gc.disable()  # destroying an old graph while a new one is captured would spoil the capture
        try:
            self.graphs = DecodeGraphs(self, self._staging, sizes)
            self.token_graphs = TokenGraphs(self.model, self.kv_caches, self.attention, self.block_table)
        finally:
            gc.enable()

    @torch.inference_mode()
    def launch(
        self,
        plan: StepPlan,
        settle: Callable[[], None] = lambda: None,
        progress: Callable[[], None] = lambda: None,
    ) -> Launched:
        """Enqueue a step. Steps run in the order of their launches; nothing is waited for. `settle` reads
        the tokens of all earlier steps; it is called where rows cannot be sampled without them.
        `progress` is called when the device has the step's first work, and after each layer of a step
        that is launched layer by layer."""
        if self.graphs is not None and not plan.num_prefill and plan.num_decode <= self.graphs.largest:
            tokens, logits = self.graphs.replay(plan, progress)  # rows of padding behind the logits
            position = plan.decode_positions + 1
        else:
            logits, position = self._forward(plan, progress)
            tokens = self.sampler.sample(logits, plan, position)
        report = None
        if plan.extras:
            if plan.guided:
                settle()
            tokens, report = self.sampler.sample_extras(logits, tokens, plan, position)
        return Launched(plan, self._readback.download(tokens), report)

    def _forward(self, plan: StepPlan, progress: Callable[[], None]) -> tuple[torch.Tensor, np.ndarray]:
        """A step with prompts: (logits [sampling rows, V], positions of the sampled tokens)."""
        slots = np.concatenate([plan.decode_slots, plan.prefill_slots])
        q_lens = np.concatenate([np.ones(plan.num_decode, np.int32), plan.prefill_lens])
        starts = np.concatenate([plan.decode_positions, plan.prefill_starts])
        ends = np.cumsum(q_lens)
        offsets = np.repeat(starts - (ends - q_lens), q_lens)
        positions = (np.arange(plan.num_tokens) + offsets).astype(np.int32)
        samples = np.concatenate([np.ones(plan.num_decode, bool), plan.prefill_samples])
        graphs = self.token_graphs
        size = plan.num_tokens if graphs is None else graphs.padded(plan.num_tokens)
        padding = np.zeros(size - plan.num_tokens, np.int32)
        self.update_block_table(plan)
        parts = [
            slots,
            (ends - 1)[samples].astype(np.int32),
            np.concatenate([np.repeat(slots, q_lens), padding + self.dummy_slot]),
            np.concatenate([positions, padding]),
            np.concatenate([plan.prefill_tokens, padding]),
        ]
        data = self._staging.upload(parts).split([len(part) for part in parts])
        row_slots, last_rows, token_slots, token_positions, prompt = data
        input_ids = torch.cat([self.last_token[row_slots[: plan.num_decode]], prompt])
        slot_mapping = self.slot_mapping(token_slots, token_positions)
        batch = AttentionBatch(
            num_decode=plan.num_decode,
            q_lens=q_lens,
            kv_lens=starts + q_lens,
            slots=slots,
            block_table=self.block_table,
        )
        inputs = (input_ids, token_positions, slot_mapping)
        rows = None if plan.context_logits else last_rows  # of which the last layer's output is wanted
        whole = graphs.plan_whole(size, batch) if graphs is not None else None
        if graphs is not None and whole is not None:
            hidden = graphs.run_whole(*inputs, whole, rows)
            progress()  # the device begins when all of the graph is there
        else:
            self.attention.plan(batch)
            progress()
            attention = _Reporting(self.attention, progress)
            if graphs is not None and size <= graphs.largest:
                hidden = graphs.run(*inputs, plan.num_tokens, attention, rows)
            else:
                hidden = self.model(*inputs, self.kv_caches, attention, rows)
        for row, request in plan.context_logits:
            last = int(ends[plan.num_decode + row])
            chunk = hidden[last - int(plan.prefill_lens[row]) : last]
            keep_context_logits(request, self.model, chunk, int(plan.prefill_starts[row]))
        if rows is None:
            hidden = hidden[last_rows]
        return self.model.logits(hidden), (starts + q_lens)[samples]

    def update_block_table(self, plan: StepPlan) -> None:
        """Enter the step's new blocks, before anything of the step reads the table."""
        rows = np.flatnonzero(plan.new_blocks >= 0)
        admitted = plan.table_updates
        if not len(rows) and not len(admitted):
            return
        columns = plan.decode_positions[rows] // self.block_size
        where, blocks = self._staging.upload(
            [
                plan.decode_slots[rows] * self.max_blocks + columns,
                admitted[:, 0] * self.max_blocks + admitted[:, 1],
                plan.new_blocks[rows],
                admitted[:, 2],
            ]
        ).view(2, -1)
        self.block_table.view(-1)[where] = blocks

    def slot_mapping(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Cache slots (block * block size + offset), int32 [T], of tokens given by slot and position."""
        blocks = self.block_table[slots, positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size
