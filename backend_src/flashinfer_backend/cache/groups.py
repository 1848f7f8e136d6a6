# SPDX-License-Identifier: Apache-2.0
"""Which layers share blocks, and how many blocks of the memory each such group gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Of what the slots can need of a group with a window, how much more it has for cached prefixes.
CACHED_SHARE = 0.5


def tail_blocks(window: int, block_size: int) -> int:
    """How many blocks in front of a block its tokens read, if each sees `window` tokens, itself included."""
    return -(-(window - 1) // block_size)


def decoding_blocks(tail: int, block_size: int, drafts: int) -> int:
    """How many blocks a sequence that decodes holds at most: the tail, and those of the tokens behind the
    last one that has been read. Of these a step that is in flight may have written all of its drafts, or
    none, and the next one writes as many behind them."""
    return tail + 1 + -(-(1 + 2 * drafts) // block_size)


@dataclass(frozen=True)
class CacheGroup:
    """Layers whose keys and values lie in the same blocks: one pool of blocks, and one block table.

    window: the latest tokens that a token sees, itself included; None: all, so that whole sequences are kept.
    block_size: tokens of a block, the same for all groups, so that a prefix has the same keys in each.
    bytes_per_block: of all its layers, on one rank.
    """

    layers: tuple[int, ...]
    window: int | None
    block_size: int
    bytes_per_block: int

    @property
    def name(self) -> str:
        return "full" if self.window is None else f"window {self.window}"

    @property
    def tail(self) -> int | None:
        """How many blocks in front of a block its tokens read; None: all."""
        return None if self.window is None else tail_blocks(self.window, self.block_size)

    def needed_blocks(self, slots: int, max_seq_len: int, step_tokens: int, drafts: int = 0) -> int:
        """The most blocks that `slots` sequences hold at once, of which a step computes `step_tokens` tokens,
        and decodes 1 + `drafts` of each."""
        most = -(-max_seq_len // self.block_size)
        if self.tail is None:
            return slots * most
        decoding = decoding_blocks(self.tail, self.block_size, drafts)
        return slots * min(most, decoding) + step_tokens // self.block_size

    def enough_blocks(self, slots: int, max_seq_len: int, step_tokens: int, drafts: int = 0) -> int:
        """The same, and for cached prefixes of a group with a window."""
        needed = self.needed_blocks(slots, max_seq_len, step_tokens, drafts)
        return needed if self.tail is None else int(needed * (1 + CACHED_SHARE))


def cache_groups(windows: Sequence[int | None], block_size: int, layer_bytes: int) -> list[CacheGroup]:
    """The groups of layers with these windows. The first one keeps the most tokens of a sequence: all, if any
    layer sees all. layer_bytes: of a block of one layer."""
    kinds = sorted(set(windows), key=lambda window: (window is not None, -(window or 0)))
    groups = []
    for kind in kinds:
        layers = tuple(layer for layer, window in enumerate(windows) if window == kind)
        groups.append(CacheGroup(layers, kind, block_size, layer_bytes * len(layers)))
    return groups


def share_memory(groups: Sequence[CacheGroup], enough: Sequence[int], memory: int) -> int:
    """How many blocks of `memory` bytes the first group gets. All get equally many, until those behind the
    first have enough; the first gets the rest. enough: of each group."""
    rest, bytes_of_one = memory, sum(group.bytes_per_block for group in groups)
    for blocks, group in sorted(zip(enough[1:], groups[1:], strict=True), key=lambda pair: pair[0]):
        if blocks * bytes_of_one > rest:
            break
        rest -= blocks * group.bytes_per_block
        bytes_of_one -= group.bytes_per_block
    return max(0, rest // bytes_of_one)
