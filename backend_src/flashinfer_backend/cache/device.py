# SPDX-License-Identifier: Apache-2.0
"""What sequences keep on the device: keys and values in blocks, and states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashinfer_backend.ops.torch_delta import DeltaStates, Pending, inputs_kept

COPIED_BYTES = 256 << 20  # of states at once: they are copied by way of other memory


@dataclass(frozen=True)
class KVCacheFormat:
    """How one rank stores keys and values: layers, its share of the heads, elements, block size in tokens.

    A stored element times its scale is the key's or value's. `scales`: K's and V's of each layer; elements of
    16 or 32 bits have none.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    scales: tuple[tuple[float, float], ...] = ()

    def scales_of(self, layer: int) -> tuple[float, float]:
        """What a layer's stored keys and values are multiplied by."""
        return self.scales[layer] if self.scales else (1.0, 1.0)

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size


@dataclass
class KVCache:
    """layers: (K, V) of each layer, [blocks, block_size, num_kv_heads, head_dim], contiguous. Block 0
    belongs to no sequence: padded rows of CUDA graphs write to it and read it."""

    format: KVCacheFormat
    layers: list[tuple[Tensor, Tensor]]

    @classmethod
    def allocate(cls, format: KVCacheFormat, num_blocks: int, device: torch.device) -> KVCache:
        shape = (num_blocks, format.block_size, format.num_kv_heads, format.head_dim)

        def part() -> Tensor:
            return torch.zeros(shape, dtype=format.dtype, device=device)

        return cls(format, [(part(), part()) for _ in range(format.num_layers)])

    @classmethod
    def over(
        cls, layers: list[tuple[Tensor, Tensor]], scales: tuple[tuple[float, float], ...] = ()
    ) -> KVCache:
        """A cache in memory that is there already."""
        keys = layers[0][0]
        _, block_size, num_kv_heads, head_dim = keys.shape
        return cls(KVCacheFormat(len(layers), num_kv_heads, head_dim, block_size, keys.dtype, scales), layers)

    @property
    def num_blocks(self) -> int:
        return self.layers[0][0].shape[0]

    @property
    def nbytes(self) -> int:
        return self.format.bytes_per_block * self.num_blocks

    @property
    def device(self) -> torch.device:
        return self.layers[0][0].device


@dataclass(frozen=True)
class StateFormat:
    """What layers with states keep of a sequence on one rank: heads' states [key_dim, value_dim] in float32,
    and of the last tokens, as many as a convolution of `kernel` inputs reads and `drafts` more need
    (ops.torch_delta.inputs_kept), `channels` values in dtype; and what up to `pending` tokens wrote that the
    states have not seen (ops.torch_delta.Pending)."""

    layers: int
    heads: int
    key_dim: int
    value_dim: int
    channels: int
    kernel: int
    dtype: torch.dtype
    drafts: int = 0
    pending: int = 0

    @property
    def bytes_per_sequence(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._tensors(1))

    def allocate(self, rows: int, device: torch.device) -> StateCache:
        return StateCache(
            [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in self._tensors(rows)]
        )

    def _tensors(self, rows: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each of all layers' tensors, in the order of DeltaStates."""
        kept = inputs_kept(self.kernel, self.drafts), self.channels + 2 * self.heads
        of_states: list[tuple[tuple[int, ...], torch.dtype]] = [
            ((self.heads, self.key_dim, self.value_dim), torch.float32),
            (kept, self.dtype),
        ]
        if most := self.pending:
            key_heads = (self.channels - self.heads * self.value_dim) // (2 * self.key_dim)
            of_states += [
                ((key_heads, most, self.key_dim), torch.float32),
                ((self.heads, most, self.value_dim), torch.float32),
                ((self.heads, most), torch.float32),
                ((self.heads,), torch.int32),
            ]
        return [((self.layers, rows, *shape), dtype) for shape, dtype in of_states]


class StateCache:
    """States of sequences, by row: those of slots, and behind these snapshots, from which other sequences
    begin. layers: those of each layer."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Of all layers each: recurrent and inputs of ops.torch_delta.DeltaStates, then those of Pending."""
        self._all = tensors
        self.layers = [
            DeltaStates(recurrent, inputs, Pending(*pending) if pending else None)
            for recurrent, inputs, *pending in zip(*tensors, strict=True)
        ]

    @property
    def rows(self) -> int:
        return self._all[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(states.nbytes for states in self._all)

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Rows, int32 [n] each, of which no target is named twice or is a source."""
        most = max(1, COPIED_BYTES // sum(states[:, 0].nbytes for states in self._all))
        for some, others in zip(sources.long().split(most), targets.long().split(most), strict=True):
            for states in self._all:
                states.index_copy_(1, others, states.index_select(1, some))
