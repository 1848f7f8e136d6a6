# SPDX-License-Identifier: Apache-2.0
"""When a generation's tokens came."""

from __future__ import annotations

import time


class SequenceTiming:
    """When a sequence's tokens came, in seconds of time.monotonic()."""

    __slots__ = ("counted", "first", "last", "longest", "queued", "sent", "started", "tokens")

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.first = self.last = self.longest = 0.0
        self.queued: float | None = None  # seconds until its first step, or its end before that
        self.tokens = 0  # arrived from the engine
        self.sent = 0  # tokens in responses; fewer where a stop word ends the sequence
        self.counted = False

    def token(self) -> None:
        """A token has arrived."""
        now = time.monotonic()
        if self.tokens:
            self.longest = max(self.longest, now - self.last)
        else:
            self.first = now
        self.last = now
        self.tokens += 1
