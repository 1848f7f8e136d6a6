# SPDX-License-Identifier: Apache-2.0
"""Looks for clients that left, so that their sequences end."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from flashinfer_backend.transport.seen import SeenTable
from flashinfer_backend.triton_server.departed import DepartedClients
from flashinfer_backend.triton_server.sequence import OpenRequest

# Sequences that one check looks at. More would keep the interpreter from the sender threads for too long, and
# asking about a direct client takes a round trip to the server.
MOST_LOOKS = 1024
CLOSE_S = 1.0  # the thread may wait indefinitely for a killed server


class ClientWatch:
    """Asks the server about each direct client, and finds those of the ensemble, of which the server says
    nothing, by the chunks that postprocessing did not get.

    Up to MOST_LOOKS open sequences are looked at every period; with more a round takes several periods.
    """

    def __init__(
        self,
        open_requests: Callable[[], list[OpenRequest]],
        cancel: Callable[[int], None],
        seen: SeenTable,
        probe: Callable[[], bool],
        period_s: float,
    ) -> None:
        """cancel: ends the sequence with a handle. period_s: 0 never looks."""
        self._open_requests, self._cancel = open_requests, cancel
        self._seen, self._departed = seen, DepartedClients(seen, probe)
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
            request.unread = not any(self._seen.last(s.handle) for s in request.sequences if s.sent_at)
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
