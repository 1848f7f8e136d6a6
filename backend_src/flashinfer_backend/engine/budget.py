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
PAUSE_TOKENS = 700  # of prompts, for which decode rows sit a step out
PAUSE_ROWS = 32  # decode rows; fewer cost such a step nothing
PAUSES = 2  # steps in a row
REST = 4  # steps with decode rows for each without


class StepBudget:
    """How many tokens the next step may have, and whether decode rows are in it. Asked once a step, in the
    order begin, tokens, pauses.

    A backlog under schedule_policy lof takes at least as many steps as its longest answer has tokens. Prompts
    in the fewest steps would leave many of the later ones nearly empty, so the work is spread over all of
    them: the same number of tokens in each, but no fewer than fill the device. A backlog begins with more
    requests than there are slots and ends when none waits.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._backlog = False
        self._may_pause = False
        self._owed = 0  # steps with decode rows, for those without

    def begin(
        self, table: SlotTable, decoding: np.ndarray, prefilling: list[Request], waiting: WaitingQueue
    ) -> None:
        """Looks at what there is before the step's prompts are chosen. decoding: slots, int32 [d]."""
        spreads = self._config.schedule_policy == "lof" and self._config.enable_chunked_context
        crowded = len(waiting) > table.free
        self._backlog = spreads and bool(waiting) and (self._backlog or crowded)
        rested = self._owed <= (PAUSES - 1) * REST
        self._may_pause = len(decoding) >= PAUSE_ROWS and rested and not crowded and not self._backlog
        if self._may_pause:  # but not for more prompts than streams may wait for
            prompts = sum(int(table.known[r.slot] - table.computed[r.slot]) for r in prefilling)
            for request in waiting:
                prompts += len(request.prompt) + len(request.generated)
                if prompts > self._config.max_num_tokens_while_decoding:
                    self._may_pause = False
                    break

    def pauses(self, prompt_tokens: int) -> bool:
        """Whether the decode rows sit the step out, so that its prompts, with `prompt_tokens` to be computed,
        have it to themselves.

        A prompt that fills a step is a tenth faster without the rows of many streams, and so is the one that
        waits behind it; the streams lose half a decode step. Not for a backlog, which has no hurry.
        """
        pause = self._may_pause and prompt_tokens >= PAUSE_TOKENS
        self._owed = self._owed + REST if pause else max(0, self._owed - 1)
        return pause

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
