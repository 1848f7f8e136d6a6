# SPDX-License-Identifier: Apache-2.0
"""When to plan the next step while one runs.

Planned at once, the next step would leave out every request that arrives while the device is busy:
such a request would wait for the rest of the running step and for a whole further one. So the loop
goes on receiving until shortly before the running step should end.
"""

import math

from flashinfer_backend.core.step import StepPlan

SAFETY_S = 0.0003  # for waking up, on top of the host's own time
TOKENS_PER_CLASS = 8  # decode steps of about as many tokens take about as long
CLASSES_PER_OCTAVE = 8  # of tokens in steps with prompts: their time per token is alike

_Class = tuple[bool, int]


class Pacer:
    """Learns how long steps run on the device. Times are seconds of one monotonic clock.

    The calls for a step are planned, then finished; one step may be planned before another is finished.
    A step's end is seen only if the next one was given to the device before. If it was not, the plan came
    too late: the estimate shrinks, so that waiting too long can never feed itself. It shrinks at once when a
    step is seen to have ended before its deadline.

    decode_s: how long steps without prompts run, of as many tokens as the last one that was measured; None
    before the first.
    """

    def __init__(self) -> None:
        self.decode_s: float | None = None
        self._duration: dict[_Class, float] = {}  # per token where there are prompts
        self._lead = {False: 0.001, True: 0.002}  # from planning to the device's first work; by prompts
        self._began: float | None = None  # when the running step began; None: not known
        self._next: tuple[float, bool] | None = None  # the step behind it: when given; too late?

    def deadline(self, running: StepPlan, prompts_wait: bool) -> float:
        """When to plan the step after `running`, which will have prompts if any wait; a time in the past
        where nothing is known."""
        duration = self._duration.get(self._class(running))
        if self._began is None or duration is None:
            return 0.0
        return self._began + duration * _scale(running) - 1.25 * self._lead[prompts_wait] - SAFETY_S

    def planned(
        self, plan: StepPlan, began: float, given: float, running: StepPlan | None, late: bool
    ) -> None:
        """`plan`, begun at `began`, is given to the device now. running: the step before it, if unread;
        late: it has ended already."""
        prompts = bool(plan.num_prompt_tokens)
        self._lead[prompts] += 0.1 * (given - began - self._lead[prompts])
        if running is None:
            self._began = given
            return
        self._next = given, late
        if late and self._class(running) in self._duration:
            self._duration[self._class(running)] *= 0.9

    def ended_early(self, running: StepPlan, now: float) -> None:
        """The running step has ended before its deadline."""
        assert self._began is not None  # else there was no deadline
        key = self._class(running)
        self._duration[key] = min(self._duration[key], (now - self._began) / _scale(running))

    def interrupted(self) -> None:
        """No step is running: what was planned was not launched."""
        self._began = self._next = None

    def finished(self, plan: StepPlan, now: float) -> None:
        """`plan`'s step has ended and is read."""
        given, late = self._next or (None, False)
        if self._began is not None and given is not None and not late:
            key, seconds = self._class(plan), (now - self._began) / _scale(plan)
            known = self._duration.get(key, seconds)
            self._duration[key] = min(seconds, known + 0.05 * (seconds - known))
            if not plan.num_prompt_tokens:
                self.decode_s = self._duration[key]
        self._began = given if late else None if given is None else now
        self._next = None

    @staticmethod
    def _class(plan: StepPlan) -> _Class:
        if plan.num_prompt_tokens:
            return True, int(CLASSES_PER_OCTAVE * math.log2(plan.num_tokens))
        return False, plan.num_tokens // TOKENS_PER_CLASS


def _scale(plan: StepPlan) -> int:
    return plan.num_tokens if plan.num_prompt_tokens else 1
