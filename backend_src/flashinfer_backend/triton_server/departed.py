# SPDX-License-Identifier: Apache-2.0
"""Clients of the ensemble that have left, found out by the llm step.

The server does not tell a running step of an ensemble that its client is gone. What it does: the
dynamic batcher refuses the steps that are scheduled from then on, so postprocessing no longer gets the
chunks of that client. Postprocessing notes the chunks it gets (transport/seen.py). A chunk that was sent
and not seen is either refused or still queued; the queue is first in, first out, and answers in order
(preserve_ordering), so once a probe sent after it has come back it was refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flashinfer_backend.transport.seen import SeenTable


class DepartedClients:
    """Compares what was sent with what was seen, from one round of checks to the next."""

    def __init__(self, seen: SeenTable, probe: Callable[[], bool]) -> None:
        """probe: sends postprocessing a request through the server and waits for the answer; False
        when that failed, which proves nothing."""
        self._seen = seen
        self._probe = probe
        self._sent_before: dict[int, int] = {}  # what the checks of the previous round were told
        self._sent_now: dict[int, int] = {}  # and those of this round

    def check(self, sent: Mapping[int, int], round_ends: bool = True) -> list[int]:
        """Handles of `sent` whose client has left.

        sent: by handle, for each open sequence that answers to the ensemble, the time.monotonic_ns()
        taken just before its latest chunk that has been handed to the server; 0 before the first.
        round_ends: False if `sent` has only some of the open sequences, and the next check has others.
        Only chunks that the previous round already knew are missed, so that those on their way are
        given one period.
        """
        before = self._sent_before
        missed = {h: before[h] for h in sent if h in before and self._seen.last(h) < before[h]}
        self._sent_now.update(sent)
        if round_ends:
            self._sent_before, self._sent_now = self._sent_now, {}
        if not missed or not self._probe():
            return []
        return [handle for handle, time in missed.items() if self._seen.last(handle) < time]
