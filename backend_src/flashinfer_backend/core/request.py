# SPDX-License-Identifier: Apache-2.0
"""A sequence in the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from flashinfer_backend.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from flashinfer_backend.structured.grammar import Grammar


@dataclass(eq=False)
class Request:
    """One sequence from submission to release. `slot` is -1 while it waits."""

    handle: int
    prompt: np.ndarray  # int32 [n]
    params: SamplingParams
    max_new: int  # max_tokens, or less where max_seq_len leaves less
    share_prompt_with: int = 0
    slot: int = -1
    generated: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))  # kept over preemption
    block_keys: list[bytes] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    reserved_blocks: int = 0  # promised under guaranteed_no_evict, not yet allocated
    registered_blocks: int = 0
    reused_blocks: int = 0
    new_blocks: int = 0
    arrival_ns: int = 0
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    grammar: Grammar | None = None  # of a guided request, from its admission on
    context_logits: np.ndarray | None = None  # float32 [prompt, vocab] until sent with the first token
    device_bias: list[Tensor] | None = None  # bias ids and values, kept by the sampler

    @property
    def needs_extras(self) -> bool:
        """Whether the plain greedy/temperature sampler does not do for this request."""
        return self.changes_logits or self.reports_logits

    @property
    def changes_logits(self) -> bool:
        p = self.params
        return self.filters or self.needs_history or bool(p.bad_words or p.bias_ids or p.grammar_type)

    @property
    def reports_logits(self) -> bool:
        return self.params.log_probs or self.params.generation_logits

    @property
    def filters(self) -> bool:
        """Top-k or top-p."""
        return self.params.temperature > 0 and (self.params.top_k > 0 or self.params.top_p < 1.0)

    @property
    def counts_tokens(self) -> bool:
        """Presence or frequency penalty."""
        return bool(self.params.presence_penalty or self.params.frequency_penalty)

    @property
    def needs_history(self) -> bool:
        """Whether a token's logits depend on the tokens before it, on the device."""
        p = self.params
        return p.repetition_penalty != 1.0 or self.counts_tokens or any(len(word) > 1 for word in p.bad_words)

    @property
    def known_tokens(self) -> np.ndarray:
        """Prompt and what was generated before the request came to its slot, int32."""
        return np.concatenate([self.prompt, self.generated])
