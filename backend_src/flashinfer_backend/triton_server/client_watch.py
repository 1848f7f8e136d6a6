# SPDX-License-Identifier: Apache-2.0
"""Looks for clients that left, so that their sequences end.

The server tells which direct clients are gone, but no running step of an ensemble that its client is. What it
does: the dynamic batcher refuses the steps that are scheduled from then on, so postprocessing no longer gets
the chunks of that client. Postprocessing marks what it gets (transport/delivery_marks.py). A chunk that was
sent and not marked is either refused or still queued; the queue is first in, first out, and answers in order
(preserve_ordering), so once a probe sent after it has come back it was refused.
"""

import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from flashinfer_backend.transport.delivery_marks import DeliveryMarks
from flashinfer_backend.triton_server.sequence import OpenRequest

# Sequences that one check looks at. More would keep the interpreter from the sender threads for too long, and
# asking about a direct client takes a round trip to the server.
MOST_LOOKS = 1024
CLOSE_S = 1.0  # the thread may wait indefinitely for a killed server


class DepartedClients:
    """Compares what was sent with what was seen, from one round of checks to the next."""

    def __init__(self, marks: DeliveryMarks, probe: Callable[[], bool]) -> None:
        """probe: sends postprocessing a request through the server and waits for the answer; False
        when that failed, which proves nothing."""
        self._marks = marks
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
        missed = {h: before[h] for h in sent if h in before and self._marks.last(h) < before[h]}
        self._sent_now.update(sent)
        if round_ends:
            self._sent_before, self._sent_now = self._sent_now, {}
        if not missed or not self._probe():
            return []
        return [handle for handle, time in missed.items() if self._marks.last(handle) < time]


class ClientWatch:
    """Asks the server about each direct client, and finds those of the ensemble by the chunks that
    postprocessing did not get.

    Up to MOST_LOOKS open sequences are looked at every period; with more a round takes several periods.
    """

    def __init__(
        self,
        open_requests: Callable[[], list[OpenRequest]],
        cancel: Callable[[int], None],
        marks: DeliveryMarks,
        probe: Callable[[], bool],
        period_s: float,
    ) -> None:
        """cancel: ends the sequence with a handle. period_s: 0 never looks."""
        self._open_requests, self._cancel = open_requests, cancel
        self._marks, self._departed = marks, DepartedClients(marks, probe)
        self._period_s = period_s
        self._round: list[OpenRequest] = []  # those that this round has not come to, the next one last
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="client watch", daemon=True)
        if period_s:
            self._thread.start()

    def check(self) -> None:
        """One look at every open request, or at the next MOST_LOOKS sequences of them."""
        sent: dict[int, int] = {}
        requests: dict[int, OpenRequest] = {}
        if not self._round:
            self._round = self._open_requests()
            self._round.reverse()
        looks = 0
        while self._round and looks < MOST_LOOKS:
            request = self._round.pop()
            looks += len(request.sequences) or 1
            if request.in_ensemble:
                running = [s for s in request.sequences if s.handle and not s.ended]
                sent.update({s.handle: s.sent_at for s in running})
                requests.update(dict.fromkeys((s.handle for s in running), request))
            elif request.is_cancelled():
                request.cancel_all()
        for handle in self._departed.check(sent, round_ends=not self._round):
            request = requests[handle]
            request.unread = not any(self._marks.last(s.handle) for s in request.sequences if s.sent_at)
            self._cancel(handle)

    def close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._closing.wait(self._period_s):
            try:
                self.check()
            except Exception:  # looking again may work; not looking any more would go unnoticed
                traceback.print_exc()


def postprocessing_probe(pb_utils: Any, model_name: str) -> Callable[[], bool]:
    """A request without tokens to postprocessing that goes through its queue like any chunk; True when
    it has been answered."""

    def probe() -> bool:
        request = pb_utils.InferenceRequest(
            model_name=model_name,
            requested_output_names=["OUTPUT"],
            inputs=[
                pb_utils.Tensor("TOKENS_BATCH", np.zeros((1, 1, 1), np.int32)),
                pb_utils.Tensor("SEQUENCE_LENGTH", np.zeros((1, 1), np.int32)),
            ],
        )
        return not request.exec().has_error()

    return probe
