# SPDX-License-Identifier: Apache-2.0
"""Chooses what each step computes: decodes, and prompt chunks in order of admission, but for short prompts: a
prompt that is longer than what a step has for prompts leaves half of that to those that it ends.

The scheduler runs one step ahead of what is known: a planned decode is assumed to yield one token, or with
drafts all that it can, until `correct` is told otherwise. A sequence that turns out to have ended leaves
through `release`, and the rows that were planned for it meanwhile are recognised as stale by their epoch.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from flashinfer_backend.cache.pool import BlockPool
from flashinfer_backend.core import tuned
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.request import Request
from flashinfer_backend.core.step import NONE, Feeds, NewSequence, StepPlan, Wants
from flashinfer_backend.scheduler.budget import StepBudget
from flashinfer_backend.scheduler.draft_pace import Costs, DraftPace
from flashinfer_backend.scheduler.kv_cache_manager import KVCacheManager, Update
from flashinfer_backend.scheduler.request_queue import RequestQueue
from flashinfer_backend.scheduler.slot_table import SlotTable

NO_UPDATES = NONE.reshape(0, 4)
NO_PAIRS = NONE.reshape(0, 2)
NO_CUTS = NONE.reshape(0, 3)
# How many tokens and requests that wait are looked up in the prefix cache in each step: 8192 tokens take
# 0.4 ms, of which all but 0.04 are hashing, once. The head, which is next, is looked up whatever its length.
MOST_LOOKED_UP = 8192, 16
# How many waiting requests are looked at in a step for short ones that overtake a long prompt; prompts that
# do not fit their room whole are hashed, for up to as many tokens as above.
MOST_OVERTAKING = 1024
# How far apart the states of layers that keep some are saved, at least, in tokens. The states of 64 sequences
# are read and written in some 5 % of their step's time, so 1 / 64 of that is spent.
SNAPSHOT_TOKENS = 64
# Fewer tokens before a state that is kept end a row there: the most inputs of a convolution that is computed.
CUT_TOKENS = 16


class Chunk(NamedTuple):
    """Tokens of a prompt that a step computes."""

    request: Request
    start: int
    length: int


@dataclass(slots=True)
class SlotNews:
    """What the next plan tells the worker, besides its rows: see the same fields of StepPlan."""

    new: list[NewSequence] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    recalled: list[tuple[int, bytes]] = field(default_factory=list)
    adapters: list[tuple[int, int]] = field(default_factory=list)  # of sequences that came to slots
    restored: list[tuple[int, int]] = field(default_factory=list)
    saved: list[tuple[int, int]] = field(default_factory=list)


class Rows(NamedTuple):
    """Rows of a plan: the same columns as StepPlan's."""

    slots: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    feeds: np.ndarray
    wants: np.ndarray


class Scheduler:
    """Owns the queue, the slot table and every sequence's blocks."""

    def __init__(
        self,
        config: EngineConfig,
        kv_manager: KVCacheManager,
        end_ids: tuple[int, ...] = (),
        numbers: tuned.Scheduling | None = None,
        logits_tokens: int | None = None,
        drafts: int = 0,
        history: bool = False,
        draft_costs: Costs | None = None,
    ) -> None:
        """numbers: tuned values for this device; by default the generic ones.
        logits_tokens: of a prompt whose logits are wanted, how many a step computes if it may be cut; None:
        as many as of any other. drafts: how many tokens a decode row checks at most besides its own. history:
        whether the device has to know all tokens of a sequence. draft_costs: of steps with drafts, as they
        were timed."""
        self.config = config
        self.kv_manager = kv_manager
        self.table = SlotTable(config.max_num_seqs, config.max_seq_len, end_ids)
        self.requests: dict[int, Request] = {}  # every open request by handle
        self.queue = RequestQueue(longest_first=config.schedule_policy == "lof")
        self._budget = StepBudget(config, numbers or tuned.fallback().scheduling)
        self.running: dict[int, Request] = {}  # by handle, in order of admission
        self.prefilling: list[Request] = []
        self.decoding = NONE  # slots, in order of admission
        self.reserved_blocks = 0
        self.preemptions = 0
        self.prompt_tokens = 0
        self.prompt_tokens_reused = 0
        self.blocks_reused = 0  # by every sequence, each time it came to a slot
        self._logits_tokens = logits_tokens if config.enable_chunked_context else None
        self.drafts = drafts
        self._history = history
        # By slot: the drafts that the device has behind its last token, and the tokens of its next decode
        # row.
        self._offered = np.zeros(config.max_num_seqs, np.int32)
        self._row_tokens = np.ones(config.max_num_seqs, np.int32)
        self._pace = DraftPace(config.max_num_seqs, drafts, draft_costs) if drafts else None
        self.drafted_tokens = self.accepted_tokens = 0
        # Blocks that a decode row can need.
        self._blocks_per_decode = -(-(1 + drafts) // config.tokens_per_block)
        # Blocks that were registered since the last plan was begun.
        self._named: list[tuple[BlockPool, int]] = []
        # Of the last plan: they may have left blocks behind their windows.
        self._last_prompts: list[Request] = []
        self._news = SlotNews()
        self._saving: list[int] = []  # snapshots of prompts that the last plan writes
        size = config.tokens_per_block
        self._snapshot_tokens = -(-SNAPSHOT_TOKENS // size) * size
        # Columns of plans of decodes alone; they are never written to.
        self._ones = np.ones(config.max_num_seqs, np.int32)
        self._last = np.full(config.max_num_seqs, Feeds.LAST, np.int8)
        self._next = np.full(config.max_num_seqs, Wants.NEXT, np.int8)

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
        if request.params.stateful and request.first_scheduled_ns:
            self._news.freed.append(request.handle)

    def drop_late(self, now_ns: int) -> list[Request]:
        """Release the requests without a slot whose deadline, of the monotonic clock, is `now_ns` or before,
        and return them. What has had a slot is never late."""
        late = self.queue.late(now_ns)
        for request in late:
            self.release(request)
        return late

    def schedule(self, in_flight: bool, decode_s: float | None = None) -> StepPlan | None:
        """Plan the next step, or None if there is nothing to do, or if blocks ran out and the steps
        `in_flight` must be read first (they may free blocks; preemption needs all tokens known).

        decode_s: how long a step without prompts takes on the device, in seconds; None where not known."""
        self._named.clear()
        if self.kv_manager.snapshots is not None:
            self.kv_manager.snapshots.release(self._saving)
            self._saving.clear()
        for request in self._last_prompts:
            if request.slot >= 0:
                self._leave_behind(request)
        # What the prefix cache has only matters next to streams, and when something can be admitted.
        looks = len(self.decoding) > 0 and self.table.free > 0
        waiting_tokens = self._waiting_tokens() if looks else self.queue.known_tokens
        limit = self._budget.tokens(
            self.table, self.decoding, self.prefilling, self.queue, waiting_tokens, decode_s
        )
        updates: list[Update] = []
        # Prompts first, as only then it shows what the prefix cache has of them. They take no block that
        # decode rows need now: admission leaves one for each running sequence, or all that it can need.
        chunks = self._plan_prompts(limit - len(self.decoding), updates)
        self._size_decodes(limit, bool(chunks))
        opened = self._grow_decodes(self.decoding, in_flight, updates)
        if opened is None:
            assert not updates, "a sequence was admitted although blocks had run out"
            for chunk in chunks:
                self._leave_behind(chunk.request)  # nor keeps what it was promised
            return None
        decoding = self.decoding  # without what was preempted just now, nor are its chunks
        chunks = [chunk for chunk in chunks if chunk.request.slot >= 0]
        if self.kv_manager.windows:
            for request, start, length in chunks:
                updates += self.kv_manager.open_windows(request, start + length, request.slot)
            self._last_prompts = [chunk.request for chunk in chunks]
        if not len(decoding) and not chunks:
            return None
        if updates:
            opened = np.concatenate([opened, np.array(updates, np.int32)])
        return self._assemble(decoding, chunks, opened)

    def _size_decodes(self, limit: int, prompts: bool) -> None:
        """Choose how many tokens each decode row feeds in a step of `limit` tokens, with prompts or without.

        Requests that switched drafts off get none, nor does any row in a step with prompts. No row is planned
        beyond max_new: a sequence that can have reached it waits until its steps are read. Nor do drafts
        reach the last token before min_tokens: the step behind them, planned before they are read, also holds
        the end back, which it does for all of its tokens or for none."""
        slots, table = self.decoding, self.table
        if self._pace is None or not len(slots):
            return
        planned = table.planned_outputs[slots]
        most = self._pace.most(len(slots))
        drafts = np.minimum(self._offered[slots], table.max_new[slots] - planned - 1).clip(max=most)
        early = table.min_tokens[slots] - planned
        drafts = np.where(early > 0, np.minimum(drafts, early - 2).clip(min=0), drafts)
        drafts[~table.takes_drafts[slots]] = 0
        if prompts:
            drafts[:] = 0
        drafts[np.cumsum(drafts) > limit - len(slots)] = 0
        self._row_tokens[slots] = 1 + drafts

    def _grow_decodes(
        self, decoding: np.ndarray, in_flight: bool, updates: list[Update]
    ) -> np.ndarray | None:
        """Give every decode the blocks that its next tokens need: int32 [n, 4] of StepPlan.block_updates, and
        those of windows in `updates`. None if results must be read first."""
        table, manager, size = self.table, self.kv_manager, self.config.tokens_per_block
        while True:
            slots = decoding.astype(np.intp)
            last = table.computed[slots] - table.num_blocks[slots] * size  # place of the last token
            if self.drafts:
                last += self._row_tokens[slots] - 1
            rows = (last >= 0).nonzero()[0]
            if not len(rows):
                return NO_UPDATES
            counts = last[rows] // size + 1
            blocks = [] if manager.full is None else manager.full.allocate(int(counts.sum()))
            if blocks is not None:
                break
            if in_flight:
                return None
            self._preempt_newest()
            decoding = self.decoding
        needy = np.repeat(slots[rows], counts)
        columns = table.num_blocks[needy]
        if len(needy) > len(rows):
            columns += np.arange(len(needy)) - np.repeat(np.cumsum(counts) - counts, counts)
        table.num_blocks[slots[rows]] += counts
        for slot, block in zip(needy.tolist(), blocks, strict=False):
            request = table.requests[slot]
            assert request is not None
            request.held[0].blocks.append(block)
            if request.reserved_blocks:
                request.reserved_blocks -= 1
                self.reserved_blocks -= 1
        if manager.windows:
            for slot in slots[rows].tolist():
                request = table.requests[slot]
                assert request is not None
                self._leave_behind(request)
                end = int(table.computed[slot] + self._row_tokens[slot])
                updates += manager.open_windows(request, end, slot)
            if manager.full is None:
                return NO_UPDATES
        opened = np.zeros((len(needy), 4), np.int32)
        opened[:, 1], opened[:, 2], opened[:, 3] = needy, columns, blocks
        return opened

    def _leave_behind(self, request: Request) -> None:
        """Give back what no row of a running request reads from now on, whatever the unread steps yield: its
        next token stands behind those that have been read, or behind those that a planned chunk computes."""
        table, slot = self.table, request.slot
        position = min(table.computed[slot], table.known[slot] - 1)
        self.kv_manager.leave_behind(request, int(position))

    def _plan_prompts(self, budget: int, updates: list[Update]) -> list[Chunk]:
        """Chunks within `budget` tokens; admits waiting requests."""
        chunks: list[Chunk] = []
        candidates = deque(self.prefilling)
        whole, long = budget, None
        while budget > 0:
            if candidates:
                request = candidates.popleft()
            else:
                admitted = None
                if self.queue:
                    admitted = self._admit(self.queue.head, budget, whole - budget, updates)
                if admitted is None:
                    break
                request = admitted
            if long is None and self._left(request) > whole:
                long = request
                others = self._overtake(long, budget, candidates, updates)
                budget -= sum(chunk.length for chunk in others)
                chunks += others
            chunks.append(self._chunk(request, budget))
            budget -= chunks[-1].length
        return chunks

    def _overtake(
        self, long: Request, budget: int, candidates: deque[Request], updates: list[Update]
    ) -> list[Chunk]:
        """Chunks that end prompts within half of `budget`, or what a prompt that takes several steps does not
        want of it: of `candidates`, which run and are taken out of them, and of waiting requests, from the
        queue's head on. None has a lower priority than a prompt that it overtakes."""
        chunks: list[Chunk] = []
        room = budget - min(self._wanted(long), budget - budget // 2)
        self._chunk(long, budget - room)  # promised in groups with windows before others are let in
        for request in [request for request in candidates if self._left(request) <= room]:
            if self._left(request) <= room:
                candidates.remove(request)
                chunks.append(self._chunk(request, room))
                room -= chunks[-1].length
        allowed, most_tokens, size = long.priority, MOST_LOOKED_UP[0], self.config.tokens_per_block
        for request in list(itertools.islice(self.queue, MOST_OVERTAKING)):
            if not self.table.free or not room:
                break
            if request.priority <= allowed:
                hashed = 0
                if request.num_tokens > room:
                    hashed = (request.num_tokens // size - len(request.block_keys)) * size
                if hashed <= most_tokens:
                    most_tokens -= hashed
                    if self._ends_within(request, room) and self._admit(request, room, 0, updates):
                        chunks.append(self._chunk(request, room))
                        room -= chunks[-1].length
                        continue
            allowed = min(allowed, request.priority)
        return chunks

    def _ends_within(self, request: Request, room: int) -> bool:
        """Whether a step with `room` computes all of a waiting request's prompt that is not cached."""
        size = self.config.tokens_per_block
        needed = -(-(request.num_tokens - room) // size)  # blocks that have to be cached
        if needed <= 0:
            return True
        self._name_blocks(request)
        keys, full = request.block_keys, self.kv_manager.full
        if needed > len(keys) or (full is not None and not full.has(keys[needed - 1])):
            return False  # nearly always; a long prompt has many keys to count
        return self.kv_manager.count(self._reusable(request))[0] >= needed

    def _left(self, request: Request) -> int:
        """Tokens of a running request's prompt that are not computed."""
        return int(self.table.known[request.slot] - self.table.computed[request.slot])

    def _wanted(self, request: Request) -> int:
        """Tokens of a running request's prompt that its next chunk has, in a step with room for them."""
        left = self._left(request)
        if request.params.context_logits and self._logits_tokens is not None:
            return min(left, self._logits_tokens)
        return left

    def _chunk(self, request: Request, most: int) -> Chunk:
        """The next of a running request's prompt, of up to `most` tokens."""
        start, length = int(self.table.computed[request.slot]), min(self._wanted(request), most)
        if self.kv_manager.windows:
            length = self.kv_manager.fit_chunk(request, start, length)
        within = [border - start for border in request.borders if 0 < border - start < length]
        if len(within) > 1 or (within and within[0] < CUT_TOKENS):
            length = within[0]
        return Chunk(request, start, length)

    def _admit(self, request: Request, budget: int, together: int, updates: list[Update]) -> Request | None:
        """Move a waiting request to a slot if slot, blocks, `budget` and the tokens that are `together` in
        the step already allow."""
        if not self.table.free:
            return None
        size, num_tokens = self.config.tokens_per_block, request.num_tokens
        reusable = self._reusable(request)
        found, unheld = self.kv_manager.count(reusable)
        new_tokens = num_tokens - found * size
        # What was preempted may have grown beyond a step, so it is always computed in chunks.
        chunked = self.config.enable_chunked_context or bool(len(request.generated))
        if not (chunked or new_tokens <= budget) or not self._budget.should_share_step(
            self.queue, len(self.decoding), together, new_tokens
        ):
            return None
        if 2 * size * self._coming(reusable, found) >= new_tokens > 0:
            return None  # most of it is being computed for another prompt
        columns = -(-num_tokens // size)
        needed = columns - found
        full, pool = self.kv_manager.full, self.kv_manager.pools[0]
        reserve = 0
        if self.config.batch_scheduler_policy == "guaranteed_no_evict" and full is not None:
            total = -(-(len(request.prompt) + request.max_new) // size)
            reserve = max(0, total - found - needed)
            headroom = reserve + self.reserved_blocks
        else:
            headroom = len(self.running) * self._blocks_per_decode  # each may ask for as many soon
        short = full is not None and needed + headroom > full.available - unheld
        if short or not self.kv_manager.can_promise(request, found, whole=not chunked):
            if unheld or self.kv_manager.windows or self.kv_manager.snapshots is not None:
                self.kv_manager.keep(reusable[:found])
            return None
        new = min(needed, pool.available - pool.cached)
        self.queue.take(request)
        slot = self.table.occupy(request, columns, found * size)
        if self._pace is not None:
            self._pace.begin(slot)
        updates += self.kv_manager.take(request, reusable[:found], slot)
        if self.kv_manager.snapshots is not None:
            borders = self._borders(reusable, found)
            request.borders = borders if chunked else borders[-1:]  # a step keeps one within a row
            if found:
                self._news.restored.append((slot, self.kv_manager.restore(reusable[:found])))
        if self._history and found:
            cached = request.known_tokens[: found * size]
            self._news.recalled.append((slot, cached.astype("<i4").tobytes()))
        if self.config.max_loras:
            self._news.adapters.append((slot, request.adapter))
        request.registered_blocks = found
        request.found_blocks = found
        request.reused_blocks += found
        request.allocated_blocks += needed
        request.new_blocks += new
        self.blocks_reused += found
        request.reserved_blocks = reserve
        self.reserved_blocks += reserve
        if not request.first_scheduled_ns:
            request.first_scheduled_ns = time.time_ns()
            request.cached_tokens = found * size
            self.prompt_tokens += num_tokens
            self.prompt_tokens_reused += found * size
        self.running[request.handle] = request
        self.prefilling.append(request)
        if request.params.stateful:
            self._news.new.append(self._new_sequence(request))
        return request

    def _borders(self, keys: list[bytes], found: int) -> list[int]:
        """Behind how many tokens of a prompt the states are kept: at the last block that another prompt can
        have in common with it, and where it parts from one that had no snapshot there.
        keys: of the blocks that can be reused, of which `found` are."""
        full = self.kv_manager.full
        parting = 0 if full is None else full.count(keys)[0]
        tokens = (blocks * self.config.tokens_per_block for blocks in sorted({parting, len(keys)}))
        first = found * self.config.tokens_per_block + self._snapshot_tokens
        return [border for border in tokens if border >= first]

    def _waiting_tokens(self) -> int:
        """Tokens of waiting requests to be computed before a next one of each, without those that the prefix
        cache has. Where many wait, the cached tokens of those far behind the head are counted as waiting."""
        most_tokens, most_requests = MOST_LOOKED_UP
        waiting, tokens = self.queue.known_tokens, 0
        for request in itertools.islice(self.queue, most_requests):
            if tokens and tokens + request.num_tokens > most_tokens:
                break
            tokens += request.num_tokens
            waiting -= self.kv_manager.count(self._reusable(request))[0] * self.config.tokens_per_block
        return waiting

    def _reusable(self, request: Request) -> list[bytes]:
        """Keys of the blocks that a waiting request takes if the prefix cache has them. A last token is left
        to be computed. All are named, since what the request computes may serve others in any case."""
        self._name_blocks(request)
        if request.params.reports_prompt:
            return []
        return request.block_keys[: (request.num_tokens - 1) // self.config.tokens_per_block]

    def _name_blocks(self, request: Request) -> None:
        """Keys under which the request's full blocks may be shared; none if it shares nothing. They are kept
        while it waits: those of a long prompt take milliseconds."""
        keys = request.block_keys
        if len(keys) == request.num_tokens // self.config.tokens_per_block:
            return
        if self.kv_manager.reuse or request.share_prompt_with:
            own = b"" if self.kv_manager.reuse else request.share_prompt_with.to_bytes(8, "little")
            parent = keys[-1] if keys else own + request.cache_root
            keys += self.kv_manager.prefix_keys(request.known_tokens, len(keys), parent)

    def _coming(self, keys: list[bytes], found: int) -> int:
        """How many blocks of `keys` from `found` on a prompt at work will have made: the longest such run."""
        if found >= len(keys):
            return 0
        longest = 0
        first = keys[found]  # a key stands for all tokens before it, so equal ones have one place
        for other in self.prefilling:
            theirs = other.block_keys
            if found >= len(theirs) or theirs[found] != first:  # nearly always
                continue
            count = found + 1
            while count < min(len(keys), len(theirs)) and theirs[count] == keys[count]:
                count += 1
            if self.kv_manager.snapshots is not None:  # others go on only where its states will be kept
                size, computed = self.config.tokens_per_block, self.table.computed[other.slot]
                kept = [border // size for border in other.borders if border > computed]
                count = max((blocks for blocks in kept if blocks <= count), default=found)
            longest = max(longest, count - found)
        return longest

    def _new_sequence(self, request: Request) -> NewSequence:
        params, slot = request.params, request.slot
        tokens = request.known_tokens.astype("<i4").tobytes() if params.needs_history else b""
        epoch = int(self.table.epoch[slot])
        return NewSequence(request.handle, slot, epoch, params, len(request.prompt), tokens)

    def _assemble(self, decoding: np.ndarray, chunks: list[Chunk], updates: np.ndarray) -> StepPlan:
        table = self.table
        drafted = NONE
        if self.drafts:
            drafted = decoding[self._row_tokens[decoding] > 1]
            decoding = decoding[self._row_tokens[decoding] == 1]
        rows = self._decode_rows(decoding)
        sampling, samples = decoding, 1  # slots, and how many tokens are sampled of each
        tokens, following = NONE, NONE
        cuts: list[tuple[int, int, int]] = []
        told: list[tuple[int, int, bytes]] = []
        if chunks:
            chunks = sorted(chunks, key=lambda chunk: chunk.length > 1)  # rows of length 1 come first
            prompts = self._prompt_rows(chunks)
            tokens = np.concatenate(
                [table.tokens[c.request.slot, c.start : c.start + c.length] for c in chunks]
            )
            ends = prompts.starts + prompts.lengths
            reaches = ends == table.known[prompts.slots]
            sampling = np.concatenate([sampling, prompts.slots[reaches]])
            if self.drafts:
                following = np.where(reaches, -1, table.tokens[prompts.slots, ends]).astype(np.int32)
            for row, chunk in enumerate(chunks, len(decoding)):
                kept = self._computed_prompt(chunk)
                cuts += [(row, length, snapshot) for length, snapshot in kept]
                told += self._told(row, chunk)
            rows = _joined(rows, prompts)
        if len(drafted):
            drafts = self._draft_rows(drafted)
            samples = np.concatenate([np.ones(len(sampling), np.int32), drafts.lengths])
            sampling = np.concatenate([sampling, drafted])
            rows = _joined(rows, drafts)
        chosen = sampling.astype(np.intp)
        outputs = table.planned_outputs[chosen]
        suppressed = np.where(outputs < table.min_tokens[chosen], table.end_id[chosen], np.int32(-1))
        outputs += samples
        table.planned_outputs[chosen] = outputs
        # Sequences whose last token this step makes stay in their slots until it is read.
        going_on = sampling[outputs < table.max_new[chosen]]
        streams = len(decoding) + len(drafted)
        self.decoding = going_on if streams else np.concatenate([self.decoding, going_on])
        # None for a step that has prompts, as the next one is about to.
        wanted = 0
        if self._pace is not None and not self.prefilling:
            wanted = self._pace.offers(chosen[table.takes_drafts[chosen]], len(chosen))
        self._offered[chosen] = wanted
        news, self._news = self._news, SlotNews()
        return StepPlan(
            slots=rows.slots,
            starts=rows.starts,
            lengths=rows.lengths,
            feeds=rows.feeds,
            wants=rows.wants,
            tokens=tokens,
            block_updates=updates,
            epochs=table.epoch[chosen],
            temperature=table.temperature[chosen],
            seed=table.seed[chosen],
            suppressed=suppressed,
            stateful=table.stateful[chosen].nonzero()[0].astype(np.int32),
            new=news.new,
            freed=news.freed,
            told=told,
            drafts=wanted,
            following=following,
            recalled=news.recalled,
            adapters=_array(news.adapters, NO_PAIRS),
            restored=_array(news.restored, NO_PAIRS),
            saved=_array(news.saved, NO_PAIRS),
            cuts=_array(cuts, NO_CUTS),
            adapted=bool(self.config.max_loras) and bool((table.adapter[rows.slots] >= 0).any()),
        )

    def _decode_rows(self, slots: np.ndarray) -> Rows:
        """Rows that feed their slots' last tokens, counted as computed."""
        count, places = len(slots), slots.astype(np.intp)  # numpy indexes by these in a third of the time
        starts = self.table.computed[places]
        self.table.computed[places] = starts + 1
        # With drafts, only the device knows where a row ends, and states are behind it.
        if self.kv_manager.snapshots is not None and self.kv_manager.reuse and not self.drafts:
            for row in ((starts + 1) % self._snapshot_tokens == 0).nonzero()[0].tolist():
                self._save_generated(int(slots[row]), int(starts[row]) + 1)
        return Rows(slots, starts, self._ones[:count], self._last[:count], self._next[:count])

    def _prompt_rows(self, chunks: list[Chunk]) -> Rows:
        columns = np.array([(c.request.slot, c.start, c.length) for c in chunks], np.int32)
        slots, starts, lengths = columns.T
        logits = [c.request.params.context_logits and not len(c.request.generated) for c in chunks]
        reaches = starts + lengths == self.table.known[slots]
        wants = reaches * Wants.NEXT | np.array(logits) * Wants.LOGITS
        return Rows(slots, starts, lengths, np.full(len(chunks), Feeds.GIVEN, np.int8), wants)

    def _told(self, row: int, chunk: Chunk) -> list[tuple[int, int, bytes]]:
        """StepPlan.told of a chunk, the step's `row`; none where nothing is wanted, or has been told."""
        request, first = chunk.request, chunk.start + 1
        following = request.prompt[first : first + chunk.length]
        most = request.params.prompt_log_probs
        if most is None or len(request.generated) or not len(following):
            return []
        return [(row, most, following.astype("<i4").tobytes())]

    def _draft_rows(self, slots: np.ndarray) -> Rows:
        """Rows that feed their slots' last tokens and drafts, counted as computed."""
        lengths, starts = self._row_tokens[slots], self.table.computed[slots]
        self.table.computed[slots] += lengths
        feeds = np.full(len(slots), Feeds.LAST_AND_DRAFTS, np.int8)
        return Rows(slots, starts, lengths, feeds, np.full(len(slots), Wants.NEXT_OF_EACH, np.int8))

    def correct(self, plan: StepPlan, kept: np.ndarray) -> None:
        """Book what a step with drafts came to, before a sequence of it is released. kept: int32 [sampling
        rows], tokens of each; 0 of those whose slot has another owner."""
        table = self.table
        short = plan.samples - kept
        checked = ((kept > 0) & (plan.samples > 1)).nonzero()[0]
        own, drafts, accepted = plan.sample_slots[checked], plan.samples[checked] - 1, kept[checked] - 1
        assert self._pace is not None
        self._pace.checked(own, drafts, accepted)
        for slot, drafted, right in zip(own.tolist(), drafts.tolist(), accepted.tolist(), strict=True):
            request = table.requests[slot]
            assert request is not None
            request.drafted_tokens += drafted
            request.accepted_tokens += right
            self.drafted_tokens += drafted
            self.accepted_tokens += right
        rows = ((kept > 0) & (short > 0)).nonzero()[0]
        slots, short = plan.sample_slots[rows], short[rows]
        waiting = table.planned_outputs[slots] == table.max_new[slots]
        table.planned_outputs[slots] -= short
        table.computed[slots] -= short
        self.decoding = np.concatenate([self.decoding, slots[waiting]])

    def abandon(self, plan: StepPlan, failed: list[int]) -> list[Request]:
        """Undo a step that could not be launched, when all earlier ones have been read. Forgets the blocks
        that it should have written, releases the requests in slots `failed` and returns them; the others'
        go back to the queue's head, in their order, to be computed again."""
        # Also of sequences that ended since: a step that was read meanwhile may have been their last one.
        for pool, block in self._named:
            pool.forget(block)
        size = self.config.tokens_per_block
        for slot, length in zip(plan.slots.tolist(), plan.lengths.tolist(), strict=True):
            request = self.table.requests[slot]
            if request is None:
                continue
            self.table.computed[slot] -= length
            start = int(self.table.computed[slot])
            request.registered_blocks = min(request.registered_blocks, start // size)
        culprits = [request for slot in failed if (request := self.table.requests[slot]) is not None]
        for request in culprits:
            self.release(request)
        slots = set(plan.slots.tolist())
        for request in [r for r in reversed(self.running.values()) if r.slot in slots]:
            self._preempt(request)
        return culprits

    def _computed_prompt(self, chunk: Chunk) -> list[tuple[int, int]]:
        """Book a planned chunk. Blocks are registered at once: a sequence that matches them runs later in
        the stream, or in this step after its keys and values are stored. Returns the snapshots to take within
        the chunk: (tokens of it before each, snapshot)."""
        request, computed = chunk.request, chunk.start + chunk.length
        self.table.computed[request.slot] = computed
        self._register(request, computed // self.config.tokens_per_block)
        within = []
        for border in request.borders:
            if not chunk.start < border <= computed:
                continue
            key = request.block_keys[border // self.config.tokens_per_block - 1]
            if (snapshot := self.kv_manager.save(key)) is None:
                continue
            assert self.kv_manager.snapshots is not None
            self._named.append((self.kv_manager.snapshots, snapshot))
            self._saving.append(snapshot)
            if border == computed:
                self._news.saved.append((request.slot, snapshot))
            else:
                within.append((border - chunk.start, snapshot))
        if computed == self.table.known[request.slot]:
            self.prefilling.remove(request)
        return within

    def _save_generated(self, slot: int, tokens: int) -> None:
        """Keep a sequence's state behind `tokens` tokens in place of the one that was kept before. It gets a
        key when the sequence leaves its slot, since the host does not know the tokens before. Sequences hold
        at most half of the snapshots; the others are for states that can be found."""
        pool, request = self.kv_manager.snapshots, self.table.requests[slot]
        assert pool is not None and request is not None
        if not request.snapshot:
            found = pool.allocate(1) if 2 * pool.available > pool.num_blocks else None
            if found is None:
                return
            (request.snapshot,) = found
        request.snapshot_tokens = tokens
        self._news.saved.append((slot, request.snapshot))

    def _register(self, request: Request, blocks: int) -> None:
        new = range(request.registered_blocks, min(blocks, len(request.block_keys)))
        self._named += self.kv_manager.register(request, new)
        request.registered_blocks = max(request.registered_blocks, blocks)

    def _preempt_newest(self) -> None:
        """Send the newest running request back to the queue's head, to be recomputed."""
        assert self.running, "blocks ran out although nothing runs"
        self._preempt(self.running[next(reversed(self.running))])

    def _preempt(self, request: Request) -> None:
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
            parent = request.block_keys[-1] if request.block_keys else request.cache_root
            tokens = table.tokens[slot, :valid]
            request.block_keys += self.kv_manager.prefix_keys(tokens, len(request.block_keys), parent)
            self._register(request, valid // self.config.tokens_per_block)
        if (pool := self.kv_manager.snapshots) is not None and request.snapshot:
            blocks = request.snapshot_tokens // self.config.tokens_per_block
            if blocks <= len(request.block_keys):  # else a step in flight writes it
                pool.register(request.snapshot, request.block_keys[blocks - 1])
                self._named.append((pool, request.snapshot))
            pool.release([request.snapshot])
            request.snapshot = 0
        self.kv_manager.release(request)
        self.reserved_blocks -= request.reserved_blocks
        request.reserved_blocks = 0
        table.vacate(slot)


def _joined(first: Rows, second: Rows) -> Rows:
    return Rows(*(np.concatenate(pair) for pair in zip(first, second, strict=True)))


def _array(values: list[Any], empty: np.ndarray) -> np.ndarray:
    return np.array(values, np.int32) if values else empty
