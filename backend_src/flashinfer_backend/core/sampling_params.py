# SPDX-License-Identifier: Apache-2.0
"""How one sequence is generated."""

import msgspec

from flashinfer_backend.core.bounds import BAD_WORD_IDS

GRAMMAR_TYPES = ("json", "json_schema", "regex", "ebnf_grammar")
CALLS_GUIDE = "calls"  # made by the OpenAI API: free text, and calls that match their schemas
CHOICE_GUIDE = "choice"  # made by the OpenAI API: one of the texts in a list
CONTENT = ""  # next to the functions' names: where such a guide has the schema of the content
# The APIs make 0 of a temperature below this: it picks the likeliest token anyway, and dividing by it would
# only overflow.
GREEDY_TEMPERATURE = 1e-5


# Why a sequence fails whose allowed_ids leave nothing.
NO_TOKEN_LEFT = (
    "allowed_token_ids leaves no token to choose: the guide, the bad words and min_tokens forbid all of them"
)


class SamplingParams(msgspec.Struct, omit_defaults=True, kw_only=True):
    """How one sequence is generated. Values are validated by the submitting side.

    end_id -1 means that nothing but the length ends the sequence. It cannot be chosen before min_tokens, and
    neither can late_ids, to which the engine adds the checkpoint's other end ids. temperature 0 is greedy;
    top_k 0, top_p 1 and min_p 0 switch those filters off. Only allowed_ids can be
    chosen, if there are any: distinct ones, and fewer than the vocabulary has. Log probabilities, logits and
    metrics are sent only when asked for.
    """

    max_tokens: int
    min_tokens: int = 0
    end_id: int = -1
    late_ids: list[int] = []
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_sequences: list[list[int]] = []
    bad_words: list[list[int]] = []
    allowed_ids: list[int] = []
    bias_ids: list[int] = []
    bias_values: list[float] = []
    grammar_type: str = ""
    grammar: str = ""
    log_probs: bool = False
    top_logprobs: int = 0  # most likely tokens of each step to report, with log_probs
    context_logits: bool = False
    prompt_log_probs: int | None = None  # of its tokens, and of how many likeliest ones in each place
    generation_logits: bool = False
    perf_metrics: bool = False
    pooled: bool = False  # what a model with pooling gives; max_tokens is 1 then, and the token means nothing
    adapter: str = ""  # folder of the adapter that the sequence is generated with
    adapter_name: str = ""  # what the client calls it, for routers
    speculative_decoding: bool = True  # False: no drafts, where the engine makes some

    @property
    def stateful(self) -> bool:
        """Whether the sampler keeps a state for the sequence: its rows ask for more than a temperature."""
        return self.changes_logits or self.reports_logits or bool(self.late_ids)

    @property
    def changes_logits(self) -> bool:
        """Whether all of its rows are sampled from changed logits; with late_ids alone the first ones are."""
        masks = bool(self.bad_words or self.allowed_ids or self.grammar_type)
        return self.filters or masks or bool(self.bias_ids) or self.needs_history

    @property
    def reports_logits(self) -> bool:
        return self.log_probs or self.generation_logits or self.pooled

    @property
    def listed(self) -> int:
        """How many ids its lists have, as MOST_LISTED_IDS counts them."""
        words = sum(map(len, self.stop_sequences)) + BAD_WORD_IDS * sum(map(len, self.bad_words))
        return words + len(self.late_ids) + len(self.allowed_ids) + len(self.bias_ids)

    @property
    def reports_prompt(self) -> bool:
        """Whether something is told of each token of the prompt, for which all of it is computed."""
        return self.context_logits or self.prompt_log_probs is not None

    @property
    def asks_for_logits(self) -> bool:
        """Whether a request wants logits of its prompt or of what it generates."""
        return self.context_logits or self.generation_logits

    def logits_rows(self, prompt_len: int, max_new: int) -> int:
        """How many rows of logits a sequence of at most `max_new` tokens sends at most."""
        return prompt_len * self.context_logits + max_new * self.generation_logits

    @property
    def filters(self) -> bool:
        """Top-k, top-p or min-p."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def penalised(self) -> bool:
        """Whether tokens that occurred are less likely."""
        return self.repetition_penalty != 1.0 or bool(self.presence_penalty or self.frequency_penalty)

    @property
    def needs_history(self) -> bool:
        """Whether a token's logits depend on the tokens before it, on the device."""
        return self.penalised or any(len(word) > 1 for word in self.bad_words)
