# SPDX-License-Identifier: Apache-2.0
"""The per-slot arrays that a step works on."""

from __future__ import annotations

import numpy as np

from flashinfer_backend.core.request import Request


class SlotTable:
    """Numpy state of running sequences, indexed by slot; the scheduler owns it.

    A slot's epoch changes whenever its owner does, so results of a step that was in flight when
    the owner left are recognised and dropped.
    """

    def __init__(self, slots: int, max_seq_len: int, end_ids: tuple[int, ...]) -> None:
        """end_ids: the checkpoint's end ids. A sequence that ends with one of them ends with each."""
        self.end_ids = np.array(end_ids if len(end_ids) > 1 else (), np.int32)
        self.requests: list[Request | None] = [None] * slots
        self.epoch = np.zeros(slots, np.int64)
        self.tokens = np.empty((slots, max_seq_len + 1), np.int32)
        self.known = np.zeros(slots, np.int32)  # tokens on the host: prompt and read outputs
        self.computed = np.zeros(slots, np.int32)  # tokens whose KV is written by planned steps
        self.prompt_len = np.zeros(slots, np.int32)
        self.planned_outputs = np.zeros(slots, np.int32)  # outputs that planned steps will have made
        self.max_new = np.zeros(slots, np.int32)
        self.min_tokens = np.zeros(slots, np.int32)
        self.end_id = np.zeros(slots, np.int32)
        self.any_end = np.zeros(slots, bool)  # each of end_ids ends it
        self.temperature = np.zeros(slots, np.float32)
        self.seed = np.zeros(slots, np.uint64)
        self.stub = np.zeros(slots, np.int64)  # pid of the submitting stub
        self.local_id = np.zeros(slots, np.int32)
        self.num_blocks = np.zeros(slots, np.int32)
        self.stateful = np.zeros(slots, bool)  # its sampling has a state
        self.stops = np.zeros(slots, bool)  # has token-level stop sequences
        self.takes_drafts = np.zeros(slots, bool)
        self.adapter = np.zeros(slots, np.int32)
        self._free = list(range(slots - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def occupy(self, request: Request, block_count: int, computed: int) -> int:
        """Give `request` a slot, with `computed` tokens already in its first blocks."""
        slot = self._free.pop()
        params = request.params
        tokens = request.generated
        prompt_len = len(request.prompt)
        known = prompt_len + len(tokens)
        self.requests[slot] = request
        self.tokens[slot, :prompt_len] = request.prompt
        self.tokens[slot, prompt_len:known] = tokens
        self.known[slot] = known
        self.computed[slot] = computed
        self.prompt_len[slot] = prompt_len
        self.planned_outputs[slot] = len(tokens)
        self.max_new[slot] = request.max_new
        self.min_tokens[slot] = params.min_tokens
        self.end_id[slot] = params.end_id
        self.any_end[slot] = bool((self.end_ids == params.end_id).any())
        self.temperature[slot] = params.temperature
        self.seed[slot] = params.seed
        self.stub[slot] = request.handle >> 32
        self.local_id[slot] = request.handle & 0x7FFFFFFF
        self.num_blocks[slot] = block_count
        self.stateful[slot] = params.stateful
        self.stops[slot] = bool(params.stop_sequences)
        self.takes_drafts[slot] = params.speculative_decoding
        self.adapter[slot] = request.adapter
        request.slot = slot
        return slot

    def vacate(self, slot: int) -> None:
        """Free a slot; rows of steps in flight that still name it become stale."""
        request = self.requests[slot]
        assert request is not None, f"slot {slot} is already free"
        request.slot = -1
        self.requests[slot] = None
        self.epoch[slot] += 1
        self._free.append(slot)
