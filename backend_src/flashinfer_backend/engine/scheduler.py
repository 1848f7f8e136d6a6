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

from flashinfer_backend.engine.budget import StepBudget, joins
from flashinfer_backend.engine.config import EngineConfig
from flashinfer_backend.engine.pages import PageAllocator
from flashinfer_backend.engine.request import Request, SlotTable
from flashinfer_backend.engine.step import NONE, ExtraRow, StepPlan, prompt_rows
from flashinfer_backend.engine.waiting import WaitingQueue


class Scheduler:
    """Owns the queue, the slot table and every sequence's pages."""

    def __init__(self, config: EngineConfig, allocator: PageAllocator, end_ids: tuple[int, ...] = ()) -> None:
        self.config = config
        self.allocator = allocator
        self.table = SlotTable(config.max_num_seqs, config.max_seq_len, end_ids)
        self.requests: dict[int, Request] = {}  # every open request by handle
        self.waiting = WaitingQueue(longest_first=config.schedule_policy == "lof")
        self._budget = StepBudget(config)
        self.running: dict[int, Request] = {}  # by handle, in order of admission
        self.prefilling: list[Request] = []
        self.decoding = NONE  # slots, in order of admission
        self.reserved_pages = 0
        self.preemptions = 0
        self.prompt_tokens = 0
        self.prompt_tokens_reused = 0

    def submit(self, request: Request) -> None:
        """Queue a new request. Its handle must not be open already."""
        if request.handle in self.requests:
            raise ValueError(f"handle {request.handle} is already in use by an open request")
        self.requests[request.handle] = request
        self.waiting.add(request)

    def release(self, request: Request) -> None:
        """The one way out, whether finished, cancelled or failed: frees slot and pages."""
        del self.requests[request.handle]
        if request.slot >= 0:
            self._vacate(request)
        else:
            self.waiting.remove(request)

    def schedule(self, in_flight: bool) -> StepPlan | None:
        """Plan the next step, or None if there is nothing to do, or if pages ran out and the steps
        `in_flight` must be read first (they may free pages; preemption needs all tokens known)."""
        limit = self._budget.tokens(self.table, self.decoding, self.prefilling, self.waiting)
        updates: list[tuple[int, int, int]] = []
        # Prompts first, as only then it shows what the prefix cache has of them. They take no page that
        # decode rows need now: admission leaves one for each running sequence, or all that it can need.
        chunks = self._plan_prefill(limit - len(self.decoding), updates)
        pause = self._budget.pauses(sum(length for _, _, length in chunks))
        pages = self._grow_decodes(NONE if pause else self.decoding, in_flight)
        if pages is None:
            assert not updates, "a sequence was admitted although pages had run out"
            return None
        decoding = NONE if pause else self.decoding
        chunks = [chunk for chunk in chunks if chunk[0].slot >= 0]  # not what was preempted just now
        if not len(decoding) and not chunks:
            return None
        return self._assemble(decoding, pages, chunks, updates)

    def _grow_decodes(self, decoding: np.ndarray, in_flight: bool) -> np.ndarray | None:
        """Give every decode the page its next token needs: int32 [d], -1 where there is room. None if
        results must be read first."""
        table, size = self.table, self.config.tokens_per_block
        while True:
            slots = decoding.astype(np.intp)
            rows = (table.computed[slots] >= table.num_pages[slots] * size).nonzero()[0]
            pages = self.allocator.allocate(len(rows))
            if pages is not None:
                break
            if in_flight:
                return None
            self._preempt_newest()
            decoding = self.decoding
        needy = slots[rows]
        table.num_pages[needy] += 1
        new_pages = np.full(len(slots), -1, np.int32)
        new_pages[rows] = pages
        for slot, page in zip(needy.tolist(), pages, strict=True):
            request = table.requests[slot]
            assert request is not None
            request.pages.append(page)
            request.new_pages += 1
            if request.reserved_pages:
                request.reserved_pages -= 1
                self.reserved_pages -= 1
        return new_pages

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
        """Move the head of the queue to a slot if slot, pages, `budget` and the tokens that are
        `together` in the step already allow."""
        if not self.waiting or not self.table.free:
            return None
        request = self.waiting.head
        leader = self.requests.get(request.share_prompt_with)
        if leader is not None and leader is not request and leader in self.prefilling:
            return None  # its pages are registered only as its prompt is computed
        tokens = np.concatenate([request.prompt, request.generated])
        size = self.config.tokens_per_block
        request.page_keys = self._prefix_keys(request, tokens)
        reused = []
        if not request.params.context_logits:
            reused = self.allocator.match(request.page_keys[: (len(tokens) - 1) // size])
        needed = -(-len(tokens) // size) - len(reused)
        reserve = 0
        if self.config.batch_scheduler_policy == "guaranteed_no_evict":
            total = -(-(len(request.prompt) + request.max_new) // size)
            reserve = max(0, total - len(reused) - needed)
            headroom = reserve + self.reserved_pages
        else:
            headroom = len(self.running)  # each may ask for a page soon
        new_tokens = len(tokens) - len(reused) * size
        # What was preempted may have grown beyond a step, so it is always computed in chunks.
        chunked = self.config.enable_chunked_context or bool(len(request.generated))
        fits_step = (chunked or new_tokens <= budget) and joins(
            self.config, self.waiting, together, new_tokens
        )
        if needed + headroom > self.allocator.available or not fits_step:
            self.allocator.release(reused)
            return None
        pages = self.allocator.allocate(needed)
        assert pages is not None
        self.waiting.pop()
        request.pages = reused + pages
        request.registered_pages = len(reused)
        request.reused_pages, request.new_pages = len(reused), len(pages)
        request.reserved_pages = reserve
        self.reserved_pages += reserve
        if not request.first_scheduled_ns:
            request.first_scheduled_ns = time.time_ns()
            self.prompt_tokens += len(tokens)
            self.prompt_tokens_reused += len(reused) * size
        slot = self.table.occupy(request, len(request.pages), len(reused) * size)
        updates.extend((slot, index, page) for index, page in enumerate(request.pages))
        self.running[request.handle] = request
        self.prefilling.append(request)
        return request

    def _prefix_keys(self, request: Request, tokens: np.ndarray) -> list[bytes]:
        """Keys under which this request's full pages may be shared; none if it shares nothing."""
        if self.allocator.reuse:
            return self.allocator.prefix_keys(tokens)
        if request.share_prompt_with:
            return self.allocator.prefix_keys(tokens, parent=request.share_prompt_with.to_bytes(8, "little"))
        return []

    def _assemble(
        self,
        decoding: np.ndarray,
        pages: np.ndarray,
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
        banned = np.where(outputs < table.min_tokens[rows], table.end_id[rows], np.int32(-1))
        outputs += 1
        table.planned_outputs[rows] = outputs
        epochs = table.epoch[rows]
        extras = []
        for row in table.extras[rows].nonzero()[0].tolist():
            slot = int(sampling[row])
            request = table.requests[slot]
            assert request is not None
            extras.append(ExtraRow(row, slot, int(epochs[row]), request, int(banned[row])))
        # Sequences whose last token this step makes stay in their slots until it is read.
        going_on = sampling[outputs < table.max_new[rows]]
        self.decoding = going_on if len(decoding) else np.concatenate([self.decoding, going_on])
        return StepPlan(
            decode_slots=decoding,
            decode_positions=positions,
            decode_pages=pages,
            sample_slots=sampling,
            sample_epochs=epochs,
            temperature=table.temperature[rows],
            seed=table.seed[rows],
            banned=banned,
            extras=extras,
            **prompts,
        )

    def _computed_prompt(self, request: Request, computed: int) -> None:
        """Book a planned chunk. Pages are registered at once: whoever matches them runs later in
        the stream, or in this step after its keys and values are stored."""
        self.table.computed[request.slot] = computed
        self._register(request, computed // self.config.tokens_per_block)
        if computed == self.table.known[request.slot]:
            self.prefilling.remove(request)

    def _register(self, request: Request, pages: int) -> None:
        for index in range(request.registered_pages, min(pages, len(request.page_keys))):
            self.allocator.register(request.pages[index], request.page_keys[index])
        request.registered_pages = max(request.registered_pages, pages)

    def _preempt_newest(self) -> None:
        """Send the newest running request back to the queue's head, to be recomputed."""
        assert self.running, "pages ran out although nothing runs"
        request = self.running[next(reversed(self.running))]
        slot = request.slot
        request.generated = self.table.tokens[slot, len(request.prompt) : self.table.known[slot]].copy()
        self._vacate(request)
        self.waiting.put_back(request)
        self.preemptions += 1

    def _vacate(self, request: Request) -> None:
        """Take a running request off its slot and give its pages back."""
        table, slot = self.table, request.slot
        del self.running[request.handle]
        if request in self.prefilling:
            self.prefilling.remove(request)
        self.decoding = self.decoding[self.decoding != slot]
        if self.allocator.reuse:
            # Only positions whose token is known: a step in flight may write beyond them.
            valid = int(min(table.computed[slot], table.known[slot]))
            parent = request.page_keys[-1] if request.page_keys else b""
            tokens = table.tokens[slot, :valid]
            request.page_keys += self.allocator.prefix_keys(tokens, len(request.page_keys), parent)
            self._register(request, valid // self.config.tokens_per_block)
        self.allocator.release(request.pages)
        request.pages = []
        self.reserved_pages -= request.reserved_pages
        request.reserved_pages = 0
        table.vacate(slot)
