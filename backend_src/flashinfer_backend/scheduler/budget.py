# SPDX-License-Identifier: Apache-2.0
"""How many tokens a step may have, and which prompts share one."""

from __future__ import annotations

import msgspec
import numpy as np

from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.request import Request
from flashinfer_backend.core.tuned import Scheduling
from flashinfer_backend.scheduler.request_queue import RequestQueue
from flashinfer_backend.scheduler.slot_table import SlotTable

BATCH_ARRIVAL_STEPS = 512  # steps from a backlog's beginning in which its requests may still arrive
# Of a mixture's step: with fewer tokens for each expert, the device mainly reads the experts' weights. An
# H200 reads weights in FP8 in the time that it multiplies some 140 tokens by them.
EXPERT_TOKENS = 128


def for_experts(numbers: Scheduling, count: int, per_token: int, captured: int) -> Scheduling:
    """The device's numbers for a mixture of `count` experts, of which each token has `per_token`: prompts
    share a step until an expert has EXPERT_TOKENS of their tokens on average. captured: tokens of the largest
    captured step with prompts. Larger steps are launched kernel by kernel and would wait for the host."""
    together = min(EXPERT_TOKENS * count // per_token, captured)
    return msgspec.structs.replace(numbers, prompts_together=max(numbers.prompts_together, together))


class StepBudget:
    """How many tokens the next step may have. `tokens` is asked once a step.

    Beside streams whose steps take long without prompts, a step computes half of the prompt tokens that wait,
    or what fills the device: the streams wait for few of them, and prompts still take few steps.

    A backlog under schedule_policy lof takes at least as many steps as its longest answer has tokens. Prompts
    in the fewest steps would leave many of the later ones nearly empty, so the work is spread over all of
    them: the same number of tokens in each, but no fewer than fill the device. A backlog begins with more
    requests than there are slots and ends when none waits.

    That is for a batch, whose work is all known. Where requests go on arriving, those steps never come:
    every slot is wanted now, and nothing is spread any more until all is done.
    """

    def __init__(self, config: EngineConfig, numbers: Scheduling) -> None:
        self._config, self._numbers = config, numbers
        self._backlog = False
        self._age = 0  # steps since the first backlog after there was nothing to do
        self._is_online = False  # whether requests arrived later than those of a batch do
        self._arrived = 0  # requests, by the last step

    def tokens(
        self,
        table: SlotTable,
        decoding: np.ndarray,
        prefilling: list[Request],
        waiting: RequestQueue,
        waiting_tokens: int,
        decode_s: float | None = None,
    ) -> int:
        """The most tokens of a step with rows of `decoding` (slots, int32 [d]) and prompts.

        waiting_tokens: those of `waiting` that remain to be computed before a next one of each.
        decode_s: how long a step without prompts takes, where that is known."""
        config, numbers = self._config, self._numbers
        slow_ms = numbers.slow_step_ms
        crowded = len(waiting) > table.free
        self._notice_arrivals(waiting, idle=not len(decoding) and not prefilling)
        spreads = config.schedule_policy == "lof" and config.enable_chunked_context and not self._is_online
        self._backlog = spreads and bool(waiting) and (self._backlog or crowded)
        limit = config.max_num_tokens
        if not config.enable_chunked_context:
            return limit
        streams = len(decoding)
        if streams:
            limit = min(limit, config.max_num_tokens_while_decoding)
        if not self._backlog:
            slow = decode_s is not None and slow_ms is not None and decode_s * 1000 >= slow_ms
            if not slow or not streams:
                return limit
            begun = sum(int(table.known[r.slot] - table.computed[r.slot]) for r in prefilling)
            return min(limit, max(numbers.filled_step, streams - (-(begun + waiting_tokens) // 2)))
        to_generate = table.max_new[decoding] - table.planned_outputs[decoding]
        started = [table.prompt_len[r.slot] + r.max_new - table.computed[r.slot] for r in prefilling]
        work = waiting.tokens + int(to_generate.sum()) + int(sum(started))
        longest = max([waiting.longest, int(to_generate.max(initial=1)), *(r.max_new for r in prefilling)])
        steps = max(1, longest - waiting.tail.max_new)  # the last prompt's answer comes behind it
        return min(limit, max(numbers.filled_step, -(-work // steps)))

    def _notice_arrivals(self, waiting: RequestQueue, idle: bool) -> None:
        if idle and not waiting:
            self._age, self._is_online = 0, False
        elif self._backlog or self._age:
            self._age += 1
            self._is_online = self._is_online or (
                self._age > BATCH_ARRIVAL_STEPS and waiting.arrived > self._arrived
            )
        self._arrived = waiting.arrived

    def should_share_step(self, waiting: RequestQueue, streams: int, together: int, tokens: int) -> bool:
        """Whether a prompt with `tokens` to compute should join a step that has `together` tokens of prompts
        and a decode row for each of `streams`.

        More tokens than keep the device busy keep the prompts before waiting and hardly help those behind.
        Up to as many, streams included, a step is a CUDA graph; launched kernel by kernel, a mixture's takes
        twice as long. So the streams count too, unless the step is larger already or they are more than half
        of it, which would leave prompts little. Only a backlog of more than a step is worked off in the
        fewest steps.
        """
        most = self._numbers.prompts_together
        if streams <= most // 2 and streams + together <= most:
            most -= streams
        if not together or together + tokens <= most:
            return True
        return waiting.known_tokens > self._config.max_num_tokens
