# SPDX-License-Identifier: Apache-2.0
"""Random walks over the engine's loop, scheduler and KV cache manager, every step checked:

    python tests/reliability/scheduler_walk.py --steps 1000000

Everything but the device is the engine's own. The device is a model of one: in the place of a token's keys
and values it keeps a number that depends on all tokens up to it, and its next token depends on that number.
So whatever a row reads can be compared with what it should read, and each answer is known beforehand.
Adapters are numbers where these begin: which one a place of the device has is compared with the request's.

A walk is a row of short episodes, each with settings, load and failures of its own seed. A failure names the
seed, and `--seed S --episodes 1` repeats it. tests/engine/test_scheduler_walk.py has short walks.
"""

from __future__ import annotations

import argparse
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import numpy as np

from client.arguments import integer
from flashinfer_backend.cache.groups import decoding_blocks, tail_blocks
from flashinfer_backend.cache.pool import BlockPool
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.request import Request
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.core.step import Feeds, StepOutput, StepPlan, Wants
from flashinfer_backend.core.tuned import Scheduling
from flashinfer_backend.engine import adapters as engine_adapters
from flashinfer_backend.engine import logits_room
from flashinfer_backend.engine.logits_room import LogitsRoom, Stage
from flashinfer_backend.engine.loop import EngineLoop
from flashinfer_backend.engine.preparations import Preparations
from flashinfer_backend.engine.start import Core
from flashinfer_backend.models.adapters import Adapter, AdapterError, State
from flashinfer_backend.scheduler import scheduler
from flashinfer_backend.scheduler.kv_cache_manager import KVCacheManager
from flashinfer_backend.scheduler.scheduler import Scheduler
from flashinfer_backend.transport import protocol
from flashinfer_backend.worker.runner import RowResults

VOCABULARY = 50
ADAPTERS, BROKEN = ("sql", "chat", "code"), "the adapter is broken, as it was told to"
SNAPSHOT_TOKENS = 6  # as of the scheduler, whose walks have short sequences
END_IDS = (7, 11)
STUBS = (101, 102)
QUIET = 3000  # turns in which all requests must have ended once nothing new comes
DAY_US = 86_400_000_000
MASK = (1 << 64) - 1


def step_hash(before: int, token: int) -> int:
    """The number that stands for the keys and values of a token behind those that `before` stands for."""
    return (before * 6364136223846793005 + token + 1442695040888963407) & MASK


@dataclass(kw_only=True)
class Settings:
    """What an episode runs with."""

    slots: int
    block: int
    blocks: int
    longest: int  # max_seq_len
    # Of groups with windows: tokens and blocks of each. full: there is a group without.
    windows: tuple[tuple[int, int], ...] = ()
    full: bool = True
    step_tokens: int
    busy_step_tokens: int
    reuse: bool = True
    chunked: bool = True
    reserves: bool = False
    longest_first: bool = False
    queue: int = 0
    prompts_together: int = 40
    filled_step: int = 8
    slow: bool = False  # steps take so long that streams take precedence
    drafts: int = 0
    right_drafts: float = 0.5  # how many of them are
    adapters: int = 0  # places for them
    snapshots: int = 0  # of states; 0: layers keep none

    def config(self) -> EngineConfig:
        return EngineConfig(
            model_dir="bundled",
            max_seq_len=self.longest,
            max_input_len=self.longest - 1 if self.chunked else min(self.longest - 1, self.step_tokens),
            max_num_seqs=self.slots,
            max_num_tokens=self.step_tokens,
            max_num_tokens_while_decoding=self.busy_step_tokens,
            tokens_per_block=self.block,  # type: ignore[arg-type]  # smaller ones make more of what may go wrong
            enable_kv_cache_reuse=self.reuse,
            enable_chunked_context=self.chunked,
            batch_scheduler_policy="guaranteed_no_evict" if self.reserves else "max_utilization",
            schedule_policy="lof" if self.longest_first else "fcfs",
            max_queue_size=self.queue,
            check_invariants=True,
            max_loras=self.adapters,
        )

    def numbers(self) -> Scheduling:
        return Scheduling(
            prompts_together=self.prompts_together,
            filled_step=self.filled_step,
            slow_step_ms=0 if self.slow else None,
        )

    @classmethod
    def drawn(cls, rng: random.Random) -> Settings:
        slots = rng.choice([1, 2, 3, 5, 8])
        block = rng.choice([2, 4, 4, 16])
        longest = rng.choice([12, 40, 90])
        busy = slots + rng.choice([0, 3, 30])
        least = -(-longest // block)  # as the engine's start sees to
        settings = cls(
            slots=slots,
            block=block,
            blocks=least + rng.choice([0, 1, least // 2, least * 2, least * slots]),
            longest=longest,
            step_tokens=busy + rng.choice([0, 5, 60]),
            busy_step_tokens=busy,
            reuse=rng.random() < 0.75,
            chunked=rng.random() < 0.75,
            reserves=rng.random() < 0.3,
            longest_first=rng.random() < 0.3,
            queue=rng.choice([0, 0, 0, 1, 4]),
            prompts_together=rng.choice([10, 40]) + rng.choice([0, 5]),
            filled_step=rng.choice([2, 8]) + rng.choice([0, 3]),
            slow=rng.choice([False, True]),
        )
        settings.full = rng.random() < 0.8
        settings.drafts, settings.right_drafts = rng.choice([0, 0, 1, 3]), rng.choice([0.2, 0.5, 0.9, 1.0])
        for _ in range(rng.choice([0, 0, 1, 1, 2]) if settings.full else 1):
            window = rng.choice([1, 2, 3, 5, 8, 9, 17, 33])
            decoding = decoding_blocks(tail_blocks(window, block), block, settings.drafts)
            enough = decoding + settings.step_tokens // block  # of one sequence
            few = min(settings.blocks, enough)
            settings.windows += ((window, rng.choice([few, few + 1, 2 * few, max(few, settings.blocks)])),)
        return settings


class AdapterState(NamedTuple):
    """An adapter, and how often its files were replaced."""

    folder: str
    version: int

    @property
    def files(self) -> State:
        return (self.version, 0), (0, 0)

    @property
    def root(self) -> bytes:
        return blake2b(repr((self.folder, self.files)).encode(), digest_size=16).digest()


@dataclass
class Asked:
    """A request and what must come of it."""

    prompt: list[int]
    params: SamplingParams
    room: int  # the most tokens of its answer
    tokens: np.ndarray  # int32: of the prompt, its whole answer, and some that may be computed beyond
    content: np.ndarray  # uint64: what the cache should hold for each
    answer: list[int]
    code: int  # that ends it
    adapter: AdapterState | None = None
    alone: Any = None  # of a walk of a real model
    got: list[int] = field(default_factory=list)
    ended: str = ""


def expected(
    prompt: list[int],
    params: SamplingParams,
    longest: int,
    end_ids: Collection[int],
    adapter: AdapterState | None = None,
    following: list[int] | None = None,
) -> Asked:
    """following: the model's tokens; None: those of the model of a device."""
    room = min(params.max_tokens, longest - len(prompt))
    tokens, content, state = list(prompt), [], 0
    if adapter is not None:
        state = int.from_bytes(adapter.root[:8], "big")
    for token in prompt:
        state = step_hash(state, token)
        content.append(state)
    for n in range(room + 2):  # a step may run beyond the end before that is known
        if following is None:
            tokens.append((state >> 33) % VOCABULARY)
        else:
            tokens.append(following[n] if n < len(following) else 0)
        state = step_hash(state, tokens[-1])
        content.append(state)
    answer: list[int] = []
    code = protocol.FINISHED_LENGTH
    for token in tokens[len(prompt) : len(prompt) + room]:
        count = len(answer) + 1
        other = params.end_id in end_ids and token in end_ids and count > params.min_tokens
        if token == params.end_id or other:
            code = protocol.FINISHED_END_ID
            break
        answer.append(token)
        if any(answer[-len(stop) :] == stop for stop in params.stop_sequences):
            code = protocol.FINISHED_STOP_WORDS
            break
    known = np.array(tokens, np.int32), np.array(content, np.uint64)
    return Asked(prompt, params, room, *known, answer, code, adapter)


class World:
    """A loop with its device and its clients. Events are methods; each turn of the loop is checked."""

    tells_prompts = True  # the device tells the tokens themselves in the place of their log probabilities
    patience_s = 0.002  # of requests that wait for an adapter's place

    def __init__(self, settings: Settings, seed: int) -> None:
        """seed: of what the device does and when."""
        self.settings = settings
        self.rng, self.load_rng = random.Random(seed), random.Random(~seed)
        self.versions: Counter[str] = Counter()  # of adapters, by folder
        self.coming: dict[int, tuple[str, Future[Adapter]]] = {}  # folders, by place
        self.there: dict[int, AdapterState | None] = {}  # by place
        self.inbox: list[protocol.ToEngine] = []
        self.asked: dict[int, Asked] = {}  # open requests by handle
        self.held: list[int] = []  # handles of those that have ended, whose logits the clients hold
        self.leaving: set[int] = set()  # whose stub has said goodbye, which the engine has not read
        self.lost: set[int] = set()  # whose stub has connected anew
        self.sizes: dict[int, tuple[int, int]] = {}  # by handle: bytes of all logits, and of the prompt's
        self.timed: set[int] = set()  # handles of requests with a timeout
        self.next_id = 1
        self.named: dict[bytes, int] = {}  # by key of a block: what its last place should hold
        self.failing = ""  # how the next step fails
        self.wrong: list[str] = []  # that the device found; raised there, it would be one more failing step
        self.counts: Counter[str] = Counter()
        self.pid, self.closed = 1, False  # what the loop asks of a socket
        core = self._start()
        self.scheduler, vocabulary = core.scheduler, core.spec.vocab_size
        self.loop = EngineLoop(core, self)  # type: ignore[arg-type]
        # Two of the longest prompts, of which one in ten asks for logits, and one of these at a time.
        self.row = 4 * vocabulary  # bytes of a token's logits
        self.room, self.turn = 2 * self.row * settings.longest, self.row * settings.longest
        with mock.patch.object(logits_room, "STEP_BYTES", self.turn):
            self.loop.logits = LogitsRoom(self.room, vocabulary)
        line = [self.loop.adapters, self.loop.logits]
        self.loop.preparations = Preparations(line, self.scheduler, self.loop._refuse)
        self.loop.pacer.deadline = lambda *_: 0.0  # type: ignore[method-assign]  # there is no time in a walk

    def _start(self) -> Core:
        """The engine without its transport."""
        settings = self.settings
        config = settings.config()
        pools = [BlockPool(settings.blocks + 1)] if settings.full else []
        pools += [BlockPool(n + 1, tail_blocks(w, settings.block)) for w, n in settings.windows]
        snapshots = BlockPool(settings.snapshots + 1) if settings.snapshots else None
        own = settings.block, settings.reuse, snapshots, settings.drafts
        manager = KVCacheManager(pools, *own)
        with mock.patch.object(scheduler, "SNAPSHOT_TOKENS", SNAPSHOT_TOKENS):
            made = Scheduler(config, manager, END_IDS, settings.numbers(), drafts=settings.drafts)
        model_config = SimpleNamespace(
            vocab_size=VOCABULARY, longest_seq_len=config.max_seq_len, eos_token_ids=END_IDS, pooling=None
        )
        self.device, self.others = SimpleNamespace(type="cpu"), None  # what the loop asks of a runner
        self.adapter_of = [-1] * settings.slots  # places
        columns = -(-settings.longest // settings.block) + 1
        self.windows = [*[settings.longest] * settings.full, *(window for window, _ in settings.windows)]
        self.block_tables = np.zeros((len(pools), settings.slots, columns), np.int64)
        self.last_token = np.zeros(settings.slots, np.int32)
        self.lengths = np.zeros(settings.slots, np.int64)
        self.caches = [np.zeros((pool.num_blocks + 1, settings.block), np.uint64) for pool in pools]
        self.states = np.zeros(settings.slots, np.uint64)
        self.snapshots = np.zeros(settings.snapshots + 1, np.uint64)
        return Core(config, model_config, made, self)  # type: ignore[arg-type]

    # The clients.

    def submit(
        self,
        stub: int,
        prompt: list[int],
        params: SamplingParams,
        sequences: int = 1,
        priority: int = 0,
        timed: bool = False,
    ) -> None:
        """One request for so many sequences. timed: they may wait for a day, which `hours_pass` brings."""
        timeout_us = DAY_US if timed else 0
        first = protocol.make_handle(stub, self.next_id)
        for _ in range(sequences):
            handle = protocol.make_handle(stub, self.next_id)
            self.next_id += 1
            own = msgspec.structs.replace(params)
            adapter = AdapterState(own.adapter, self.versions[own.adapter]) if own.adapter else None
            self.asked[handle] = self._expected(prompt, own, adapter)
            rows = own.logits_rows(len(prompt), self.asked[handle].room)
            self.sizes[handle] = self.row * rows, self.row * len(prompt)
            share = first if sequences > 1 else 0
            self._name(self.asked[handle], share)
            self.timed |= {handle} if timed else set()
            data = np.array(prompt, "<i4").tobytes()
            self.inbox.append(protocol.Submit(handle, data, own, share, priority, timeout_us))
        self.counts["requests"] += sequences

    def _expected(self, prompt: list[int], params: SamplingParams, adapter: AdapterState | None) -> Asked:
        return expected(prompt, params, self.settings.longest, END_IDS, adapter)

    def _name(self, asked: Asked, share: int) -> None:
        """Note which content each key of the request stands for."""
        manager, size = self.scheduler.kv_manager, self.settings.block
        parent = b"" if manager.reuse else share.to_bytes(8, "little")
        parent += b"" if asked.adapter is None else asked.adapter.root
        keys = manager.prefix_keys(asked.tokens, 0, parent)
        self.named.update(zip(keys, asked.content[size - 1 :: size].tolist(), strict=False))

    def cancel(self, handle: int) -> None:
        self.inbox.append(protocol.Cancel(handle))
        self.counts["cancels"] += 1

    def hours_pass(self) -> None:
        """Whoever waits with a timeout, and never ran, has waited too long."""
        self.loop._refuse_late(time.monotonic_ns() + 2 * DAY_US * 1000)
        waiting = [*self.scheduler.queue, *self.loop.logits, *self._for_adapters]
        left = [r.handle for r in waiting if r.handle in self.timed and not r.first_scheduled_ns]
        assert not left, f"requests {left} are late, and still wait"

    @property
    def _for_adapters(self) -> list[Request]:
        """Those that wait for their adapter."""
        return [request for request, _ in self.loop.adapters.entries]

    def replace_adapter(self, folder: str) -> None:
        """Its files are others, for requests that come from now on."""
        new = [each.params.adapter for each in self.inbox if isinstance(each, protocol.Submit)]
        if folder not in new + self.loop.adapters.waiting:
            self.versions[folder] += 1
            self.counts["replaced adapters"] += 1

    def leave(self, stub: int) -> None:
        """A stub ends, with all that is open of it."""
        self.inbox.append(protocol.Goodbye(stub))
        self.leaving |= {handle for handle in self.asked if handle >> 32 == stub}
        self.asked = {h: asked for h, asked in self.asked.items() if h not in self.leaving}
        self.counts["stubs that left"] += 1

    def connect_anew(self, stub: int) -> None:
        """A stub has lost its link, and with it all that is open of it: it hears nothing more of that."""
        mine = [handle for handle in self.asked if handle >> 32 == stub]
        order = [protocol.Hello(stub), *map(protocol.Cancel, mine)]
        self.inbox += order if self.rng.random() < 0.5 else order[1:] + order[:1]  # of two sockets
        self.lost.update(mine)
        for handle in mine:
            self._forget(handle)
        self.counts["links that were made anew"] += 1

    def step(self) -> None:
        """One turn of the loop; the engine's own check of all invariants is part of it."""
        # Its adapters have no folders.
        own = {"adapter_state": self._files, "_why": lambda _, why: why, "PATIENCE_S": self.patience_s}
        with mock.patch.multiple(engine_adapters, **own):
            assert self.loop.step()
        self._end_loads()
        assert not self.wrong, self.wrong
        self._check_room()
        self._check_cache()
        self.counts["steps"] += 1

    def _check_cache(self) -> None:
        """What can be found is what its key says."""
        for pool, cache in zip(self.scheduler.kv_manager.pools, self.caches, strict=True):
            used = pool.num_blocks - pool.available
            assert used + pool.cached + len(pool._free) == pool.num_blocks
            for block, key in pool._key_of.items():
                found = self.named.get(key) == cache[block, -1]
                assert found, f"block {block} can be found by a key of other tokens than it holds"
        if (pool := self.scheduler.kv_manager.snapshots) is not None:
            for snapshot, key in pool._key_of.items():
                found = self.named.get(key) == self.snapshots[snapshot]
                assert found, f"snapshot {snapshot} can be found by a key of other tokens than it holds"

    def _check_room(self) -> None:
        """What the scheduler has is counted, what waits it has not, and nobody waits where there is room."""
        room, open_ = self.loop.logits, self.scheduler.requests
        stages = room.stages
        by_stage: dict[Stage, list[int]] = {stage: [] for stage in Stage}
        for handle, stage in stages.items():
            by_stage[stage].append(handle)
        for request in open_.values():
            right: set[Stage | None] = (
                {Stage.HELD} if request.first_token_ns else {Stage.COMPUTING, Stage.HELD}
            )
            right = right if request.params.asks_for_logits else {None}
            found = stages.get(request.handle)
            assert found in right, f"request {request.handle} runs, and its logits have the stage {found!r}"
        for_room, for_turn = by_stage[Stage.WAITS_FOR_ROOM], by_stage[Stage.WAITS_FOR_TURN]
        ready = by_stage[Stage.READY]  # only one whose turn came in this step: it has waited for it
        waiting = {request.handle: request for request in room}
        assert len(room) == len(waiting) and waiting.keys() == {*for_room, *for_turn, *ready} - open_.keys()
        has = [*for_turn, *ready, *by_stage[Stage.COMPUTING], *by_stage[Stage.HELD]]
        turns = sum(self.sizes[handle][1] for handle in [*ready, *by_stage[Stage.COMPUTING]])
        assert room.held == sum(self.sizes[handle][0] for handle in has) <= self.room
        assert turns <= self.turn
        for line, which, left in ((for_room, 0, self.room - room.held), (for_turn, 1, self.turn - turns)):
            if line:
                first = min(line, key=lambda handle: waiting[handle].priority)
                assert self.sizes[first][which] > left, f"request {first} waits, and there is room"
        self.counts["waits for room"] += len(for_room)
        self.counts["waits for a turn"] += len(for_turn)

    def drain(self) -> None:
        """Until all has ended; then nothing may be held."""
        for _ in range(QUIET):
            self.free()
            waiting = len(self.loop.preparations)
            left = self.inbox or self.scheduler.requests or self.loop.in_flight or waiting
            if not left:
                break
            self.step()
        assert not self.asked, f"without an end after {QUIET} steps: {list(self.asked)}"
        idle = self.scheduler
        assert not idle.requests and not idle.running and not len(idle.queue)
        assert not idle.prefilling and not len(idle.decoding) and not idle.queue.tokens
        snapshots = idle.kv_manager.snapshots
        for pool in [*idle.kv_manager.pools, *([] if snapshots is None else [snapshots])]:
            assert pool.available == pool.num_blocks and not pool.committed
        assert not idle.reserved_blocks
        assert idle.table.free == self.settings.slots and not self.loop.logits.stages
        assert not self.loop.logits.held
        self.counts["preemptions"] += idle.preemptions
        self.counts["prompt tokens"] += idle.prompt_tokens
        self.counts["prompt tokens from the cache"] += idle.prompt_tokens_reused

    def _forget(self, handle: int) -> Asked | None:
        asked = self.asked.pop(handle, None)
        if asked is not None and asked.params.asks_for_logits:
            self.held.append(handle)
        return asked

    def free(self) -> None:
        """The clients give back the logits that they hold."""
        self.inbox += [protocol.Freed(handle) for handle in self.held]
        self.held.clear()

    # The socket.

    def receive(self, timeout_ms: int, until: float) -> list[protocol.ToEngine]:
        messages, self.inbox = self.inbox, []
        return messages

    def send_tokens(self, pid: int, frame: bytes, reports: Any) -> None:
        told = {each.local_id: each.prompt_log_probs for each in reports or [] if each.prompt_log_probs}
        for local_id, token, code in protocol.unpack_tokens(frame).tolist():
            handle = protocol.make_handle(pid, local_id)
            if handle in self.leaving or handle in self.lost:
                continue
            asked = self.asked.get(handle)
            assert asked is not None, f"request {handle} hears something after its end"
            if code != protocol.FINISHED_CANCELLED and not asked.got and self.tells_prompts:
                wanted = asked.params.prompt_log_probs is not None and len(asked.prompt) > 1
                following = np.array(asked.prompt[1:], "<i4").tobytes() if wanted else None
                assert told.get(local_id) == following, f"request {handle} is told of another prompt"
            if token != protocol.NO_TOKEN:
                asked.got.append(token)
            right = asked.got == asked.answer[: len(asked.got)]
            assert right, f"request {handle} got {asked.got} of {asked.answer}"
            if code == protocol.RUNNING:
                assert token != protocol.NO_TOKEN
                continue
            if code == protocol.FINISHED_CANCELLED:
                self.counts["cancelled"] += 1
            else:
                assert asked.got == asked.answer and code == asked.code, (handle, asked, code)
                self.counts["whole answers"] += 1
            self._forget(handle)

    def send_failure(self, failure: protocol.Failure) -> None:
        if failure.handle in self.leaving or failure.handle in self.lost:
            return
        asked = self._forget(failure.handle)
        assert asked is not None, f"request {failure.handle} fails after its end: {failure.message}"
        if failure.refused and failure.message.startswith("Request timeout expired"):
            assert failure.handle in self.timed and not asked.got
            self.counts["late"] += 1
        elif failure.refused and failure.message == BROKEN:
            assert asked.adapter is not None and not asked.got
            self.counts["broken adapters"] += 1
        elif failure.refused:
            assert self.settings.queue and failure.message.startswith("Maximum queue size"), failure
            assert not asked.got
            self.counts["refused"] += 1
        else:
            assert "as it was told to" in failure.message, failure
            self.counts["failed"] += 1

    def send_status(self, status: protocol.Status) -> None:
        assert status.blocks_used + status.blocks_cached <= status.blocks_total

    def forget(self, pid: int) -> None:
        self.leaving = {handle for handle in self.leaving if handle >> 32 != pid}

    # The device.

    def settle(self) -> None:
        """All of a step is done at its launch."""

    def launch(
        self,
        plan: StepPlan,
        started: Callable[[], object],
        between_layers: Callable[[], object],
        tokens_wanted: Callable[[], object],
    ) -> Any:
        failing, self.failing = self.failing, ""
        if failing == "before":
            self.counts["failed steps"] += 1
            raise RuntimeError("the step fails as it was told to")
        group, slot, column, block = plan.block_updates.T
        self.block_tables[group, slot, column] = block
        for slot, place in plan.adapters.tolist():
            self.adapter_of[slot] = place
        for slot, snapshot in plan.restored.tolist():
            self.states[slot] = self.snapshots[snapshot]
        self.counts["restored states"] += len(plan.restored)
        own = [self.adapter_of[slot] for slot in plan.slots.tolist()]
        if plan.adapted != any(place >= 0 for place in own):
            self.wrong.append(f"the step is of adapters: {plan.adapted}, and its rows have {own}")
        # Some may turn out to have ended while the step is launched.
        owners = [self.scheduler.table.requests[slot] for slot in plan.slots.tolist()]
        asked = [self.asked[request.handle] for request in owners if request is not None]
        started()
        ends = np.cumsum(plan.lengths * (plan.feeds == Feeds.GIVEN))
        half = plan.num_rows // 2
        tokens: list[list[int]] = []  # of each sampling row
        for row in range(plan.num_rows):
            if failing == "amid" and row == half:
                self.counts["failed steps"] += 1
                raise RuntimeError("the step fails as it was told to")
            tokens += self._compute(
                plan, row, asked[row], plan.tokens[ends[row] - plan.lengths[row] : ends[row]]
            )
            if row == half:
                between_layers()
        for slot, snapshot in plan.saved.tolist():
            self.snapshots[snapshot] = self.states[slot]
        failed = []
        if failing == "row":
            self.counts["failed rows"] += 1
            failed = [(self.rng.randrange(plan.num_rows), "the row fails as it was told to")]
        logits = [
            (row, np.zeros((plan.lengths[row], VOCABULARY), np.float32)) for row in plan.logits_rows.tolist()
        ]
        told = [(row, np.frombuffer(following, "<i4")) for row, _, following in plan.told]
        results = RowResults(logits, told, failed)
        return SimpleNamespace(plan=plan, download=self, tokens=tokens, results=results)

    def load_adapter(self, place: int, folder: str) -> Future[Adapter]:
        """As AdapterLoader.load."""
        users = [r.handle for r in self.scheduler.requests.values() if r.adapter == place]
        if users or place in self.coming:
            self.wrong.append(f"place {place} is given to {folder}, and {users or 'a load'} has it")
        self.there[place] = None
        self.coming[place] = folder, Future()
        self.counts["loads"] += 1
        return self.coming[place][1]

    def _files(self, folder: Path) -> State:
        return AdapterState(str(folder), self.versions[str(folder)]).files

    def _end_loads(self) -> None:
        """Loads end at any time; some fail."""
        for place, (folder, future) in [*self.coming.items()]:
            if self.load_rng.random() < 0.3:
                del self.coming[place]
                if self.load_rng.random() < 0.1:
                    future.set_exception(AdapterError(BROKEN))
                    continue
                self.there[place] = found = AdapterState(folder, self.versions[folder])
                future.set_result(Adapter(Path(folder), found.files, 1, ()))

    @property
    def done(self) -> bool:
        """Of a download: steps end at any time."""
        return self.rng.random() < 0.5

    def read(self, launched: Any) -> StepOutput:
        each = launched.tokens
        counts = np.array([len(tokens) for tokens in each]) if len(launched.plan.drafted_rows) else None
        accepted = sum(map(len, each)) - len(each)
        self.counts["accepted drafts, windows" if self.settings.windows else "accepted drafts"] += accepted
        return StepOutput(np.array([token for tokens in each for token in tokens], np.int32), counts)

    def _compute(self, plan: StepPlan, row: int, asked: Asked, tokens: np.ndarray) -> list[list[int]]:
        """The row's tokens if it samples: a list of them, else none."""
        slot, start, length = int(plan.slots[row]), int(plan.starts[row]), int(plan.lengths[row])
        place = self.adapter_of[slot]
        there = self.there[place] if place >= 0 else None
        if there != asked.adapter or (place >= 0 and there is None):
            self.wrong.append(f"slot {slot} has the adapter {there}, not {asked.adapter}")
        self.counts["rows with adapters"] += place >= 0
        if plan.feeds[row] == Feeds.GIVEN:
            self.lengths[slot] = start
        elif self.lengths[slot] > start or (not self.settings.drafts and self.lengths[slot] < start):
            self.wrong.append(f"slot {slot} is at {self.lengths[slot]}, and planned to be at {start}")
        start = int(self.lengths[slot])
        end, right = start + length, 0  # right: drafts before the first wrong one
        fed = asked.tokens[start:end].copy()
        if plan.feeds[row] != Feeds.GIVEN:
            tokens = self.last_token[slot : slot + 1]
            while right < length - 1 and self.rng.random() < self.settings.right_drafts:
                right += 1
            fed[1 + right :] = (fed[1 + right :] + 1) % VOCABULARY
        if not np.array_equal(tokens, fed[: len(tokens)]):
            self.wrong.append(f"slot {slot} is fed {tokens} at {start}, not {fed}")
        content = asked.content[start:end].copy()
        for i in range(1 + right, length if plan.feeds[row] != Feeds.GIVEN else 0):
            content[i] = step_hash(int(content[i - 1]), int(fed[i]))
        if self.settings.snapshots:
            if start and self.states[slot] != asked.content[start - 1]:
                self.wrong.append(f"slot {slot} goes on from another state than its own at {start}")
            for at, tokens_before, snapshot in plan.cuts.tolist():
                if at == row:
                    self.snapshots[snapshot] = content[tokens_before - 1]
                    self.counts["states kept within a row"] += 1
            # Drafts behind the first wrong one do not enter it.
            self.states[slot] = content[-1 if plan.feeds[row] == Feeds.GIVEN else right]
        places = np.arange(start, end)
        size = self.settings.block
        for cache, blocks, window in zip(self.caches, self.block_tables[:, slot], self.windows, strict=True):
            if not blocks[places // size].all():
                self.wrong.append(f"slot {slot} writes to block 0")
            cache[blocks[places // size], places % size] = content
            seen = np.arange(max(0, start - window + 1), start)
            read = cache[blocks[seen // size], seen % size]
            wrong = seen[read != asked.content[seen]]
            if len(wrong):
                self.wrong.append(f"slot {slot} reads what is not its own at {wrong.tolist()}")
        if plan.feeds[row] == Feeds.GIVEN:
            self.lengths[slot] = end
            if not plan.wants[row] & Wants.NEXT:
                return []
            sampled = asked.tokens[end : end + 1]
        else:
            sampled = asked.tokens[start + 1 : start + 2 + right]
            self.lengths[slot] = start + len(sampled)
        self.last_token[slot] = sampled[-1]
        return [sampled.tolist()]


MakeWorld = Callable[[Settings, int], World]


class Load:
    """Draws what happens in an episode."""

    def __init__(self, seed: int, make: MakeWorld) -> None:
        self.rng = rng = random.Random(seed)
        self.adapters = random.Random(~seed)  # of what has to do with them
        settings = Settings.drawn(rng)
        settings.adapters = self.adapters.choice([0, 0, 1, 2])
        settings.snapshots = self.adapters.choice([0, 1, 4, 20])
        self.world = make(settings, seed)
        limit = self.world.loop.config.max_input_len
        self.prefixes = [self._tokens(rng.randint(1, limit)) for _ in range(3)]
        # Weights of: submit, cancel, leave, fail, hours.
        self.weights = rng.choice(
            [(8, 1, 0, 0, 0), (50, 20, 5, 3, 2), (9, 0, 0, 0, 0), (6, 2, 1, 4, 1), (30, 20, 0, 1, 0)]
        )
        self.priorities = rng.choice([[0], [0], [0, 0, -4, 1, 4]])
        self.rate = rng.choice([0.05, 0.1, 0.3, 1.0])
        self.frees = rng.choice([0.1, 1.0])  # how often clients do, of steps

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCABULARY) for _ in range(count)]

    def run(self, steps: int) -> Counter[str]:
        rng, world = self.rng, self.world
        for _ in range(steps):
            for _ in range(int(self.rate) + (rng.random() < self.rate % 1)):
                self._event()
            if rng.random() < self.frees:
                world.free()
            world.step()
        world.drain()
        return world.counts

    def _event(self) -> None:
        rng, world = self.rng, self.world
        if world.settings.adapters and self.adapters.random() < 0.03:
            world.replace_adapter(self.adapters.choice(ADAPTERS))
        kind = rng.choices(["submit", "cancel", "leave", "fail", "hours"], self.weights)[0]
        if kind == "submit" and len(world.asked) < 60:
            sequences, priority = rng.choice([1, 1, 1, 2, 4]), rng.choice(self.priorities)
            timed = rng.random() < 0.3
            world.submit(rng.choice(STUBS), self._prompt(), self._params(), sequences, priority, timed)
        elif kind == "cancel" and world.asked:
            world.cancel(rng.choice([*world.asked, 12345]))
        elif kind == "leave" and rng.random() < 0.2:
            rng.choice([world.leave, world.connect_anew])(rng.choice(STUBS))
        elif kind == "hours":
            world.hours_pass()
        elif kind == "fail":
            world.failing = rng.choice(["before", "amid", "row"])

    def _prompt(self) -> list[int]:
        rng, limit = self.rng, self.world.loop.config.max_input_len
        if rng.random() < 0.4:
            return self._tokens(rng.randint(1, min(limit, rng.choice([3, 20, 90]))))
        prefix = rng.choice(self.prefixes)
        kept = prefix[: rng.choice([len(prefix), rng.randint(1, len(prefix))])]
        return (kept + self._tokens(rng.choice([0, 0, 1, 6])))[:limit]

    def _params(self) -> SamplingParams:
        rng = self.rng
        return SamplingParams(
            max_tokens=rng.choice([1, 5, 90, rng.randint(1, 90)]),
            end_id=rng.choice([-1, -1, 3, *END_IDS]),
            stop_sequences=rng.choice([[], [], [[5]], [[2, 3], [9]]]),
            context_logits=rng.random() < 0.1,
            prompt_log_probs=0 if self.adapters.random() < 0.08 else None,
            generation_logits=rng.random() < 0.1,
            frequency_penalty=rng.choice([0.0, 0.0, 0.5]),
            adapter=self.adapters.choice(["", *ADAPTERS]) if self.world.settings.adapters else "",
        )


def walk(
    steps: int, seed: int, episodes: int | None = None, length: int = 400, make: MakeWorld = World
) -> Counter[str]:
    """At least so many steps in episodes of about `length`; or so many episodes. Raises AssertionError with
    the episode's seed at the first thing that is wrong."""
    counts: Counter[str] = Counter()
    while counts["steps"] < steps if episodes is None else counts["episodes"] < episodes:
        try:
            counts += Load(seed, make).run(length)
        except Exception as error:
            raise AssertionError(f"--seed {seed} --episodes 1 --length {length}: {error}") from error
        counts["episodes"] += 1
        seed += 1
    return counts


def run(
    walk_one: Callable[[str, argparse.Namespace], Counter[str]],
    steps: int,
    length: int,
    kinds: Sequence[str] = (),
) -> None:
    """A walk, or one of each kind, as the command line asks for it, and what happened in each. steps, length:
    unless it says others."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Random walks, every step checked.")
    if kinds:
        parser.add_argument("--kinds", nargs="+", default=kinds)
    parser.add_argument("--steps", type=integer(1), default=steps, help="of each walk")
    parser.add_argument("--seed", type=integer(0), default=1, help="of the first episode")
    parser.add_argument("--episodes", type=integer(1), help="so many, instead of steps")
    parser.add_argument("--length", type=integer(1), default=length, help="steps until it only drains")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)  # the loop logs each failed step
    for kind in options.kinds if kinds else ["scheduler"]:
        began = time.monotonic()
        counts = walk_one(kind, options)
        print(f"{kind}, seed {options.seed}, {time.monotonic() - began:.0f} s")
        print(*(f"{count:>9} {name}" for name, count in sorted(counts.items())), sep="\n")


if __name__ == "__main__":
    run(lambda _, own: walk(own.steps, own.seed, own.episodes, own.length), steps=1_000_000, length=400)
