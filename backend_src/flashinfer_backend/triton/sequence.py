# SPDX-License-Identifier: Apache-2.0
"""One sequence of a Triton request."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from flashinfer_backend.serving.generation import Chunk, Generation
from flashinfer_backend.triton.outputs import Place, Reported
from flashinfer_backend.triton.requests import Row

if TYPE_CHECKING:
    from flashinfer_backend.triton.responder import OpenRequest

FAILED = "Executor failed process requestId {} due to the following error: {}"


class Sequence(Generation):
    """Emptied by the one sender thread that its request belongs to."""

    row: Row

    def __init__(
        self, request: OpenRequest, row: Row, place: Place, schedule: Callable[[Sequence], None]
    ) -> None:
        """schedule: has a sender thread call take() soon; it may be called once too often."""
        super().__init__(row, lambda handle: request.cancel(handle), lambda: schedule(self))
        self.request, self.place = request, place
        self.reported = Reported()
        self.sent_at = 0  # time.monotonic_ns() just before the latest chunk was sent, 0: none was

    def on_failure(self, message: str, refused: bool) -> None:
        # TensorRT-LLM's wording; the handle is what the engine's log calls the request.
        super().on_failure(message if refused else FAILED.format(self.handle, message), refused)

    def sent(self, chunk: Chunk, now: int = 0) -> None:
        """Notes that the server has taken a chunk at the earliest at `now`."""
        self.sent_at = now
        super().sent(chunk)
