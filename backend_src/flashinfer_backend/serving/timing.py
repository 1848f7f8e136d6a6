# SPDX-License-Identifier: Apache-2.0
"""When a generation's tokens came, and the histograms that both APIs make of that."""

import time

LENGTHS = (10, 50, 100, 500, 1000)  # tokens
INTERVALS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5)  # s
WAITS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)  # s
TOTALS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300)  # s


# What is known of a sequence at its end, in tokens and seconds: its description and buckets.
QUANTITIES: dict[str, tuple[str, tuple[float, ...]]] = {
    "input": ("Tokens of the prompt", LENGTHS),
    "output": ("Tokens of the completion", LENGTHS),
    "ttft": ("From a sequence's submission to its first token", WAITS),
    "itl": ("Time between two tokens, mean over a sequence", INTERVALS),
    "longest_itl": ("Time between two tokens, the longest of a sequence", INTERVALS),
    "e2e": ("From a sequence's submission to its last chunk", TOTALS),
    "queue": ("From arrival in the engine until a sequence was first scheduled", WAITS),
}


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
        now = time.monotonic()
        if self.tokens:
            self.longest = max(self.longest, now - self.last)
        else:
            self.first = now
        self.last = now
        self.tokens += 1

    def quantities(self, prompt: int) -> dict[str, float]:
        """Those of QUANTITIES that are known at the sequence's end. prompt: its tokens."""
        found = {"input": prompt, "output": self.sent, "e2e": time.monotonic() - self.started}
        if self.tokens:
            found["ttft"] = self.first - self.started
        if self.tokens > 1:
            found |= {"itl": (self.last - self.first) / (self.tokens - 1), "longest_itl": self.longest}
        return found if self.queued is None else found | {"queue": self.queued}
