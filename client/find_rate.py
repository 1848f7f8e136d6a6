# SPDX-License-Identifier: Apache-2.0
"""The highest request rate at which a server keeps within limits, found by bisection."""

import re
import time
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from client.metrics import percentile_name

METRIC = re.compile(r"(mean|median|p\d+(?:\.\d+)?)_(ttft|tpot|itl|latency)")


@dataclass(frozen=True)
class Limit:
    """A metric of a summary, under the name that it has there (median_ttft, p99_ttft), and what it must not
    exceed, in ms."""

    metric: str
    ms: float

    @property
    def percentile(self) -> float | None:
        """The percentile that the summary must hold; None for the mean."""
        which = self.metric.partition("_")[0]
        return {"mean": None, "median": 50.0}.get(which, float(which[1:]) if which[0] == "p" else None)

    def value(self, summary: dict[str, Any]) -> float | None:
        """The metric in ms; None where no request was completed."""
        value = summary[f"{self.metric}_ms"]
        return None if value is None else float(value)


def limit(text: str) -> Limit:
    """`p99_ttft=200`."""
    metric, _, number = text.partition("=")
    try:
        ms = float(number)
    except ValueError:
        ms = -1.0
    if not METRIC.fullmatch(metric) or not 0 < ms < float("inf"):
        raise ArgumentTypeError(
            f"{text!r} must have the form p99_ttft=200: mean, median or a percentile of ttft, tpot, itl or"
            " latency, and ms over 0"
        )
    percentile = Limit(metric, ms).percentile
    if percentile is None:
        return Limit(metric, ms)
    if percentile > 100:
        raise ArgumentTypeError(f"{text!r}: a percentile is at most 100")
    return Limit(f"{percentile_name(percentile)}_{metric.partition('_')[2]}", ms)


def broken(summary: dict[str, Any], limits: list[Limit]) -> str | None:
    """Why a run does not keep within the limits, or None. Raises ValueError for a limit of what no answer
    had, such as the tpot of answers of one token."""
    if summary["failed"]:
        return f"{summary['failed']} requests failed"
    if waited := summary.get("requests_that_waited_for_a_slot"):  # no time holds that wait
        return f"{waited} requests waited for one of --max-concurrency: the rate was not offered"
    for each in limits:
        value = each.value(summary)
        if value is None:
            raise ValueError(
                f"--limit {each.metric}={each.ms:g}: no answer has that time; tpot takes answers of two"
                " tokens, itl of two chunks"
            )
        if value > each.ms:
            return f"{each.metric} {value:.1f} ms is over {each.ms:g}"
    return None


class CannotTry(Exception):
    """There is no load of this rate: the search ends with what it has found."""


@dataclass(frozen=True)
class Search:
    """From low to high in requests/s, until the bounds are within `tolerance` of each other (a share) or
    `seconds` are over; a try begins only if one fits in, judged by the longest so far."""

    low: float
    high: float
    seconds: float
    tolerance: float = 0.05

    def run(self, attempt: Callable[[float], bool], say: Callable[[str], None]) -> tuple[float | None, bool]:
        """(the highest rate that attempt(rate) said True to, whether the search came to its end). attempt may
        raise CannotTry. The rate
        doubles from low while it is good, then the span between good and bad is halved."""
        began = time.monotonic()
        longest = 0.0
        good: float | None = None
        bad: float | None = None
        rate: float = self.low
        while True:
            if time.monotonic() - began + longest > self.seconds:
                say(f"time is over: {self.seconds:g} s")
                return good, False
            tried = time.monotonic()
            try:
                if attempt(rate):
                    good = rate
                else:
                    bad = rate
            except CannotTry as error:
                say(f"{rate:.4g} requests/s cannot be tried: {error}")
                return good, False
            longest = max(longest, time.monotonic() - tried)
            if good is None:
                say(f"even {self.low:g} requests/s is too much: begin lower")
                return None, True
            if good >= self.high:
                say(f"{self.high:g} requests/s, the highest to try, is within the limits")
                return good, True
            if bad is not None and bad - good <= self.tolerance * bad:
                return good, True
            rate = min(self.high, 2 * good) if bad is None else (good + bad) / 2
