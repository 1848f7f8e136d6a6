# SPDX-License-Identifier: Apache-2.0
"""When what has ended unexpectedly is started again: one rule for engines, for the server and for the
processes of the OpenAI API."""

import time

from flashinfer_backend.transport import rundir

LONGEST_DELAY_S = 8.0
STABLE_AFTER_S = 60.0  # what has lived so long does not count as a failed attempt
STOPPED_S = 5.0  # a process that is stopped (SIGSTOP) for so long is taken for dead
RESTARTS = 0  # by default: of which none lived STABLE_AFTER_S; 0: any number


class Restarts:
    """Counts the starts of one process that its caller keeps running."""

    def __init__(self, most: int = RESTARTS) -> None:
        """most: starts in a row that did not live for STABLE_AFTER_S; 0: any number."""
        self._most, self._failures = most, 0

    def after(self, lived_s: float) -> float | None:
        """Seconds until the next start of what has ended after it was ready for lived_s (0: it never was):
        none after the first failure in a row, then twice as many each time, up to LONGEST_DELAY_S. None where
        it is not started again."""
        self._failures = 1 if lived_s > STABLE_AFTER_S else self._failures + 1
        if self._most and self._failures > self._most:
            return None
        return 0.0 if self._failures == 1 else min(0.5 * 2.0 ** min(self._failures - 2, 30), LONGEST_DELAY_S)


class Stopped:
    """Since when processes have been stopped by a signal. To be asked again and again."""

    def __init__(self) -> None:
        self._since: dict[tuple[int, int | None], float] = {}

    def for_long(self, pid: int, start_ticks: int | None) -> bool:
        """Whether this process has been for STOPPED_S. start_ticks: pids are used again."""
        process = pid, start_ticks
        if not rundir.is_stopped(pid) or rundir.start_ticks(pid) != start_ticks:
            self._since.pop(process, None)
            return False
        now = time.monotonic()
        return now > self._since.setdefault(process, now) + STOPPED_S
