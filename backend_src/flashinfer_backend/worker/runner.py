# SPDX-License-Identifier: Apache-2.0
"""Runs planned steps on the device.

Device state is indexed by slot: block table and last token. One more row than there are slots
serves as the dummy that padded rows of a CUDA graph use; its only block is block 0.
"""

from __future__ import annotations

import enum
import gc
from collections.abc import Generator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import torch

from flashinfer_backend.attention.batch import AttentionBatch
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.step import LAST_TOKEN, StepOutput, StepPlan
from flashinfer_backend.kv_cache.cache import KVCache
from flashinfer_backend.models.transformer import Transformer, drain
from flashinfer_backend.ops.staging import Download, ReadbackRing, StagingRing
from flashinfer_backend.sampling.logprobs import context_logits
from flashinfer_backend.sampling.sampler import Sampled, Sampler
from flashinfer_backend.worker.capture import GraphCapture
from flashinfer_backend.worker.decode_graphs import DecodeGraphs
from flashinfer_backend.worker.mixed_graphs import MixedGraphs


class Point(enum.Enum):
    """Where a launch stops for the loop, which may have something to do meanwhile."""

    STARTED = enum.auto()  # the device has the step's first work
    LAYER = enum.auto()  # it has one more layer of a step that is launched layer by layer
    TOKENS_WANTED = enum.auto()  # go on only when the tokens of all earlier steps have been read


@dataclass
class Launched:
    """A step on its way; Runner.read gives its output when `download` has arrived."""

    plan: StepPlan
    download: Download
    sampled: Sampled
    # (row, logits float32 [length, V]) of the plan's context_rows; (row, why) of rows that failed
    context_logits: list[tuple[int, np.ndarray]] = field(default_factory=list)
    failed: list[tuple[int, str]] = field(default_factory=list)


class Runner:
    """Owns what one rank has on its device: KV cache, block tables, last tokens, sampler, graphs."""

    def __init__(self, config: EngineConfig, model: Transformer, ops: ModuleType, kv_cache: KVCache) -> None:
        self.model, self.ops, self.device = model, ops, model.device
        self.kv_cache = kv_cache
        self.block_size = kv_cache.format.block_size
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
        self.mixed_graphs: MixedGraphs | None = None

    def _make_attention(self, config: EngineConfig) -> Any:
        num_heads = self.model.config.num_heads
        if config.attention_backend == "torch" or self.device.type == "cpu":
            from flashinfer_backend.attention.torch_paged import TorchPagedAttention

            return TorchPagedAttention(self.kv_cache, num_heads)
        from flashinfer_backend.attention.flashinfer_paged import FlashInferAttention

        return FlashInferAttention(
            self.kv_cache,
            num_heads,
            max_num_seqs=config.max_num_seqs,
            max_pages_per_seq=self.max_blocks,
            decode_backend=config.attention_backend,
        )

    def capture_graphs(self, sizes: list[int]) -> None:
        """Capture decode-only steps for the given numbers of rows, and small mixed steps."""
        gc.collect()
        gc.disable()  # destroying an old graph while a new one is captured would spoil the capture
        try:
            capture = GraphCapture()
            self.graphs = DecodeGraphs(self, self._staging, sizes, capture)
            self.mixed_graphs = MixedGraphs(
                self.model, self.kv_cache.layers, self.attention, self.block_table, capture
            )
        finally:
            gc.enable()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Generator[Point, None, Launched]:
        """Enqueue a step; stops at points for the caller. Steps run in the order of their launches; nothing
        is waited for, unless rows cannot be sampled without the tokens of earlier steps.

        An exception means that the step as a whole was not launched. What concerns single rows is in
        Launched.failed instead.
        """
        self.sampler.update(plan)
        context: list[tuple[int, np.ndarray]] = []
        failed: list[tuple[int, str]] = []
        if (
            self.graphs is not None
            and plan.num_decodes == plan.num_rows
            and plan.num_rows <= self.graphs.largest
        ):
            tokens, logits = self.graphs.replay(plan)  # rows of padding behind the logits
            yield Point.STARTED  # the device begins when all of the graph is there
        else:
            hidden, sampling = yield from self._forward(plan)
            if len(plan.context_rows):
                self._keep_context(plan, hidden, context, failed)
            logits = self.model.logits(hidden if sampling is None else hidden[sampling])
            tokens = self.sampler.sample(logits, plan)
        sampled = Sampled(tokens)
        if len(plan.stateful):
            if self.sampler.guided(plan):
                yield Point.TOKENS_WANTED
            sampled = self.sampler.sample_stateful(logits, tokens, plan)
            failed += [(int(plan.sampling_rows[row]), why) for row, why in sampled.failed]
        return Launched(plan, self._readback.download(sampled.readback), sampled, context, failed)

    def run(self, plan: StepPlan) -> StepOutput:
        """Launch a step and wait for what it comes to. For steps by themselves, all earlier ones read."""
        return self.read(drain(self.launch(plan)))

    def read(self, launched: Launched) -> StepOutput:
        """Wait for a step's output. Steps are read in the order of their launches, each once."""
        values = launched.download.wait()
        return self.sampler.read(launched.sampled, len(launched.plan.sample_slots), values)

    def _forward(self, plan: StepPlan) -> Generator[Point, None, tuple[torch.Tensor, torch.Tensor | None]]:
        """The residual stream behind the last layer: of the sampling rows' last tokens; or, where context
        logits are wanted, of all tokens, and which of these are the sampling rows'."""
        ends = np.cumsum(plan.lengths)
        offsets = np.repeat(plan.starts - (ends - plan.lengths), plan.lengths)
        positions = (np.arange(plan.num_tokens) + offsets).astype(np.int32)
        graphs = self.mixed_graphs
        size = plan.num_tokens if graphs is None else graphs.padded(plan.num_tokens)
        padding = np.zeros(size - plan.num_tokens, np.int32)
        self.update_block_table(plan)
        parts = [
            (ends - 1)[plan.sampling_rows].astype(np.int32),
            np.concatenate([np.repeat(plan.slots, plan.lengths), padding + self.dummy_slot]),
            np.concatenate([positions, padding]),
            np.concatenate([plan.tokens, padding]),
        ]
        data = self._staging.upload(parts).split([len(part) for part in parts])
        last_rows, token_slots, token_positions, tokens = data
        input_ids = tokens
        if plan.num_decodes:
            input_ids = torch.where(tokens == LAST_TOKEN, self.last_token[token_slots], tokens)
        batch = AttentionBatch(
            q_lens=plan.lengths,
            kv_lens=plan.starts + plan.lengths,
            slots=plan.slots,
            block_table=self.block_table,
        )
        inputs = (input_ids, token_positions, self.cache_locations(token_slots, token_positions))
        rows = None if len(plan.context_rows) else last_rows  # of which the last layer's output is wanted
        full = graphs.plan_full(size, batch) if graphs is not None else None
        if graphs is not None and full is not None:
            hidden = graphs.run_full(*inputs, full, rows)
            yield Point.STARTED  # the device begins when all of the graph is there
        else:
            self.attention.plan(batch)
            yield Point.STARTED
            if graphs is not None and size <= graphs.largest:
                layers = graphs.run(*inputs, plan.num_tokens, self.attention, rows)
            else:
                layers = self.model.by_layers(*inputs, self.kv_cache.layers, self.attention, rows)
            while True:
                try:
                    next(layers)
                except StopIteration as end:
                    hidden = end.value
                    break
                yield Point.LAYER
        return hidden, None if rows is not None else last_rows

    def _keep_context(
        self,
        plan: StepPlan,
        hidden: torch.Tensor,
        context: list[tuple[int, np.ndarray]],
        failed: list[tuple[int, str]],
    ) -> None:
        ends = np.cumsum(plan.lengths)
        for row in plan.context_rows.tolist():
            try:
                chunk = hidden[ends[row] - plan.lengths[row] : ends[row]]
                context.append((row, context_logits(self.model, chunk)))
            except Exception as error:
                if self.device.type == "cuda":
                    torch.cuda.synchronize()  # raises where the device, not the row, is what failed
                failed.append((row, f"{type(error).__name__}: {error}"))

    def update_block_table(self, plan: StepPlan) -> None:
        """Enter the step's new blocks, before anything of the step reads the table."""
        updates = plan.block_updates
        if len(updates):
            where, blocks = self._staging.upload(
                [updates[:, 0] * self.max_blocks + updates[:, 1], updates[:, 2]]
            ).view(2, -1)
            self.block_table.view(-1)[where] = blocks

    def cache_locations(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Places in the cache (block * block size + offset), int32 [T], of tokens given by slot and
        position."""
        blocks = self.block_table[slots, positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size
