# SPDX-License-Identifier: Apache-2.0
"""Which part of the model a rank has, under tensor parallelism."""

from __future__ import annotations

from typing import NamedTuple


class Shard(NamedTuple):
    """The share of one of `size` ranks. expert_groups: of a mixture of experts, how many groups of ranks
    share the experts; the ranks of a group have a part of each of theirs."""

    rank: int = 0
    size: int = 1
    expert_groups: int = 1

    @property
    def in_group(self) -> Shard:
        """The part of each of its experts."""
        size = self.size // self.expert_groups
        return Shard(self.rank % size, size)


WHOLE = Shard()


class Part(NamedTuple):
    """Rows and columns of a module's matrix, which has the shape `whole` [N, K]."""

    whole: tuple[int, int]
    rows: slice
    columns: slice
