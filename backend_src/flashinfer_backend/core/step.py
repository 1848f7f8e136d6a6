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


class Feeds:
    """What a row's tokens are. Not an enum: numpy takes its own numbers ten times as fast."""

    GIVEN = np.int8(0)  # those in the plan
    LAST = np.int8(1)  # the token that its slot sampled last, which the device has
    LAST_AND_DRAFTS = np.int8(2)  # that, and behind it drafts, which the device has as well


class Wants:
    """What a row is computed for; bits."""

    NOTHING = np.int8(0)  # its keys and values alone
    NEXT = np.int8(1)  # a sampled token behind its last one
    LOGITS = np.int8(2)  # of each of its tokens
    NEXT_OF_EACH = np.int8(4)  # a sampled token behind each; those are kept that follow from accepted drafts


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

    A row is a run of tokens of one sequence: its slot, its first position, its length, what it feeds and what
    it wants. A decode feeds the slot's last token; a chunk of a prompt feeds given tokens, and wants a next
    one where it ends the known tokens. Rows that feed the last token alone come first, then the others of
    length 1; rows with drafts come last. Sampling rows are those that want a next token or several, in the
    same order.

    The host learns late how many drafts were accepted. Until it has read a step with drafts of a sequence,
    the starts of the sequence's next rows are upper bounds: their positions are those that the device has.
    """

    slots: np.ndarray  # int32 [rows]
    starts: np.ndarray  # int32 [rows], tokens of the sequence whose keys and values are in the cache, at most
    lengths: np.ndarray  # int32 [rows]
    feeds: np.ndarray  # int8 [rows], Feeds
    wants: np.ndarray  # int8 [rows], Wants
    tokens: np.ndarray  # int32 [t], of the rows that feed given ones, row after row
    # int32 [n, 4]: (cache group, slot, column, block), entered in the group's block table before it is read
    block_updates: np.ndarray = field(default_factory=lambda: NONE.reshape(0, 4))
    # Of the sampling rows, [s] each.
    epochs: np.ndarray  # int64, owner of the slot when the step was planned
    temperature: np.ndarray  # float32
    seed: np.ndarray  # uint64
    suppressed: np.ndarray  # int32, a token id that must not be chosen, or -1
    stateful: np.ndarray = field(default_factory=lambda: NONE)  # indices of those whose slot has a state
    new: list[NewSequence] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)  # handles of sequences with a state that are gone
    # (row, most, following): chunks of prompts of which log probabilities are wanted. following: int32 little
    # endian, the prompt's tokens behind each of the chunk's. most: how many of the likeliest tokens in each
    # place are told besides.
    told: list[tuple[int, int, bytes]] = field(default_factory=list)
    # For the proposer of drafts, where there is one.
    drafts: int = 0  # how many the sampling rows are given for their next step
    # int32 [GIVEN rows], the known token behind the row's last one; -1 where it is sampled
    following: np.ndarray = field(default_factory=lambda: NONE)
    # (slot, int32 little endian): tokens that no step feeds, as the prefix cache had them
    recalled: list[tuple[int, bytes]] = field(default_factory=list)
    # int32 [n, 2], of sequences that came to slots: (slot, place of its adapter, or -1)
    adapters: np.ndarray = field(default_factory=lambda: NONE.reshape(0, 2))
    adapted: bool = False  # whether any row has an adapter
    # int32 [n, 2], (slot, snapshot): states that rows of the step begin with, and those to keep behind it
    restored: np.ndarray = field(default_factory=lambda: NONE.reshape(0, 2))
    saved: np.ndarray = field(default_factory=lambda: NONE.reshape(0, 2))
    # int32 [n, 3], (row, tokens, snapshot): states to keep behind the first tokens of a row, not all of it
    cuts: np.ndarray = field(default_factory=lambda: NONE.reshape(0, 3))

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @cached_property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that the host gives: all but those of decodes."""
        return len(self.tokens)

    @cached_property
    def num_decodes(self) -> int:
        """Rows that feed their slot's last token, with drafts or without."""
        return int(np.count_nonzero(self.feeds))

    @property
    def num_last(self) -> int:
        """Rows that feed their slot's last token alone."""
        return self.num_decodes - len(self.drafted_rows)

    @cached_property
    def drafted_rows(self) -> np.ndarray:
        """Rows that feed drafts, intp [d]: the last ones."""
        return (self.feeds == Feeds.LAST_AND_DRAFTS).nonzero()[0]

    @cached_property
    def sampling_rows(self) -> np.ndarray:
        """Rows that want a next token or several, intp [s]."""
        return (self.wants & (Wants.NEXT | Wants.NEXT_OF_EACH)).nonzero()[0]

    @cached_property
    def samples(self) -> np.ndarray:
        """int32 [s], behind how many tokens of each sampling row one is sampled: all of them, or the last."""
        rows = self.sampling_rows
        return np.where(self.wants[rows] & Wants.NEXT_OF_EACH, self.lengths[rows], 1)

    @cached_property
    def sampled_tokens(self) -> np.ndarray:
        """int32 [n], the step's tokens behind which one is sampled."""
        rows, ends = self.sampling_rows, np.cumsum(self.lengths, dtype=np.int32)
        if not len(self.drafted_rows):
            return (ends if len(rows) == len(ends) else ends[rows]) - 1
        before = ends[rows] - np.cumsum(self.samples)
        return (np.arange(self.samples.sum()) + np.repeat(before, self.samples)).astype(np.int32)

    @cached_property
    def logits_rows(self) -> np.ndarray:
        """Rows that want the logits of all of their tokens, intp."""
        return (self.wants & Wants.LOGITS).nonzero()[0]

    @property
    def reports_prompts(self) -> bool:
        """Whether a row wants something of each of its tokens that is not sampled."""
        return bool(self.told) or len(self.logits_rows) > 0

    @cached_property
    def sample_slots(self) -> np.ndarray:
        """int32 [s]"""
        return self.slots if len(self.sampling_rows) == len(self.slots) else self.slots[self.sampling_rows]

    @cached_property
    def sample_positions(self) -> np.ndarray:
        """int32 [s], position that the last sampled token will have, at most."""
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
            elif isinstance(value, list) and name not in ("freed", "recalled", "told"):
                dtype, shape, content = value
                values[name] = np.frombuffer(content, dtype).reshape(shape).copy()
        return cls(**values)


def greedy_plan(slots: np.ndarray, starts: Any, lengths: Any, feeds: Any, **others: Any) -> StepPlan:
    """Rows of which each wants a greedy next token, where `others` says nothing else; nothing is given."""
    rows = len(slots)
    columns: dict[str, Any] = {
        "wants": np.full(rows, Wants.NEXT, np.int8), "tokens": NONE, "epochs": np.zeros(rows, np.int64),
        "temperature": np.zeros(rows, np.float32), "seed": np.zeros(rows, np.uint64),
        "suppressed": np.full(rows, -1, np.int32),
    }  # fmt: skip
    starts, lengths = (np.full(rows, each, np.int32) for each in (starts, lengths))
    feeds = np.full(rows, feeds, np.int8)
    return StepPlan(slots=slots, starts=starts, lengths=lengths, feeds=feeds, **columns | others)


def _array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes()
    raise TypeError(f"a plan holds {type(value).__name__}, which is no data")


_encode = msgspec.msgpack.Encoder(enc_hook=_array).encode


# A token that was likely in a place, in the bytes of which a report or an answer keeps them.
TOP_LOGPROBS = np.dtype([("token", "<i4"), ("log_prob", "<f4")])


@dataclass
class StepOutput:
    """What a step came to. Rows are sampling rows."""

    tokens: np.ndarray  # int32 [n], row after row
    counts: np.ndarray | None = None  # int32 [s], tokens of each row; None: one of each
    # Of tokens, by their places in `tokens`.
    log_probs: list[tuple[int, float]] = field(default_factory=list)
    top_logprobs: list[tuple[int, bytes]] = field(default_factory=list)  # TOP_LOGPROBS, most likely first
    generation_logits: list[tuple[int, bytes]] = field(default_factory=list)  # float32 [V]
    # Rows after whose token their grammar lets nothing follow.
    grammar_ends: list[int] = field(default_factory=list)
    # Rows that no token is left for behind those that they have, and why.
    failed: list[tuple[int, str]] = field(default_factory=list)

    def keep(self, samples: np.ndarray, counts: np.ndarray) -> None:
        """Drop, of each row's `samples` tokens, what is behind the first `counts`; int32 [s] each."""
        turns = np.arange(len(self.tokens)) - np.repeat(np.cumsum(samples) - samples, samples)
        kept = turns < np.repeat(counts, samples)
        self.tokens, self.counts = self.tokens[kept], counts
        places = np.cumsum(kept) - 1
        for name in ("log_probs", "top_logprobs", "generation_logits"):
            reports = getattr(self, name)
            setattr(self, name, [(int(places[at]), what) for at, what in reports if kept[at]])
