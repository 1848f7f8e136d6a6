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
    """Compares what was sent with what was seen, from one check to the next."""

    def __init__(self, seen: SeenTable, probe: Callable[[], bool]) -> None:
        """probe: sends postprocessing a request through the server and waits for the answer; False
        when that failed, which proves nothing."""
        self._seen = seen
        self._probe = probe
        self._sent_before: dict[int, int] = {}  # what the previous check was told

    def check(self, sent: Mapping[int, int]) -> list[int]:
        """Handles whose client has left.

        sent: by handle, for each open sequence that answers to the ensemble, the time.monotonic_ns()
        taken just before its latest chunk that has been handed to the server; 0 before the first.
        Only chunks that the previous check already knew are missed, so that those on their way are
        given one period.
        """
        missed = {h: t for h, t in self._sent_before.items() if h in sent and self._seen.last(h) < t}
        self._sent_before = dict(sent)
        if not missed or not self._probe():
            return []
        return [handle for handle, time in missed.items() if self._seen.last(handle) < time]
