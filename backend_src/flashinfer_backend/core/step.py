# SPDX-License-Identifier: Apache-2.0
"""The data of one engine step. Pure data: what crosses from the scheduler to whatever runs the step."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from flashinfer_backend.core.sampling_params import SamplingParams

NONE = np.empty(0, np.int32)
LAST_TOKEN = -1  # in StepPlan.tokens: the token that the row's slot sampled last, which the device has


class NewSequence(msgspec.Struct):
    """A sequence that has just come to its slot, and whose sampling has a state (SamplingParams.stateful)."""

    handle: int
    slot: int
    epoch: int  # of the slot
    params: SamplingParams
    prompt_len: int
    tokens: bytes  # int32 little endian: all known ones, where sampling looks at them; else empty


@dataclass(kw_only=True)
class StepPlan:
    """What the scheduler decided for one step.

    A row is a run of tokens of one sequence: (slot, start, length, tokens sampled). A decode is a row of
    length 1 that feeds the slot's last token; a chunk of a prompt is longer and samples only where it ends
    the known tokens. Rows of length 1 come first. Sampling rows are those that sample, in the same order.
    """

    slots: np.ndarray  # int32 [rows]
    starts: np.ndarray  # int32 [rows], tokens of the sequence whose keys and values are in the cache
    lengths: np.ndarray  # int32 [rows]
    samples: np.ndarray  # int32 [rows], 0 or 1
    tokens: np.ndarray  # int32 [sum(lengths)], or LAST_TOKEN
    # int32 [n, 3]: (slot, column of its block table, block), to be entered before the step reads the table
    block_updates: np.ndarray = field(default_factory=lambda: NONE.reshape(0, 3))
    context_rows: np.ndarray = field(default_factory=lambda: NONE)  # rows all of whose logits are wanted
    # Of the sampling rows, [s] each.
    epochs: np.ndarray  # int64, owner of the slot when the step was planned
    temperature: np.ndarray  # float32
    seed: np.ndarray  # uint64
    suppressed: np.ndarray  # int32, a token id that must not be chosen, or -1
    stateful: np.ndarray = field(default_factory=lambda: NONE)  # indices of those whose slot has a state
    new: list[NewSequence] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)  # handles of sequences with a state that are gone

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @cached_property
    def num_prompt_tokens(self) -> int:
        """Tokens that the host gives: all but those of decodes."""
        return int(np.count_nonzero(self.tokens != LAST_TOKEN))

    @cached_property
    def num_decodes(self) -> int:
        """Rows that feed their slot's last token."""
        return len(self.tokens) - self.num_prompt_tokens

    @cached_property
    def sampling_rows(self) -> np.ndarray:
        """Rows that sample, intp [s]."""
        return self.samples.nonzero()[0]

    @cached_property
    def sample_slots(self) -> np.ndarray:
        """int32 [s]"""
        return self.slots if len(self.sampling_rows) == len(self.slots) else self.slots[self.sampling_rows]

    @cached_property
    def sample_positions(self) -> np.ndarray:
        """int32 [s], position that the sampled token will have."""
        ends = self.starts + self.lengths
        return ends if len(self.sampling_rows) == len(ends) else ends[self.sampling_rows]

    def to_bytes(self) -> bytes:
        """All of the plan, for another process."""
        return _encode({f.name: getattr(self, f.name) for f in fields(self)})

    @classmethod
    def from_bytes(cls, data: bytes) -> StepPlan:
        """What to_bytes made."""
        values = msgspec.msgpack.decode(data)
        for name, value in values.items():
            if name == "new":
                values[name] = msgspec.convert(value, list[NewSequence])
            elif name != "freed":
                dtype, shape, content = value
                values[name] = np.frombuffer(content, dtype).reshape(shape).copy()
        return cls(**values)


def _array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes()
    raise TypeError(f"a plan holds {type(value).__name__}, which is no data")


_encode = msgspec.msgpack.Encoder(enc_hook=_array).encode


@dataclass
class GrammarEnd:
    """A guided row after whose token nothing can follow, or whose token does not follow its grammar."""

    row: int  # sampling row
    complete: bool = False  # the sequence may end here
    problem: str = ""  # else: why it cannot go on
    rejected: bool = False  # the token itself does not follow
    too_slow: bool = False  # the grammar costs too much, and would again


@dataclass
class StepOutput:
    """What a step came to. Rows are sampling rows."""

    tokens: np.ndarray  # int32 [s]
    log_probs: list[tuple[int, float]] = field(default_factory=list)
    top_logprobs: list[tuple[int, list[tuple[int, float]]]] = field(default_factory=list)
    generation_logits: list[tuple[int, bytes]] = field(default_factory=list)  # float32 [V]
    grammar_ends: list[GrammarEnd] = field(default_factory=list)
