# SPDX-License-Identifier: Apache-2.0
"""How many tokens a step may have, and which prompts share one."""

from __future__ import annotations

import itertools
import time

import numpy as np

from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.request import Request
from flashinfer_backend.core.tuned import Scheduling
from flashinfer_backend.scheduler.request_queue import RequestQueue
from flashinfer_backend.scheduler.slot_table import SlotTable

GATHERING = 512  # steps from a backlog's beginning in which its requests may still arrive


class StepBudget:
    """How many tokens the next step may have, and whether decode rows are in it. Each is asked once a step,
    `tokens` before `pauses`.

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
        self._fed = False  # whether requests arrived later than those of a batch do
        self._arrived = 0  # requests, by the last step
        self._may_pause = False
        self._owed = 0  # steps with decode rows, for those without
        self._piece = 0  # tokens of prompts in a step, since prompts wait beside slow steps

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
        crowded = len(waiting) > table.free
        self._notice_arrivals(waiting, idle=not len(decoding) and not prefilling)
        spreads = config.schedule_policy == "lof" and config.enable_chunked_context and not self._fed
        self._backlog = spreads and bool(waiting) and (self._backlog or crowded)
        rested = self._owed <= (numbers.pauses - 1) * numbers.rest
        begun = sum(int(table.known[r.slot] - table.computed[r.slot]) for r in prefilling)
        left = begun + waiting_tokens
        slow_s = self._slow_s(len(decoding), decode_s)
        self._may_pause = (
            len(decoding) >= numbers.pause_rows
            and rested
            and not (crowded or self._backlog)
            # Nor for more prompts than streams may wait for, or for parts that are cut for steps with them.
            and left <= config.max_num_tokens_while_decoding
            and slow_s is None
        )
        limit = config.max_num_tokens
        if not config.enable_chunked_context:
            return limit
        if len(decoding):
            limit = min(limit, config.max_num_tokens_while_decoding)
        if not self._backlog:
            return min(limit, self._spread(len(decoding), prefilling, waiting, left, slow_s))
        to_generate = table.max_new[decoding] - table.planned_outputs[decoding]
        started = [table.prompt_len[r.slot] + r.max_new - table.computed[r.slot] for r in prefilling]
        work = waiting.tokens + int(to_generate.sum()) + int(sum(started))
        longest = max([waiting.longest, int(to_generate.max(initial=1)), *(r.max_new for r in prefilling)])
        steps = max(1, longest - waiting.tail.max_new)  # the last prompt's answer comes behind it
        return min(limit, max(numbers.filled_step, -(-work // steps)))

    def _slow_s(self, streams: int, decode_s: float | None) -> float | None:
        """`decode_s` where prompts beside so many streams are cut into equal parts, else None."""
        numbers = self._numbers
        if decode_s is None or decode_s * 1000 < numbers.slow_step_ms or numbers.slow_steps < 2:
            return None
        cut = self._config.enable_chunked_context and numbers.slow_rows <= streams < numbers.slow_tokens
        return decode_s if cut else None

    def _spread(
        self,
        streams: int,
        prefilling: list[Request],
        waiting: RequestQueue,
        left: int,
        slow_s: float | None,
    ) -> int:
        """The most tokens of a step beside so many streams, so that these wait less for prompts, of which so
        many tokens are left. slow_s: as _slow_s has it.

        What a step has beside the tokens of its streams costs nearly nothing until the step is filled, and
        the streams' next steps have such room, too. So they wait less for prompts that are spread over a few
        of them, which have their first token some steps later. Prompts that would take many steps are
        computed at once, and so are those that wait when the first of them has waited for long.

        Where a step is slow, that would be before the second one. Prompts are cut into equal parts there, as
        a further token costs more the fuller a step is; into fewer when the first has waited for long.
        """
        numbers = self._numbers
        whole = self._config.max_num_tokens
        if not prefilling:
            self._piece = 0
            if not waiting:
                return whole
        oldest = min(r.arrival_ns for r in (*prefilling, *itertools.islice(waiting, 1)))
        waited_s = (time.time_ns() - oldest) / 1e9 if oldest else 0.0
        if slow_s is not None:
            steps = numbers.slow_steps
            steps -= waited_s > steps * slow_s
            self._piece = max(self._piece, -(-left // steps))
            return max(numbers.slow_tokens, streams + self._piece)
        if numbers.short_steps < 2 or streams < numbers.pause_rows or waited_s * 1000 > numbers.short_wait_ms:
            return whole
        room = (numbers.short_tokens - streams) * numbers.short_steps
        return numbers.short_tokens if left <= room else whole

    def _notice_arrivals(self, waiting: RequestQueue, idle: bool) -> None:
        if idle and not waiting:
            self._age, self._fed = 0, False
        elif self._backlog or self._age:
            self._age += 1
            self._fed = self._fed or (self._age > GATHERING and waiting.arrived > self._arrived)
        self._arrived = waiting.arrived

    def pauses(self, prompt_tokens: int) -> bool:
        """Whether the decode rows sit the step out, so that its prompts, with `prompt_tokens` to be computed,
        have it to themselves.

        A prompt that fills a step is a tenth faster without the rows of many streams, and so is the one that
        waits behind it; the streams lose half a decode step. Not for a backlog, which has no hurry.
        """
        numbers = self._numbers
        pause = self._may_pause and prompt_tokens >= numbers.pause_tokens
        self._owed = self._owed + numbers.rest if pause else max(0, self._owed - 1)
        return pause

    def joins(self, waiting: RequestQueue, together: int, tokens: int) -> bool:
        """Whether a prompt with `tokens` to compute should share a step that has `together` already.

        More tokens than keep the device busy keep the prompts before waiting and hardly help those behind.
        Only a backlog of more than a step is worked off in the fewest steps.
        """
        if not together or together + tokens <= self._numbers.prompts_together:
            return True
        return waiting.known_tokens > self._config.max_num_tokens
