# SPDX-License-Identifier: Apache-2.0
"""Which part of the model a rank has, under tensor parallelism."""

from __future__ import annotations

from typing import NamedTuple


class Shard(NamedTuple):
    """The share of one of `size` ranks."""

    rank: int = 0
    size: int = 1


WHOLE = Shard()


class Part(NamedTuple):
    """Rows and columns of a module's matrix, which has the shape `whole` [N, K]."""

    whole: tuple[int, int]
    rows: slice
    columns: slice
