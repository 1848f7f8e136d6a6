# SPDX-License-Identifier: Apache-2.0
"""Weights of matrix products, which know what they are for and how they are stored."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor, nn

from flashinfer_backend.core.tuned import Role

Format = Literal["dense"]


class Shard(NamedTuple):
    """Which part of the whole weight this is."""

    rank: int = 0
    size: int = 1


class Weight(nn.Module):
    """data [N, K], of a product x[T, K] @ data.T. `format` dense: elements of the model's dtype."""

    def __init__(self, role: Role, data: Tensor, format: Format = "dense", shard: Shard = Shard()) -> None:  # noqa: B008 (immutable)
        super().__init__()
        self.role, self.format, self.shard = role, format, shard
        self.data = data if isinstance(data, nn.Parameter) else nn.Parameter(data, requires_grad=False)
