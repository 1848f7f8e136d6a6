# SPDX-License-Identifier: Apache-2.0
"""How far a run is: what its worker processes count in shared memory, and a line for those who wait."""

from __future__ import annotations

import math
import statistics
import sys
from dataclasses import dataclass
from typing import Any

SENT, DONE, FAILED, TOKENS, FIELDS = range(5)


class Counters:
    """Shared by the processes of a run. Each worker adds to a row of its own, so nothing needs a lock; a
    reader may see one that is a little behind."""

    def __init__(self, context: Any, workers: int, requests: int) -> None:
        """context: of multiprocessing. requests: how many there are, later turns included."""
        self._rows = context.RawArray("q", workers * FIELDS)
        self._ttft = context.RawArray("f", requests)
        self._base = 0

    def for_worker(self, number: int) -> Counters:
        """The same memory, to count in the row of this worker."""
        mine = object.__new__(Counters)
        mine._rows, mine._ttft, mine._base = self._rows, self._ttft, number * FIELDS
        return mine

    def of(self, index: int) -> RequestCount:
        return RequestCount(self._rows, self._ttft, self._base, index)

    def snapshot(self, seconds: float) -> Snapshot:
        """What all workers have counted, that many seconds after the start."""
        rows = self._rows[:]
        sums = [sum(rows[which::FIELDS]) for which in range(FIELDS)]
        times = [t for t in self._ttft[:] if t > 0]
        first = statistics.median(times) if times else math.nan
        return Snapshot(seconds, len(self._ttft), sums[SENT], sums[DONE], sums[FAILED], sums[TOKENS], first)


class RequestCount:
    """One request's share of the counters: each chunk counts as a token until the request has ended."""

    def __init__(self, rows: Any, ttft: Any, base: int, index: int) -> None:
        self._rows, self._ttft, self._base, self._index = rows, ttft, base, index
        self._chunks = 0

    def sent(self) -> None:
        self._rows[self._base + SENT] += 1

    def read(self, seconds: float, chunks: int) -> None:
        """A read so long after sending."""
        if not self._chunks:
            self._ttft[self._index] = seconds
        self._chunks += chunks
        self._rows[self._base + TOKENS] += chunks

    def ended(self, good: bool, tokens: int) -> None:
        self._rows[self._base + (DONE if good else FAILED)] += 1
        if good:
            self._rows[self._base + TOKENS] += tokens - self._chunks


@dataclass(frozen=True)
class Snapshot:
    """So far: requests sent, done and failed, output tokens (of running requests their chunks), and the
    median TTFT in seconds (NaN without one). Streams that turn out wrong when they are read count as done
    here."""

    seconds: float
    total: int
    sent: int
    done: int
    failed: int
    tokens: int
    ttft: float

    def line(self) -> str:
        """In up to some 70 columns."""
        rate = self.tokens / self.seconds if self.seconds > 0 else 0.0
        first = "-" if math.isnan(self.ttft) else f"{self.ttft * 1e3:,.0f} ms"
        running = self.sent - self.done - self.failed
        return (
            f"{self.done}/{self.total} done, {running} running, {self.failed} failed, {rate:,.0f} tok/s,"
            f" TTFT {first}"
        )


class Display:
    """A bar on standard error while a run lasts; nothing where that is no terminal."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._live: Any = None
        self._bar: Any = None

    def __enter__(self) -> Display:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = TextColumn("{task.description}"), BarColumn(bar_width=None), TimeElapsedColumn()
            self._bar = Progress(*columns, expand=True)
            self._bar.add_task(self._title, total=None)
            self._live = Live(self._bar, console=Console(stderr=True), transient=True, refresh_per_second=5)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, snapshot: Snapshot) -> None:
        """Updates the bar, and the line below."""
        if self._live is not None:
            from rich.console import Group
            from rich.text import Text

            finished = snapshot.done + snapshot.failed
            self._bar.update(self._bar.task_ids[0], total=snapshot.total, completed=finished)
            self._live.update(Group(self._bar, Text(snapshot.line(), overflow="ellipsis", no_wrap=True)))
