# SPDX-License-Identifier: Apache-2.0
"""The blocks of one cache group: which are held, which hold a reusable prefix, which go next.

A block is in exactly one place: held (reference count > 0), in `_free` (nothing of use in it),
or in `_lru` (no holder, but registered content). Content is named by a digest over the whole
prefix up to and including the block, so a key never depends on another block's fate.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class BlockPool:
    """Allocates blocks 1..num_blocks-1; block 0 is the dummy that padded rows write to."""

    def __init__(self, num_blocks: int, tail: int | None = None) -> None:
        """tail: how many blocks in front of a block its tokens read, which a window bounds
        (CacheGroup.tail); None: all of them."""
        self.num_blocks = num_blocks - 1
        self.tail = tail
        self.committed = 0  # of a group with a window: blocks that running sequences hold or were promised
        self._references = [0] * num_blocks  # a numpy array takes 15 times as long, one by one
        self._free = list(range(num_blocks - 1, 0, -1))
        self._lru: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self.on_removed: Callable[[bytes], object] | None = None  # told of keys that no block has any more

    @property
    def available(self) -> int:
        """Blocks that an allocation can have, cached ones included."""
        return len(self._free) + len(self._lru)

    @property
    def cached(self) -> int:
        """Blocks without a holder whose content can be reused."""
        return len(self._lru)

    def behind(self, block: int) -> int:
        """How many blocks of a sequence its tokens from `block` on do not read."""
        return 0 if self.tail is None else max(0, block - self.tail)

    def has(self, key: bytes) -> bool:
        return key in self._block_of

    def match(self, keys: list[bytes]) -> list[int]:
        """Blocks that hold the longest known prefix of `keys`. The caller now holds each."""
        blocks = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            if self._references[block] == 0:
                del self._lru[block]
            self._references[block] += 1
            blocks.append(block)
        return blocks

    def count(self, keys: list[bytes]) -> tuple[int, int]:
        """How many blocks match(keys) would give, and how many of these are available now; holds none."""
        known = unheld = 0
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            known += 1
            unheld += block in self._lru
        return known, unheld

    def serves(self, keys: list[bytes], most: int) -> int:
        """The length in blocks, at most `most`, of the longest prefix whose next token can be computed: its
        last `tail` blocks are known."""
        assert self.tail is not None
        length, block = most, most - 1
        while block >= 0 and length - block <= self.tail:
            if keys[block] not in self._block_of:
                length = block
            block -= 1
        return length

    def latest(self, keys: list[bytes], most: int) -> int:
        """How many of the first `most` keys there are up to the last one that is known: of snapshots, each of
        which stands for all of a prefix."""
        return next((n for n in range(most, 0, -1) if keys[n - 1] in self._block_of), 0)

    def keep(self, keys: list[bytes]) -> None:
        """Have the blocks of `keys`, all of which are known, evicted last: a request waits for them."""
        for key in reversed(keys):
            block = self._block_of[key]
            if block in self._lru:
                self._lru.move_to_end(block)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with undefined content, or None (and no change) if there are too few."""
        if count > self.available:
            return None
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._lru.popitem(last=False)
                self._drop(self._key_of.pop(block))
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def register(self, block: int, key: bytes) -> bool:
        """Name a held block's content; returns whether the key is new. One that another block already has is
        left with it."""
        if key in self._block_of or block in self._key_of:
            return False
        self._block_of[key] = block
        self._key_of[block] = key
        return True

    def forget(self, block: int) -> None:
        """Take a block's name away: its content was never written. Without a holder it is free then."""
        key = self._key_of.pop(block, None)
        if key is None:
            return
        self._drop(key)
        if block in self._lru:
            del self._lru[block]
            self._free.append(block)

    def _drop(self, key: bytes) -> None:
        del self._block_of[key]
        if self.on_removed is not None:
            self.on_removed(key)

    def release(self, blocks: list[int]) -> None:
        """Give blocks of one sequence back, in sequence order. The last block becomes the oldest,
        so that the end of a prefix is evicted before its beginning."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] > 0:
                continue
            assert self._references[block] == 0, f"block {block} was released more often than it was held"
            if block in self._key_of:
                self._lru[block] = None
            else:
                self._free.append(block)
