# SPDX-License-Identifier: Apache-2.0
"""When to plan the next step while one runs.

Planned at once, the next step would leave out every request that arrives while the device is busy:
such a request would wait for the rest of the running step and for a whole further one. So the loop
goes on receiving until shortly before the running step should end. Only steps of decodes alone are
timed; their duration repeats.
"""

from __future__ import annotations

from flashinfer_backend.engine.step import StepPlan

SAFETY_S = 0.0005  # for waking up, beside the host's own time
ROWS_PER_CLASS = 8  # steps of about as many rows take about as long


class Pacer:
    """Learns how long steps run on the device. Times are seconds of one monotonic clock.

    A step's duration can be seen only if the next one was launched before it ended. When it was not,
    the plan came too late: the estimate shrinks, so that waiting too long can never feed itself.
    """

    def __init__(self) -> None:
        self._duration: dict[int, float] = {}
        self._host = 0.001
        self._began: float | None = None  # when the running step began; None: not known

    def deadline(self, running: StepPlan) -> float:
        """When to plan the step after `running`; a time in the past where nothing is known."""
        duration = self._duration.get(self._class(running))
        if self._began is None or duration is None or running.num_prefill:
            return 0.0
        return self._began + duration - 1.5 * self._host - SAFETY_S

    def planned(self, seconds: float) -> None:
        """The host took this long to plan and launch a step."""
        self._host += 0.1 * (seconds - self._host)

    def finished(self, plan: StepPlan, now: float, late: bool, next_runs: bool) -> None:
        """`plan`'s step has ended. late: it had ended before the next one was launched. next_runs:
        another step has been launched behind it."""
        if self._began is not None and not plan.num_prefill:
            key, seconds = self._class(plan), now - self._began
            known = self._duration.get(key, seconds)
            if late:
                self._duration[key] = 0.9 * known
            else:
                self._duration[key] = min(seconds, known + 0.05 * (seconds - known))
        self._began = now if next_runs else None

    @staticmethod
    def _class(plan: StepPlan) -> int:
        return plan.num_decode // ROWS_PER_CLASS
