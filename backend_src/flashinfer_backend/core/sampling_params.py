# SPDX-License-Identifier: Apache-2.0
"""How one sequence is generated."""

from __future__ import annotations

import msgspec

GRAMMAR_TYPES = ("json", "json_schema", "regex", "ebnf_grammar")


class SamplingParams(msgspec.Struct, omit_defaults=True, kw_only=True):
    """How one sequence is generated. Values are validated by the submitting side.

    end_id -1 means that nothing but the length ends the sequence. temperature 0 is greedy;
    top_k 0 and top_p 1 switch those filters off. Log probabilities, logits and metrics are
    sent only when asked for.
    """

    max_tokens: int
    min_tokens: int = 0
    end_id: int = -1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_sequences: list[list[int]] = []
    bad_words: list[list[int]] = []
    bias_ids: list[int] = []
    bias_values: list[float] = []
    grammar_type: str = ""
    grammar: str = ""
    log_probs: bool = False
    context_logits: bool = False
    generation_logits: bool = False
    perf_metrics: bool = False
