# SPDX-License-Identifier: Apache-2.0
"""What must hold of the scheduler and its blocks whatever requests do. The engine checks it after every step
with the knob check_invariants, the tests always."""

from __future__ import annotations

import numpy as np

from flashinfer_backend.cache.groups import decoding_blocks
from flashinfer_backend.cache.pool import BlockPool
from flashinfer_backend.core.request import Held, Request
from flashinfer_backend.core.step import Feeds, StepPlan, Wants
from flashinfer_backend.scheduler.scheduler import Scheduler


class BrokenInvariantError(RuntimeError):
    """The scheduler's state contradicts itself: a block may hold what belongs to another sequence."""


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise BrokenInvariantError(sentence)


class InvariantChecker:
    """Follows one scheduler: `check_plan` for each plan before it is launched, `check` when a turn of the
    loop is over. Both raise BrokenInvariantError with a sentence that names what is wrong.

    It looks at every block and every token of what runs, some milliseconds a step in a large cache.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        config, slots = scheduler.config, scheduler.config.max_num_seqs
        # As on the device, which is only told of differences.
        columns = -(-config.max_seq_len // config.tokens_per_block) + 1
        groups = len(scheduler.kv_manager.pools)
        self._block_tables = np.zeros((groups, slots, columns), np.int32)
        self._verified: dict[int, int] = {}  # by handle: block keys that were found right
        self._remember()

    def check(self, in_flight: int) -> None:
        """Between two turns of the loop, with `in_flight` steps launched and not read."""
        self._check_requests()
        self._check_blocks()
        self._check_progress(in_flight)
        for request in self._scheduler.requests.values():
            self._check_keys(request)
        self._remember()

    def _remember(self) -> None:
        """How this check leaves the slots."""
        table = self._scheduler.table
        self._owners = list(table.requests)
        self._epoch, self._computed = table.epoch.copy(), table.computed.copy()

    def check_plan(self, plan: StepPlan) -> None:
        """A plan that `schedule` has just made."""
        scheduler, table = self._scheduler, self._scheduler.table
        config, slots = scheduler.config, plan.slots
        rows, ends = plan.num_rows, plan.starts + plan.lengths
        _require(0 < rows <= config.max_num_seqs, f"a plan has {rows} rows; 1..{config.max_num_seqs} fit")
        limit = config.max_num_tokens
        if plan.num_decodes and config.enable_chunked_context:
            limit = min(limit, config.max_num_tokens_while_decoding)
        _require(plan.num_tokens <= limit, f"a plan has {plan.num_tokens} tokens, and {limit} are allowed")
        given = plan.feeds == Feeds.GIVEN
        _require(
            int(plan.lengths[given].sum()) == len(plan.tokens),
            "a plan's given rows and tokens differ in number",
        )
        kinds = {Feeds.LAST: 0, Feeds.GIVEN: 1, Feeds.LAST_AND_DRAFTS: 2}
        order = [kinds[kind] for kind in plan.feeds]
        _require(order == sorted(order), f"a plan's rows are in the order {order}")
        _require(bool((plan.lengths > 0).all()), "a plan has a row without tokens")
        _require(len(np.unique(slots)) == rows, f"a slot has two rows in one plan: {slots.tolist()}")
        targets = plan.restored[:, 0]  # on a GPU, of two copies to one slot either can be the last
        _require(len(np.unique(targets)) == len(targets), f"a slot is restored twice: {targets.tolist()}")
        longer = (plan.lengths > 1).tolist()
        _require(longer == sorted(longer), "a longer row comes before one of length 1")
        _require(len(plan.epochs) == len(plan.sampling_rows), "a plan's epochs are not those of its samples")
        _require(
            np.array_equal(plan.epochs, table.epoch[plan.sample_slots]), "a plan names epochs that are over"
        )
        _require(
            np.array_equal(table.computed[slots], ends), "what a plan computes is not booked as computed"
        )
        self._enter_blocks(plan)
        ends_of_tokens = np.cumsum(plan.lengths * given)
        for row, slot in enumerate(slots.tolist()):
            request = table.requests[slot]
            _require(request is not None, f"a plan has a row for slot {slot}, which no sequence has")
            assert request is not None
            start, end = int(plan.starts[row]), int(ends[row])
            self._check_row(request, start, end)
            decodes, length, feeds = not given[row], end - start, plan.feeds[row]
            known = int(table.known[slot])
            if decodes:
                most = 1 + scheduler.drafts if feeds == Feeds.LAST_AND_DRAFTS else 1
                _require(
                    length <= most and (length > 1 or feeds == Feeds.LAST),
                    f"request {request.handle}: a decode row has {length} tokens",
                )
                last = len(request.prompt) + request.max_new - 1
                _require(end <= last, f"request {request.handle}: a row ends at {end}, the last is {last}")
                _require(start >= known - 1, f"request {request.handle}: a token that is known is decoded")
            else:
                tokens = plan.tokens[ends_of_tokens[row] - length : ends_of_tokens[row]]
                same = np.array_equal(tokens, table.tokens[slot, start:end])
                _require(
                    same and end <= known, f"request {request.handle}: a row has other tokens than its own"
                )
            samples = bool(plan.wants[row] & (Wants.NEXT_OF_EACH if length > 1 and decodes else Wants.NEXT))
            _require(
                samples == (decodes or end == known),
                f"request {request.handle}: a row that ends at {end} of {known} known tokens "
                + ("samples" if samples else "does not sample"),
            )
        for handle in plan.freed:
            _require(handle not in scheduler.requests, f"request {handle} is open, and told to be gone")

    def _enter_blocks(self, plan: StepPlan) -> None:
        group, slot, column, block = plan.block_updates.T
        in_table = (column >= 0) & (column < self._block_tables.shape[2]) & (block > 0)
        _require(bool(in_table.all()), "a plan enters a block outside of the block table, or block 0")
        self._block_tables[group, slot, column] = block
        for request in self._scheduler.running.values():
            for table, held in zip(self._block_tables, request.held, strict=True):
                told = table[request.slot, held.behind : len(held.blocks)].tolist()
                blocks = held.blocks[held.behind :]
                _require(
                    told == blocks,
                    f"request {request.handle} has blocks {blocks}, but the device is told {told}",
                )

    def _check_row(self, request: Request, start: int, end: int) -> None:
        """A row goes on where the last one ended, and has blocks for what it reads and writes."""
        slot, table = request.slot, self._scheduler.table
        size = self._scheduler.config.tokens_per_block
        old = self._owners[slot] is request and self._epoch[slot] == table.epoch[slot]
        begin = int(self._computed[slot]) if old else request.found_blocks * size
        _require(start == begin, f"request {request.handle}: a row starts at {start}, {begin} are computed")
        first = min(start, int(table.known[slot]) - 1)  # if all drafts that are not read are wrong
        for pool, held in zip(self._scheduler.kv_manager.pools, request.held, strict=True):
            columns = len(held.blocks)
            _require(
                end <= columns * size,
                f"request {request.handle}: a row writes {end} tokens to {columns} blocks",
            )
            _require(
                held.behind <= pool.behind(first // size),
                f"request {request.handle}: a row that starts at {first} reads blocks before column "
                f"{held.behind}, which were given back",
            )

    def _check_requests(self) -> None:
        """Each open request waits or runs, not both; a slot belongs to one sequence or is free."""
        scheduler, table = self._scheduler, self._scheduler.table
        waiting = list(scheduler.queue)
        handles = [request.handle for request in (*waiting, *scheduler.running.values())]
        _require(
            len(handles) == len(set(handles)) and set(handles) == scheduler.requests.keys(),
            f"open are the requests {sorted(scheduler.requests)}, but {sorted(handles)} wait or run",
        )
        queue, counted = scheduler.queue, (scheduler.queue.tokens, scheduler.queue.known_tokens)
        right = sum(len(r.prompt) + r.max_new for r in waiting), sum(r.num_tokens for r in waiting)
        _require(counted == right, f"the queue counts {counted} tokens, and those that wait have {right}")
        longest = max((r.max_new for r in waiting), default=0)
        _require(
            queue.longest == longest, f"the longest is {queue.longest}, and of those that wait {longest}"
        )
        for request in waiting:
            holds = request.slot >= 0 or request.held or request.reserved_blocks
            _require(not holds, f"request {request.handle} waits, and still holds a slot or blocks")
        # What has run before takes precedence; priorities are for the others.
        order = [(not r.first_scheduled_ns, 0 if r.first_scheduled_ns else r.priority) for r in waiting]
        _require(order == sorted(order), f"the queue is in the order {order}")
        timed = sorted((r.deadline_ns, r.handle) for r in waiting if r.deadline_ns)
        _require(
            timed == scheduler.queue._deadlines.handles(),
            f"deadlines are {scheduler.queue._deadlines.handles()}, but those of the queue {timed}",
        )
        begun = [r for r in scheduler.requests.values() if r.first_scheduled_ns and r.deadline_ns]
        _require(not begun, f"{len(begun)} requests that have begun may still be late")
        slots = [request.slot for request in scheduler.running.values()]
        for request in scheduler.running.values():
            owner = table.requests[request.slot] if request.slot >= 0 else None
            _require(
                owner is request, f"request {request.handle} runs, but slot {request.slot} is not its own"
            )
        free = list(table._free)
        _require(
            sorted(slots + free) == list(range(len(table.requests))),
            f"slots {sorted(slots)} are taken and {sorted(free)} free, of {len(table.requests)}",
        )
        owned = sum(request is not None for request in table.requests)
        _require(owned == len(slots), f"{owned} slots have an owner, {len(slots)} sequences run")

    def _check_blocks(self) -> None:
        """Every block is free, cached, or held by exactly the sequences whose tables name it."""
        scheduler, manager = self._scheduler, self._scheduler.kv_manager
        running = scheduler.running.values()
        if manager.snapshots is not None:
            kept = [request.snapshot for request in running if request.snapshot] + scheduler._saving
            held = np.bincount(np.array(kept, np.int64), minlength=manager.snapshots.num_blocks + 1)
            self._check_places(manager.snapshots, held, "snapshot")
            for request in running:
                named = request.snapshot in manager.snapshots._key_of
                _require(not named, f"request {request.handle} writes to a snapshot that others can find")
        for group, pool in enumerate(manager.pools):
            free = self._check_places(pool, self._holders(group, pool), "block")
            self._check_names(group, pool, free)
            committed = sum(request.held[group].committed for request in running)
            _require(
                committed == pool.committed <= pool.num_blocks,
                f"{committed} blocks are promised to sequences, {pool.committed} of {pool.num_blocks} in all",
            )
        reserved = sum(request.reserved_blocks for request in running)
        available = manager.full.available if manager.full else 0
        _require(
            reserved == scheduler.reserved_blocks <= available,
            f"{reserved} blocks are reserved by sequences, {scheduler.reserved_blocks} in all, "
            f"{available} are there",
        )

    def _check_places(self, pool: BlockPool, held: np.ndarray, what: str) -> np.ndarray:
        """Each is in one place, and held as often as the pool counts; how often each is free."""
        for block in (held != pool._references).nonzero()[0].tolist():
            count = int(pool._references[block])
            raise BrokenInvariantError(
                f"{what} {block} counts {count} holders, and {int(held[block])} sequences have it"
            )
        free = np.bincount(np.array(pool._free, np.int64), minlength=len(held))
        cached = np.zeros(len(held), np.int64)
        cached[list(pool._lru)] = 1
        places = free + cached + (held > 0)
        for block in (places[1:] != 1).nonzero()[0].tolist():
            raise BrokenInvariantError(
                f"{what} {block + 1} is free {free[block + 1]} times, cached {cached[block + 1]} times "
                f"and held by {held[block + 1]} sequences; it should be in one place"
            )
        _require(not places[0], f"{what} 0, which padding writes to, was given away")
        return free

    def _holders(self, group: int, pool: BlockPool) -> np.ndarray:
        """How many sequences have each block."""
        total = pool.num_blocks + 1
        count = np.zeros(total, np.int64)
        for request in self._scheduler.running.values():
            held = request.held[group]
            blocks = np.array(held.blocks[held.behind :], np.int64)
            inside = bool(((blocks > 0) & (blocks < total)).all())
            _require(inside, f"request {request.handle} has block 0, or one that does not exist")
            _require(
                len(np.unique(blocks)) == len(blocks),
                f"request {request.handle} has a block twice: {held.blocks[held.behind :]}",
            )
            count[blocks] += 1
        return count

    def _check_names(self, group: int, pool: BlockPool, free: np.ndarray) -> None:
        block_of, key_of = pool._block_of, pool._key_of
        _require(len(block_of) == len(key_of), f"{len(block_of)} keys name {len(key_of)} blocks")
        for block, key in key_of.items():
            _require(block_of.get(key) == block, f"block {block} has a key that finds {block_of.get(key)}")
            _require(not free[block], f"block {block} is free, and can still be found by its key")
        for block in pool._lru:
            _require(block in key_of, f"block {block} is cached without a key, so it cannot be found")
        for request in self._scheduler.running.values():
            named, keys, held = request.registered_blocks, request.block_keys, request.held[group]
            for index, block in enumerate(held.blocks):
                name = key_of.get(block) if index >= held.behind else None
                right = name is None or (index < min(named, len(keys)) and name == keys[index])
                _require(right, f"block {block} has not the key of what request {request.handle} has in it")

    def _check_progress(self, in_flight: int) -> None:
        """What was computed, read and planned of each sequence fits together, and each goes on."""
        scheduler, table = self._scheduler, self._scheduler.table
        size = scheduler.config.tokens_per_block
        reserves = scheduler.config.batch_scheduler_policy == "guaranteed_no_evict"
        decoding = scheduler.decoding.tolist()
        prefilling = {request.handle for request in scheduler.prefilling}
        _require(len(prefilling) == len(scheduler.prefilling), "a prompt is twice among those at work")
        _require(len(set(decoding)) == len(decoding), f"a slot is decoded twice: {decoding}")
        _require(prefilling <= scheduler.running.keys(), "a prompt is at work that does not run")
        expected = set()
        for request in scheduler.running.values():
            slot, name = request.slot, f"request {request.handle}"
            prompt, max_new = len(request.prompt), request.max_new
            known, computed = int(table.known[slot]), int(table.computed[slot])
            planned, read = int(table.planned_outputs[slot]), known - prompt
            needed = -(-max(request.num_tokens, computed) // size)
            # Those that rejected drafts would have needed are kept.
            most = -(-(max(request.num_tokens, computed) + 2 * scheduler.drafts) // size)
            columns = int(table.num_blocks[slot])
            _require(needed <= columns <= most, f"{name}: {columns} of {needed} blocks")
            for pool, held in zip(scheduler.kv_manager.pools, request.held, strict=True):
                chunks = pool.tail is not None and request.handle in prefilling
                right = -(-computed // size) if chunks else columns
                blocks = len(held.blocks)
                _require(blocks == right, f"{name} has {blocks} blocks for {computed} tokens, not {right}")
                self._check_window(request, pool, held, computed, known)
            total = -(-(prompt + max_new) // size)
            promised = max(0, total - columns) if reserves and scheduler.kv_manager.full else 0
            _require(request.reserved_blocks == promised, f"{name} has a reservation that is not its own")
            _require(
                request.registered_blocks <= computed // size,
                f"{name}: {request.registered_blocks} blocks can be found, {computed} tokens are computed",
            )
            _require(read < max_new, f"{name} has {read} of {max_new} tokens, and was not ended")
            if request.handle in prefilling:
                _require(computed < known, f"{name}: its prompt is computed, and at work")
                _require(planned == read, f"{name}: {planned} outputs are planned before its prompt is done")
                continue
            _require(computed == prompt + planned - 1, f"{name}: {computed} tokens for output {planned}")
            _require(
                0 <= planned - read <= in_flight * (1 + scheduler.drafts),
                f"{name}: {planned} outputs are planned and {read} read, with {in_flight} steps in flight",
            )
            if planned < max_new:
                expected.add(slot)
        _require(set(decoding) == expected, f"slots {decoding} are decoded, and {sorted(expected)} should be")

    def _check_window(self, request: Request, pool: BlockPool, held: Held, computed: int, known: int) -> None:
        """What is behind a window was given back, and nothing else."""
        name, size = f"request {request.handle}", self._scheduler.config.tokens_per_block
        if pool.tail is None:
            whole = held.behind == 0 == held.committed
            _require(whole, f"{name} has given back {held.behind} blocks that it still reads")
            return
        behind, columns = held.behind, len(held.blocks)
        most = pool.behind(min(computed, known - 1) // size)
        _require(
            behind <= most and not any(held.blocks[:behind]),
            f"{name} has given back the blocks before column {behind}, and reads those from {most} on",
        )
        decoding = decoding_blocks(pool.tail, size, self._scheduler.drafts)
        promise = min(decoding, -(-(len(request.prompt) + request.max_new) // size))
        right = max(promise, columns - behind)
        _require(
            held.committed == right, f"{name} counts {held.committed} blocks as its own, which are {right}"
        )
        late = request in self._scheduler._last_prompts
        _require(
            late or columns - behind <= promise,
            f"{name} holds {columns - behind} blocks of a window, and was promised {promise}",
        )

    def _check_keys(self, request: Request) -> None:
        """A request's keys are those of its tokens: what is found by them is what was computed of them."""
        manager, table = self._scheduler.kv_manager, self._scheduler.table
        count = len(request.block_keys)
        if self._verified.get(request.handle) == count:
            return
        running = request.slot >= 0
        tokens = table.tokens[request.slot, : table.known[request.slot]] if running else request.known_tokens
        own = b"" if manager.reuse else request.share_prompt_with.to_bytes(8, "little")
        root = own + request.cache_root
        right = manager.prefix_keys(tokens[: count * manager.block_size], 0, root)
        _require(
            request.block_keys == right, f"request {request.handle} has keys of other tokens than its own"
        )
        open_handles = self._scheduler.requests
        self._verified = {h: n for h, n in self._verified.items() if h in open_handles}
        self._verified[request.handle] = count
