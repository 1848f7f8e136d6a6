# SPDX-License-Identifier: Apache-2.0
"""What a step asks of whatever guesses the tokens that follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from flashinfer_backend.attention.contract import Prepared
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.models.transformer import Transformer
from flashinfer_backend.ops.torch_ops import BySlot


class DraftStep(NamedTuple):
    """What a step leaves a proposer, on the device. Inside a CUDA graph shapes are static: a step's tokens
    [T] include padding, which has the dummy slot, and so do its sampling rows [s]."""

    positions: Tensor  # int32 [T]
    cache_locations: Tensor  # int32 [T]
    # int32 [T], the token behind each: the given one or the sampled one. None where the proposer takes no
    # layers.
    next_tokens: Tensor | None
    hidden: Tensor | None  # [T, len(layers) * H], outputs of the proposer's layers, side by side
    ends: Tensor  # int32 [s], place in T of each sampling row's last kept token
    sample_slots: Tensor  # int32 [s]
    fed_lengths: Tensor  # int32 [slots + 1], tokens in the cache with all that the step has fed
    # Of this step's rows, for layers behind the target's. None: the tokens are those of earlier steps.
    attention: Prepared | None
    # Attention of one query a sampling row, which sees the row's kept tokens and n behind them: decode(n).
    decode: Callable[[int], Prepared]


class Places(NamedTuple):
    """Where a head's layers compute tokens."""

    positions: Tensor  # int32 [T]
    locations: Tensor  # int32 [T], of the cache
    caches: list[tuple[Tensor, Tensor]]  # (K, V) of the head's layers
    attend: Callable[[int, Tensor, Tensor], None]  # attention's run, by the head's layers


class Slots(Protocol):
    """What the device keeps by slot; the last one is the dummy of padding. Where a step's drafts have been
    checked, `lengths` counts what was kept, and the last token stands behind these."""

    by_slot: BySlot
    tokens: Tensor  # int32 [slots + 1, max_seq_len + 1], with `history` those and the last one
    kv_layers: list[tuple[Tensor, Tensor]]  # (K, V) of the target's layers, then of the proposer's


class Proposer(Protocol):
    """Guesses what follows. On several ranks each has one, and all of them have to guess the same."""

    @property
    def count(self) -> int:
        """The most tokens of a guess, 1 or more."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of the target whose outputs it takes, ascending; () for none."""

    @property
    def cache_layers(self) -> int:
        """How many layers of keys and values it has, in the blocks of the target's, behind its layers."""

    @property
    def history(self) -> bool:
        """Whether it looks at all tokens of a sequence (Slots.tokens)."""

    @property
    def defers(self) -> bool:
        """Whether it can take in the tokens of decode rows in a later step, without attention."""

    def propose(self, step: DraftStep, state: Slots, count: int) -> Tensor:
        """Called at the end of every step, but with `defers` for several steps of decode rows together: takes
        in what it keeps of the step's tokens, and returns `count` drafts for each sampling row, int32
        [s, count]; of 0 to self.count. Token ids, where it has no guess any. Enqueues work alone, which a
        CUDA graph can capture."""


MakeProposer = Callable[[EngineConfig, Transformer], Proposer]  # once the target is loaded
