# SPDX-License-Identifier: Apache-2.0
"""A sequence in the engine."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from flashinfer_backend.core.sampling_params import SamplingParams


@dataclass
class Held:
    """A running sequence's blocks in one cache group."""

    blocks: list[int]  # by column of its block table; 0 for those behind
    behind: int = 0  # how many were given back, since no later token reads them
    committed: int = 0  # of a group with a window: blocks of it that are held or promised


@dataclass(eq=False)
class Request:
    """One sequence from submission to release. `slot` is -1 while it waits."""

    handle: int
    prompt: np.ndarray  # int32 [n]
    params: SamplingParams
    max_new: int  # max_tokens, or less where max_seq_len leaves less
    share_prompt_with: int = 0
    priority: int = 0  # smaller numbers come first
    place: int | None = None  # of RequestQueue.reserve, for a request that is queued later than it comes
    deadline_ns: int = 0  # of time.monotonic_ns(): the latest time for its slot; 0: no limit
    slot: int = -1
    generated: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))  # kept over preemption
    block_keys: list[bytes] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)  # by cache group; empty while it waits
    reserved_blocks: int = 0  # of the group that keeps all, promised under guaranteed_no_evict
    registered_blocks: int = 0
    found_blocks: int = 0  # in the cache when it last came to a slot
    cached_tokens: int = 0  # of its prompt, in the cache when it first came to a slot
    # Of all times that it came to a slot; not those in which what it generates lies.
    reused_blocks: int = 0
    allocated_blocks: int = 0
    new_blocks: int = 0  # of the allocated ones: nothing had to leave the cache for them
    # Where layers keep states: tokens of its prompt behind which they are kept, ascending; and the latest one
    # behind what it generates, which it holds while it runs (0: none), and of how many tokens that is.
    borders: list[int] = field(default_factory=list)
    snapshot: int = 0
    snapshot_tokens: int = 0
    drafted_tokens: int = 0  # that its steps checked
    accepted_tokens: int = 0  # of these
    arrival_ns: int = 0
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    adapter: int = -1  # place of its adapter on the device; -1: none
    # In front of its tokens in the keys of its blocks: other keys and values come of another adapter.
    cache_root: bytes = b""
    grammar: object = None  # of a guided request, from its compilation until the sampler has it
    context_logits: np.ndarray | None = None  # float32 [prompt, vocab] until sent with the first token
    # Of sampling.logprobs.prompt_log_probs, one a chunk of the prompt, until sent likewise.
    prompt_log_probs: list[np.ndarray] = field(default_factory=list)

    def keep_log_probs(self, start: int, found: np.ndarray) -> None:
        """start: tokens of the prompt before the chunk that they are of."""
        if start == 0:  # it may have begun before, and had to leave its slot
            self.prompt_log_probs = []
        self.prompt_log_probs.append(found)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, and those generated before the request came to its slot."""
        return len(self.prompt) + len(self.generated)

    @property
    def known_tokens(self) -> np.ndarray:
        """Prompt and what was generated before the request came to its slot, int32."""
        return np.concatenate([self.prompt, self.generated]) if len(self.generated) else self.prompt

    @cached_property
    def stops_backwards(self) -> tuple[list[bytes], int]:
        """Stop sequences as `backwards` writes them, sorted, and the tokens of the longest. Those which begin
        with another are left out: so one alone can begin what is written backwards, the last that is not
        behind it."""
        found: list[bytes] = []
        for stop in sorted({backwards(np.array(stop)) for stop in self.params.stop_sequences if stop}):
            if not found or not stop.startswith(found[-1]):
                found.append(stop)
        return found, max(map(len, found), default=0) // 4


def backwards(ids: np.ndarray) -> bytes:
    """Ids from the last to the first, in bytes that sort as the ids do."""
    return ids[::-1].astype(">u4").tobytes()
