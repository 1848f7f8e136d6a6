# SPDX-License-Identifier: Apache-2.0
"""Which requests the engine takes: from a client's message to a `Request`, or to what is wrong with it."""

import logging
import time
import weakref
from collections import deque

import msgspec
import numpy as np

from flashinfer_backend.core.bounds import BAD_WORD_IDS, MOST_LISTED_IDS
from flashinfer_backend.core.config import EngineConfig, prompt_too_long
from flashinfer_backend.core.request import Request
from flashinfer_backend.core.sampling_params import NO_TOKEN_LEFT, SamplingParams
from flashinfer_backend.models.spec import ModelSpec
from flashinfer_backend.sampling.logprobs import logits_problem
from flashinfer_backend.transport import protocol

log = logging.getLogger(__name__)


class RefusedError(ValueError):
    """A request that the engine does not take; the message is for its client."""


class Admission:
    """Checks requests against the engine's limits."""

    def __init__(self, config: EngineConfig, spec: ModelSpec) -> None:
        self._config = config
        self._vocab_size, self._longest_seq_len = spec.vocab_size, spec.longest_seq_len
        self._end_ids, self._pooling = set(spec.eos_token_ids), spec.pooling
        self._listed = 0  # ids in the lists of the requests that are there, and of those in `_gone`
        self._gone: deque[int] = deque()  # of each request that is there no more; any thread adds to it

    def request(self, message: protocol.Submit, queued: int) -> Request:
        """The request of a message, whose parameters stay as they are. queued: how many wait already, beyond
        those for which there are slots. Raises RefusedError."""
        prompt, params = np.frombuffer(message.prompt, "<i4"), message.params
        room = self._config.max_seq_len - len(prompt)
        max_new = min(params.max_tokens, room)
        problem = self._problem(prompt, params, max_new, queued)
        if problem is not None:
            raise RefusedError(problem)
        if params.max_tokens > room:
            log.warning(
                "request %d: max_tokens %d is cut to %d, what max_seq_len %d leaves after the prompt",
                message.handle,
                params.max_tokens,
                room,
                self._config.max_seq_len,
            )
        end_id = params.end_id if params.end_id < self._vocab_size else -1  # others never match
        late_ids = self._late_ids(params, end_id)
        if params.allowed_ids and not params.grammar_type:
            forbidden = {word[0] for word in params.bad_words if len(word) == 1}
            if params.min_tokens:
                forbidden |= {end_id, *late_ids}
            if forbidden.issuperset(params.allowed_ids):
                raise RefusedError(NO_TOKEN_LEFT)
        request = Request(
            handle=message.handle,
            prompt=prompt,
            # Without an end to hold back it would only shorten drafts.
            params=msgspec.structs.replace(
                params,
                end_id=end_id,
                late_ids=late_ids,
                min_tokens=params.min_tokens if end_id >= 0 or late_ids else 0,
            ),
            max_new=max_new,
            share_prompt_with=message.share_prompt_with,
            arrival_ns=time.time_ns(),
            priority=message.priority,
            deadline_ns=time.monotonic_ns() + message.timeout_us * 1000 if message.timeout_us else 0,
        )
        if listed := params.listed:
            self._listed += listed
            weakref.finalize(request, self._gone.append, listed).atexit = False
        return request

    def _problem(self, prompt: np.ndarray, params: SamplingParams, max_new: int, queued: int) -> str | None:
        config = self._config
        if config.max_queue_size and queued >= config.max_queue_size:
            return (
                f"{protocol.QUEUE_FULL} of {config.max_queue_size} has been reached, please try again later"
            )
        while self._gone:
            self._listed -= self._gone.popleft()
        if params.listed and self._listed and self._listed + params.listed > MOST_LISTED_IDS:
            return (
                f"{protocol.QUEUE_FULL} of {MOST_LISTED_IDS} token ids in the lists of all requests together"
                f" (biases, words, allowed ids; bad words {BAD_WORD_IDS} times) has been reached, please try"
                " again later"
            )
        if self._pooling is not None and not (params.pooled and params.max_tokens == 1):
            return f"the model is {self._pooling.what}"
        if params.pooled and self._pooling is None:
            return "the model writes text: it has neither embeddings nor scores"
        if not len(prompt):
            return "the prompt has no tokens; it should have at least one"
        if len(prompt) > config.max_input_len:
            limits = config.max_input_len, config.max_seq_len, self._longest_seq_len
            return prompt_too_long(len(prompt), *limits)
        if prompt.min() < 0 or prompt.max() >= self._vocab_size:
            return f"prompt token ids should lie in 0..{self._vocab_size - 1}"
        if params.grammar_type and config.guided_decoding_backend == "none":
            return "guided decoding is switched off (guided_decoding_backend none); send no guide"
        if params.adapter and not config.max_loras:
            return "this model was built without adapters; build it with the knob max_loras"
        logits_room = config.max_logits_mib << 20
        return logits_problem(params, len(prompt), max_new, self._vocab_size, logits_room)

    def _late_ids(self, params: SamplingParams, end_id: int) -> list[int]:
        """What cannot be chosen before min_tokens, besides the end id: what the request says and, where it
        ends with each of the checkpoint's end ids, the others."""
        if not params.min_tokens:
            return []
        others = self._end_ids if end_id in self._end_ids else set()
        return sorted({*params.late_ids, *others} - {end_id})
