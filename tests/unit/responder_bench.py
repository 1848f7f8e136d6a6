# SPDX-License-Identifier: Apache-2.0
"""A responder whose engine, server and postprocessing are the test."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.transport import protocol
from flashinfer_backend.triton_server.requests import Row
from flashinfer_backend.triton_server.responder import Responder
from flashinfer_backend.triton_server.sequence import OpenRequest, ResponseIndices, Sequence
from waiting import wait_for

TIMEOUT_S = 120
OUTPUTS = {"output_ids", "sequence_length", "chunk", "finish_reason", "batch_index", "sequence_index"}
OUTPUTS |= {"context_logits"}
FINAL = 1


class Tensor:
    def __init__(self, name: str, value: np.ndarray) -> None:
        self.name, self.value = name, value


class Error:
    INTERNAL, UNAVAILABLE, INVALID_ARG = "internal", "unavailable", "invalid"

    def __init__(self, message: str, code: str) -> None:
        self.message, self.code = message, code


class Sender:
    """A response sender that can be held up, as a busy server would, and has only so much room. Like
    Triton's it is closed by the final flag and, not decoupled, by a response: also by one that failed."""

    def __init__(self, room: int | None = None, decoupled: bool = True) -> None:
        self.room, self.decoupled = room, decoupled
        self.closed, self.tried = False, 0
        self.sent: list[tuple[dict[str, np.ndarray], int, Error | None]] = []
        self.free, self.ended = threading.Event(), threading.Event()
        self.entered = threading.Event()
        self.free.set()

    def send(self, response: Any = None, flags: int = 0) -> None:
        assert not self.ended.is_set(), "a response after the final one"
        self.entered.set()
        assert self.free.wait(TIMEOUT_S)
        if self.closed or (response is not None and self.tried and not self.decoupled):
            raise RuntimeError("Unable to send response.")
        self.closed, self.tried = flags == FINAL, self.tried + 1
        tensors, error = {}, None
        if response is not None:
            tensors, error = {tensor.name: tensor.value for tensor in response.tensors}, response.error
        if self.room is not None and sum(value.nbytes for value in tensors.values()) > self.room:
            raise RuntimeError("Failed to increase the shared memory pool size")
        self.sent.append((tensors, flags, error))
        if flags == FINAL:
            self.ended.set()

    @property
    def ids(self) -> list[list[int]]:
        return [tensors["output_ids"].flatten().tolist() for tensors, _, _ in self.sent if tensors]


class Bench:
    """A responder whose engine is the test."""

    def __init__(self) -> None:
        pb_utils = SimpleNamespace(
            Tensor=Tensor,
            TritonError=Error,
            TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
            InferenceResponse=lambda output_tensors, error=None: SimpleNamespace(
                tensors=output_tensors, error=error
            ),
        )
        self.cancelled: list[int] = []
        self.responder = Responder(pb_utils)
        nothing = lambda *_: None  # noqa: E731
        self.responder.engines = SimpleNamespace(  # type: ignore[assignment]
            cancel=self.cancelled.append, freed=nothing
        )
        self.seen_ns: int | None = None  # sent_ns of the newest chunk that postprocessing had; None: of all
        self.last_ns = 1  # when postprocessing had a chunk, 0 for never
        newest = lambda _: time.monotonic_ns() if self.seen_ns is None else self.seen_ns  # noqa: E731
        self.responder.marks = SimpleNamespace(  # type: ignore[assignment]
            begin=nothing, newest=newest, last=lambda _: self.last_ns
        )
        self.responder.metrics = SimpleNamespace(ended=nothing, refused=nothing)  # type: ignore[assignment]
        self.probed, self.caught_up = threading.Event(), threading.Event()
        self.responder.probe = self._probe

    def open(
        self, *rows: Row, request_id: str = "", sender: Sender | None = None
    ) -> tuple[Sender, OpenRequest]:
        sender = sender or Sender()
        request, schedule = self.responder.open(
            sender, request_id, OUTPUTS, any(row.params.asks_for_logits for row in rows)
        )
        for index, row in enumerate(rows):
            indices = ResponseIndices(batch_index=index if len(rows) > 1 else None)
            request.sequences.append(Sequence(request, row, indices, schedule))
            request.sequences[-1].handle = 100 + index
        request.remaining = len(rows)
        return sender, request

    def _probe(self) -> bool:
        """As of a server that has sent all before it when `caught_up` is set."""
        self.probed.set()
        return self.caught_up.wait(TIMEOUT_S)

    def wait_closed(self) -> None:
        """Until no request is open any more, which is soon after their final responses."""
        wait_for(lambda: not self.responder.open_requests())


@pytest.fixture
def bench() -> Any:
    made = Bench()
    yield made
    made.responder.close()


def row(streaming: bool = True, **more: Any) -> Row:
    return Row(np.array([7, 8], np.int32), SamplingParams(max_tokens=9), streaming=streaming, **more)


def feed(sequence: Sequence, *tokens: int, end: int = protocol.RUNNING) -> None:
    for n, token in enumerate(tokens, start=1):
        sequence.on_token(token, end if n == len(tokens) else protocol.RUNNING, None)
