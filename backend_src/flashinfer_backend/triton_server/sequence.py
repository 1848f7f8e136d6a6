# SPDX-License-Identifier: Apache-2.0
"""A Triton request that is open, and its sequences."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any

from flashinfer_backend.serving.generation import Chunk, Generation
from flashinfer_backend.transport import protocol
from flashinfer_backend.triton_server.requests import Row

FAILED = "Executor failed process requestId {} due to the following error: {}"


def of_ensemble(outputs: Container[str]) -> bool:
    """Whether the ensemble asks for these outputs of the model. It asks for what it maps, chunk among it; a
    client that names no outputs asks for all there are, also for context_phase_params, which the ensemble
    does not map."""
    return "chunk" in outputs and "context_phase_params" not in outputs


class OpenRequest:
    """A Triton request until its final response. Its sequences share one sender thread, so that the
    order of responses holds and the final flag goes with the last one."""

    def __init__(
        self, cancel: Callable[[int], None], sender: Any, request_id: str, outputs: set[str]
    ) -> None:
        """cancel: asks the engine to end the sequence with this handle."""
        self.sender, self.request_id, self.outputs = sender, request_id, outputs
        self.in_ensemble = of_ensemble(outputs)
        self.sequences: list[Sequence] = []
        self.remaining = 0  # sequences that have not ended
        # Ended since postprocessing got none of its chunks. Should somebody be there to read, say why.
        self.unread = False
        self.waited = False  # for a whole MOST_WAIT_NS, while postprocessing had not had any of its chunks
        self.cancel = cancel
        self._lock = threading.Lock()
        self._finished = False
        # One thread submits the sequences while others may end the request: on what either of them does the
        # other has to act.
        self._submitting = threading.Lock()
        self._ending = self._dropped = False

    def finish(self, response: Any, flags: Any) -> None:
        """Sends the final response, unless there has been one."""
        with self._lock:
            if not self._finished:
                self._finished = True
                self.sender.send(response, flags=flags)

    def finish_large(self, response: Any, flags: Any) -> None:
        """The same for a response that may not fit into shared memory. A final flag closes the sender, also
        if sending fails, and then the client could not be told: so the flag is sent separately."""
        with self._lock:
            if not self._finished:
                self.sender.send(response)
                self._finished = True
                self.sender.send(flags=flags)

    def fail(self, response: Any, flags: Any) -> None:
        """Sends an error as the final response. After a response that could not be sent, a model that is not
        decoupled may send no other: then the request ends without, and the server makes an error of it."""
        with self._lock:
            if not self._finished:
                self._finished = True
                try:
                    self.sender.send(response, flags=flags)
                except Exception:
                    self.sender.send(flags=flags)
                    raise

    def is_cancelled(self) -> bool:
        """Whether the client has left; not to be asked of the server once the request is finished."""
        with self._lock:
            return not self._finished and bool(self.sender.is_cancelled())

    def submit(self, sequence: Sequence, submit: Callable[[], int]) -> bool:
        """Has `submit` hand a sequence to the engine; False if the request has been dropped meanwhile."""
        with self._submitting:
            if self._dropped:
                return False
            submit()
            if self._ending and sequence.handle:
                self.cancel(sequence.handle)
            return True

    def cancel_all(self) -> None:
        """Asks the engine to end all sequences, also those that are still to be submitted; each is answered
        with what it has."""
        with self._submitting:
            self._ending = True
            for sequence in list(self.sequences):
                if sequence.handle and not sequence.ended:
                    self.cancel(sequence.handle)

    def drop(self) -> None:
        """The same for a request that is answered with an error: no more of its sequences are submitted."""
        with self._submitting:
            self._dropped = True
        self.cancel_all()


@dataclass
class Reported:
    """Further values of a stream's chunks so far, for chunks that repeat them."""

    log_probs: list[float] = field(default_factory=list)  # only where each chunk has all so far
    context_logits: memoryview | None = None  # the last chunk has them once more
    perf: protocol.Perf | None = None


@dataclass
class ResponseIndices:
    """Which of a request's sequences a response belongs to; None where the request has only one."""

    batch_index: int | None = None
    sequence_index: int | None = None


class Sequence(Generation):
    """Emptied by the one sender thread that its request belongs to."""

    row: Row

    def __init__(
        self, request: OpenRequest, row: Row, indices: ResponseIndices, schedule: Callable[[Sequence], None]
    ) -> None:
        """schedule: has a sender thread call take() soon; it may be called once too often."""
        super().__init__(row, lambda handle: request.cancel(handle), schedule)
        self.request, self.indices = request, indices
        self.reported = Reported()
        self.sent_at = 0  # time.monotonic_ns() just before the latest chunk was sent, 0: none was

    def on_failure(self, message: str, refused: bool) -> None:
        # TensorRT-LLM's wording; the handle is what the engine's log calls the request.
        super().on_failure(message if refused else FAILED.format(self.handle, message), refused)

    def sent(self, chunk: Chunk, now: int = 0) -> None:
        """Notes that the server has taken a chunk at the earliest at `now`."""
        self.sent_at = now
        super().sent(chunk)
