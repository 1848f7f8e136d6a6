# SPDX-License-Identifier: Apache-2.0
"""Which blocks each sequence has in every cache group, and which prefixes all groups have.

The first group may keep whole sequences: the scheduler's policy says how far their blocks are promised, and
they can run out. A group with a window is bounded, as it keeps only what later tokens read. There a sequence
is promised the most that its decode steps can hold, and prompts' chunks get what else is left. So no sequence
is preempted for the sake of a window.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Protocol

import numpy as np

from flashinfer_backend.cache.groups import decoding_blocks
from flashinfer_backend.cache.pool import BlockPool
from flashinfer_backend.core.request import Held, Request


class CacheEvents(Protocol):
    """Told of what the prefix cache's first group comes to hold."""

    def stored(self, request: Request, column: int) -> None:
        """The block in a column of the request's has its key now."""


Update = tuple[int, int, int, int]  # group, slot, column of the slot's block table, block


class KVCacheManager:
    """Gives sequences blocks of each group's pool. All groups have blocks of `block_size` tokens."""

    def __init__(
        self,
        pools: Sequence[BlockPool],
        block_size: int,
        reuse: bool,
        snapshots: BlockPool | None = None,
        drafts: int = 0,
    ) -> None:
        """pools: by group, with that of the group without a window, if there is one, before the others.
        snapshots: of states, where layers keep some, by the key of the last block before each. drafts: how
        many tokens a decode row checks at most besides its own."""
        self.pools = list(pools)
        self.block_size = block_size
        self.reuse = reuse
        self.snapshots = snapshots
        self._drafts = drafts
        self.full = pools[0] if pools[0].tail is None else None
        self.events: CacheEvents | None = None
        self.windows = [(group, pool) for group, pool in enumerate(pools) if pool.tail is not None]

    def prefix_keys(self, tokens: np.ndarray, start: int = 0, parent: bytes = b"") -> list[bytes]:
        """Keys of the full blocks of `tokens` (int32 [n]) from block `start` on; `parent` is the
        key of block start - 1."""
        size, keys = self.block_size, []
        data = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
        for block in range(start, len(tokens) // size):
            parent = blake2b(
                parent + data[block * size * 4 : (block + 1) * size * 4], digest_size=16
            ).digest()
            keys.append(parent)
        return keys

    def count(self, keys: list[bytes]) -> tuple[int, int]:
        """The length in blocks of the longest prefix of `keys` that every group can serve, and how many of
        its blocks are available now in the group that keeps all."""
        known, unheld = (len(keys), 0) if self.full is None else self.full.count(keys)
        longest, before = known, -1
        while longest != before:  # a shorter one may end where another group lacks something
            before = longest
            for _, pool in self.windows:
                longest = pool.serves(keys, longest)
            if self.snapshots is not None:
                longest = self.snapshots.latest(keys, longest)
        if longest < known and self.full is not None:
            unheld = self.full.count(keys[:longest])[1]
        return longest, unheld

    def keep(self, keys: list[bytes]) -> None:
        """Have what serves the prefix `keys`, which count() found, evicted last."""
        for pool in self.pools:
            pool.keep(keys[pool.behind(len(keys)) :])
        if self.snapshots is not None:
            self.snapshots.keep(keys[-1:])

    def restore(self, keys: list[bytes]) -> int:
        """The snapshot of the prefix `keys`, which count() found. It is read before the step that is planned,
        so none that this step or a later one writes can be in its place by then."""
        assert self.snapshots is not None
        found = self.snapshots.match(keys[-1:])
        self.snapshots.release(found)
        return found[0]

    def save(self, key: bytes) -> int | None:
        """A snapshot to be written, which the caller holds; None where there is one, or no room."""
        assert self.snapshots is not None
        found = None if self.snapshots.count([key])[0] else self.snapshots.allocate(1)
        if found is None:
            return None
        self.snapshots.register(found[0], key)
        return found[0]

    def can_promise(self, request: Request, found: int, whole: bool) -> bool:
        """Whether the groups with windows have room for one more sequence, of which `found` blocks are in the
        cache. whole: and for all its known tokens in one step."""
        columns = -(-request.num_tokens // self.block_size)
        for _, pool in self.windows:
            needed = columns - pool.behind(found) if whole else 0
            if pool.committed + max(self._promise(request, pool), needed) > pool.num_blocks:
                return False
        return True

    def take(self, request: Request, keys: list[bytes], slot: int) -> list[Update]:
        """Give a request that comes to `slot` the blocks of `keys`, which count() found, and, in the group
        that keeps all, those of its other known tokens."""
        columns = -(-request.num_tokens // self.block_size)
        updates: list[Update] = []
        for group, pool in enumerate(self.pools):
            behind = pool.behind(len(keys))
            blocks = [0] * behind + pool.match(keys[behind:])
            assert len(blocks) == len(keys), "the prefix cache has less than it counted"
            request.held.append(Held(blocks, behind))
            if pool.tail is None:
                blocks += _allocate(pool, columns - len(keys))
            else:
                self._commit(request, group, len(blocks))
            updates += [(group, slot, column, blocks[column]) for column in range(behind, len(blocks))]
        return updates

    def fit_chunk(self, request: Request, start: int, length: int) -> int:
        """How many of `length` tokens of a prompt from `start` on the groups with windows have room for, at
        least one; and promise it."""
        size = self.block_size
        for group, pool in self.windows:
            held = request.held[group]
            free = pool.num_blocks - pool.committed + held.committed
            length = min(length, (held.behind + free) * size - start)
        assert length > 0, f"request {request.handle} is short of blocks which it was promised"
        for group, _ in self.windows:
            self._commit(request, group, -(-(start + length) // size))
        return length

    def open_windows(self, request: Request, end: int, slot: int) -> list[Update]:
        """Give a sequence blocks for its tokens up to `end`, in the groups with windows: those of a chunk
        that fit_chunk promised, or of its next decode row."""
        updates: list[Update] = []
        for group, pool in self.windows:
            blocks = request.held[group].blocks
            first = len(blocks)
            blocks += _allocate(pool, max(0, -(-end // self.block_size) - first))
            self._commit(request, group, len(blocks))
            updates += [(group, slot, column, blocks[column]) for column in range(first, len(blocks))]
        return updates

    def leave_behind(self, request: Request, position: int) -> None:
        """Give back the blocks that no token from `position` on reads, nor any from its block's start on:
        there the cached prefix ends when the sequence does. Steps in flight may still read them. Whatever
        writes to them next runs behind those in the device's stream."""
        for group, pool in self.windows:
            held = request.held[group]
            behind = min(pool.behind(position // self.block_size), len(held.blocks))
            if behind > held.behind:
                pool.release(held.blocks[held.behind : behind])
                held.blocks[held.behind : behind] = [0] * (behind - held.behind)
                held.behind = behind
            self._commit(request, group, len(held.blocks))

    def release(self, request: Request) -> None:
        """Give back all that a sequence has."""
        for pool, held in zip(self.pools, request.held, strict=True):
            pool.release(held.blocks[held.behind :])
            pool.committed -= held.committed
        request.held = []

    def register(self, request: Request, blocks: Iterable[int]) -> list[tuple[BlockPool, int]]:
        """Name the content of a sequence's `blocks`, given by their columns, by the request's keys, where it
        has not left them behind. Returns the pools and blocks."""
        named = []
        for column in blocks:
            for pool, held in zip(self.pools, request.held, strict=True):
                if column >= held.behind:
                    new = pool.register(held.blocks[column], request.block_keys[column])
                    named.append((pool, held.blocks[column]))
                    if new and self.events is not None and pool is self.pools[0]:
                        self.events.stored(request, column)
        return named

    def _promise(self, request: Request, pool: BlockPool) -> int:
        """The most blocks that the sequence's decode steps can hold of a group with a window."""
        assert pool.tail is not None
        most = -(-(len(request.prompt) + request.max_new) // self.block_size)
        return min(decoding_blocks(pool.tail, self.block_size, self._drafts), most)

    def _commit(self, request: Request, group: int, columns: int) -> None:
        """Count what the sequence will have of a group with a window, with `columns`."""
        pool, held = self.pools[group], request.held[group]
        committed = max(self._promise(request, pool), columns - held.behind)
        pool.committed += committed - held.committed
        held.committed = committed


def _allocate(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.allocate(count)
    assert blocks is not None, f"{count} blocks were promised, and {pool.available} are left"
    return blocks
