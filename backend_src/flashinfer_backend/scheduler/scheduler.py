# SPDX-License-Identifier: Apache-2.0
"""Chooses what each step computes: decodes, and prompt chunks in order of admission.

The scheduler runs one step ahead of what is known: a planned decode is assumed to yield one
token. A sequence that turns out to have ended leaves through `release`, and the rows that were
planned for it meanwhile are recognised as stale by their epoch.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import numpy as np

from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.request import Request
from flashinfer_backend.core.step import NONE, ExtraRow, StepPlan, prompt_rows
from flashinfer_backend.scheduler.budget import StepBudget, joins
from flashinfer_backend.scheduler.kv_cache_manager import KVCacheManager
from flashinfer_backend.scheduler.request_queue import RequestQueue
from flashinfer_backend.scheduler.slot_table import SlotTable


class Scheduler:
    """Owns the queue, the slot table and every sequence's blocks."""

    def __init__(
        self, config: EngineConfig, kv_manager: KVCacheManager, end_ids: tuple[int, ...] = ()
    ) -> None:
        self.config = config
        self.kv_manager = kv_manager
        self.table = SlotTable(config.max_num_seqs, config.max_seq_len, end_ids)
        self.requests: dict[int, Request] = {}  # every open request by handle
        self.queue = RequestQueue(longest_first=config.schedule_policy == "lof")
        self._budget = StepBudget(config)
        self.running: dict[int, Request] = {}  # by handle, in order of admission
        self.prefilling: list[Request] = []
        self.decoding = NONE  # slots, in order of admission
        self.reserved_blocks = 0
        self.preemptions = 0
        self.prompt_tokens = 0
        self.prompt_tokens_reused = 0

    def submit(self, request: Request) -> None:
        """Queue a new request. Its handle must not be open already."""
        if request.handle in self.requests:
            raise ValueError(f"handle {request.handle} is already in use by an open request")
        self.requests[request.handle] = request
        self.queue.add(request)

    def release(self, request: Request) -> None:
        """The one way out, whether finished, cancelled or failed: frees slot and blocks."""
        del self.requests[request.handle]
        if request.slot >= 0:
            self._vacate(request)
        else:
            self.queue.remove(request)

    def schedule(self, in_flight: bool) -> StepPlan | None:
        """Plan the next step, or None if there is nothing to do, or if blocks ran out and the steps
        `in_flight` must be read first (they may free blocks; preemption needs all tokens known)."""
        limit = self._budget.tokens(self.table, self.decoding, self.prefilling, self.queue)
        updates: list[tuple[int, int, int]] = []
        # Prompts first, as only then it shows what the prefix cache has of them. They take no block that
        # decode rows need now: admission leaves one for each running sequence, or all that it can need.
        chunks = self._plan_prefill(limit - len(self.decoding), updates)
        pause = self._budget.pauses(sum(length for _, _, length in chunks))
        blocks = self._grow_decodes(NONE if pause else self.decoding, in_flight)
        if blocks is None:
            assert not updates, "a sequence was admitted although blocks had run out"
            return None
        decoding = NONE if pause else self.decoding
        chunks = [chunk for chunk in chunks if chunk[0].slot >= 0]  # not what was preempted just now
        if not len(decoding) and not chunks:
            return None
        return self._assemble(decoding, blocks, chunks, updates)

    def _grow_decodes(self, decoding: np.ndarray, in_flight: bool) -> np.ndarray | None:
        """Give every decode the block its next token needs: int32 [d], -1 where there is room. None if
        results must be read first."""
        table, size = self.table, self.config.tokens_per_block
        while True:
            slots = decoding.astype(np.intp)
            rows = (table.computed[slots] >= table.num_blocks[slots] * size).nonzero()[0]
            blocks = self.kv_manager.allocate(len(rows))
            if blocks is not None:
                break
            if in_flight:
                return None
            self._preempt_newest()
            decoding = self.decoding
        needy = slots[rows]
        table.num_blocks[needy] += 1
        new_blocks = np.full(len(slots), -1, np.int32)
        new_blocks[rows] = blocks
        for slot, block in zip(needy.tolist(), blocks, strict=True):
            request = table.requests[slot]
            assert request is not None
            request.blocks.append(block)
            request.new_blocks += 1
            if request.reserved_blocks:
                request.reserved_blocks -= 1
                self.reserved_blocks -= 1
        return new_blocks

    def _plan_prefill(
        self, budget: int, updates: list[tuple[int, int, int]]
    ) -> list[tuple[Request, int, int]]:
        """(request, start, length) chunks within `budget` tokens; admits waiting requests."""
        chunks: list[tuple[Request, int, int]] = []
        table = self.table
        candidates = deque(self.prefilling)
        whole = budget
        while budget > 0:
            if candidates:
                request = candidates.popleft()
            else:
                admitted = self._admit(budget, whole - budget, updates)
                if admitted is None:
                    break
                request = admitted
            start = int(table.computed[request.slot])
            length = min(int(table.known[request.slot]) - start, budget)
            chunks.append((request, start, length))
            budget -= length
        return chunks

    def _admit(self, budget: int, together: int, updates: list[tuple[int, int, int]]) -> Request | None:
        """Move the head of the queue to a slot if slot, blocks, `budget` and the tokens that are
        `together` in the step already allow."""
        if not self.queue or not self.table.free:
            return None
        request = self.queue.head
        leader = self.requests.get(request.share_prompt_with)
        if leader is not None and leader is not request and leader in self.prefilling:
            return None  # its blocks are registered only as its prompt is computed
        tokens = np.concatenate([request.prompt, request.generated])
        size = self.config.tokens_per_block
        request.block_keys = self._prefix_keys(request, tokens)
        reused = []
        if not request.params.context_logits:
            reused = self.kv_manager.match(request.block_keys[: (len(tokens) - 1) // size])
        needed = -(-len(tokens) // size) - len(reused)
        reserve = 0
        if self.config.batch_scheduler_policy == "guaranteed_no_evict":
            total = -(-(len(request.prompt) + request.max_new) // size)
            reserve = max(0, total - len(reused) - needed)
            headroom = reserve + self.reserved_blocks
        else:
            headroom = len(self.running)  # each may ask for a block soon
        new_tokens = len(tokens) - len(reused) * size
        # What was preempted may have grown beyond a step, so it is always computed in chunks.
        chunked = self.config.enable_chunked_context or bool(len(request.generated))
        fits_step = (chunked or new_tokens <= budget) and joins(self.config, self.queue, together, new_tokens)
        if needed + headroom > self.kv_manager.available or not fits_step:
            self.kv_manager.release(reused)
            return None
        blocks = self.kv_manager.allocate(needed)
        assert blocks is not None
        self.queue.pop()
        request.blocks = reused + blocks
        request.registered_blocks = len(reused)
        request.reused_blocks, request.new_blocks = len(reused), len(blocks)
        request.reserved_blocks = reserve
        self.reserved_blocks += reserve
        if not request.first_scheduled_ns:
            request.first_scheduled_ns = time.time_ns()
            self.prompt_tokens += len(tokens)
            self.prompt_tokens_reused += len(reused) * size
        slot = self.table.occupy(request, len(request.blocks), len(reused) * size)
        updates.extend((slot, index, block) for index, block in enumerate(request.blocks))
        self.running[request.handle] = request
        self.prefilling.append(request)
        return request

    def _prefix_keys(self, request: Request, tokens: np.ndarray) -> list[bytes]:
        """Keys under which this request's full blocks may be shared; none if it shares nothing."""
        if self.kv_manager.reuse:
            return self.kv_manager.prefix_keys(tokens)
        if request.share_prompt_with:
            return self.kv_manager.prefix_keys(tokens, parent=request.share_prompt_with.to_bytes(8, "little"))
        return []

    def _assemble(
        self,
        decoding: np.ndarray,
        blocks: np.ndarray,
        chunks: list[tuple[Request, int, int]],
        updates: list[tuple[int, int, int]],
    ) -> StepPlan:
        table = self.table
        rows = decoding.astype(np.intp)  # numpy indexes by these in a third of the time
        positions = table.computed[rows]
        table.computed[rows] = positions + 1
        sampling = decoding
        prompts: dict[str, Any] = {}
        if chunks:
            prompts = prompt_rows(table, chunks, updates)
            for chunk, start, length in chunks:
                self._computed_prompt(chunk, start + length)
            sampling = np.concatenate([decoding, prompts["prefill_slots"][prompts["prefill_samples"]]])
            rows = sampling.astype(np.intp)
        outputs = table.planned_outputs[rows]
        suppressed = np.where(outputs < table.min_tokens[rows], table.end_id[rows], np.int32(-1))
        outputs += 1
        table.planned_outputs[rows] = outputs
        epochs = table.epoch[rows]
        extras = []
        for row in table.extras[rows].nonzero()[0].tolist():
            slot = int(sampling[row])
            request = table.requests[slot]
            assert request is not None
            extras.append(ExtraRow(row, slot, int(epochs[row]), request, int(suppressed[row])))
        # Sequences whose last token this step makes stay in their slots until it is read.
        going_on = sampling[outputs < table.max_new[rows]]
        self.decoding = going_on if len(decoding) else np.concatenate([self.decoding, going_on])
        return StepPlan(
            decode_slots=decoding,
            decode_positions=positions,
            new_blocks=blocks,
            sample_slots=sampling,
            sample_epochs=epochs,
            temperature=table.temperature[rows],
            seed=table.seed[rows],
            suppressed=suppressed,
            extras=extras,
            **prompts,
        )

    def _computed_prompt(self, request: Request, computed: int) -> None:
        """Book a planned chunk. Blocks are registered at once: whoever matches them runs later in
        the stream, or in this step after its keys and values are stored."""
        self.table.computed[request.slot] = computed
        self._register(request, computed // self.config.tokens_per_block)
        if computed == self.table.known[request.slot]:
            self.prefilling.remove(request)

    def _register(self, request: Request, blocks: int) -> None:
        for index in range(request.registered_blocks, min(blocks, len(request.block_keys))):
            self.kv_manager.register(request.blocks[index], request.block_keys[index])
        request.registered_blocks = max(request.registered_blocks, blocks)

    def _preempt_newest(self) -> None:
        """Send the newest running request back to the queue's head, to be recomputed."""
        assert self.running, "blocks ran out although nothing runs"
        request = self.running[next(reversed(self.running))]
        slot = request.slot
        request.generated = self.table.tokens[slot, len(request.prompt) : self.table.known[slot]].copy()
        self._vacate(request)
        self.queue.put_back(request)
        self.preemptions += 1

    def _vacate(self, request: Request) -> None:
        """Take a running request off its slot and give its blocks back."""
        table, slot = self.table, request.slot
        del self.running[request.handle]
        if request in self.prefilling:
            self.prefilling.remove(request)
        self.decoding = self.decoding[self.decoding != slot]
        if self.kv_manager.reuse:
            # Only positions whose token is known: a step in flight may write beyond them.
            valid = int(min(table.computed[slot], table.known[slot]))
            parent = request.block_keys[-1] if request.block_keys else b""
            tokens = table.tokens[slot, :valid]
            request.block_keys += self.kv_manager.prefix_keys(tokens, len(request.block_keys), parent)
            self._register(request, valid // self.config.tokens_per_block)
        self.kv_manager.release(request.blocks)
        request.blocks = []
        self.reserved_blocks -= request.reserved_blocks
        request.reserved_blocks = 0
        table.vacate(slot)
