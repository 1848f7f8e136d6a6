# SPDX-License-Identifier: Apache-2.0
"""How many tokens a step may have, and which prompts share one."""

from __future__ import annotations

import itertools

import numpy as np

from flashinfer_backend.engine.config import EngineConfig
from flashinfer_backend.engine.request import Request, SlotTable
from flashinfer_backend.engine.waiting import WaitingQueue

PROMPTS_TOGETHER = 1024  # tokens
# Fewer tokens leave the device waiting for its weights; from here on a step's time grows with its tokens.
FILLED_STEP = 256


class StepBudget:
    """How many tokens the next step may have.

    A backlog under schedule_policy lof takes at least as many steps as its longest answer has tokens. Prompts
    in the fewest steps would leave many of the later ones nearly empty, so the work is spread over all of
    them: the same number of tokens in each, but no fewer than fill the device. A backlog begins with more
    requests than there are slots and ends when none waits.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._backlog = False

    def tokens(
        self, table: SlotTable, decoding: np.ndarray, prefilling: list[Request], waiting: WaitingQueue
    ) -> int:
        """The most tokens of a step with rows of `decoding` (slots, int32 [d]) and prompts."""
        config = self._config
        limit = config.max_num_tokens
        if not config.enable_chunked_context:
            return limit
        if len(decoding):
            limit = min(limit, config.max_num_tokens_while_decoding)
        if config.schedule_policy != "lof":
            return limit
        more = len(decoding) + len(prefilling) + len(waiting) > config.max_num_seqs
        self._backlog = bool(waiting) and (self._backlog or more)
        if not self._backlog:
            return limit
        left = table.max_new[decoding] - table.planned_outputs[decoding]
        started = [table.prompt_len[r.slot] + r.max_new - table.computed[r.slot] for r in prefilling]
        work = waiting.tokens + int(left.sum()) + int(sum(started))
        longest = max([waiting.head.max_new, int(left.max(initial=1)), *(r.max_new for r in prefilling)])
        steps = max(1, longest - waiting.tail.max_new)  # the last prompt's answer comes behind it
        return min(limit, max(FILLED_STEP, -(-work // steps)))


def joins(config: EngineConfig, waiting: WaitingQueue, together: int, tokens: int) -> bool:
    """Whether a prompt with `tokens` to compute should share a step that has `together` already.

    The device is busy with PROMPTS_TOGETHER tokens: more in one step keep the prompts before waiting
    and hardly help those behind. Only a backlog of more than a step is worked off in the fewest steps.
    """
    if not together or together + tokens <= PROMPTS_TOGETHER:
        return True
    backlog = itertools.accumulate(len(r.prompt) + len(r.generated) for r in waiting)
    return any(total > config.max_num_tokens for total in backlog)
