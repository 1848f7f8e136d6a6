# SPDX-License-Identifier: Apache-2.0
"""Open requests of one stub and the threads that send their responses."""

import itertools
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from flashinfer_backend.core.bounds import MIB
from flashinfer_backend.serving.engines import Engines
from flashinfer_backend.serving.generation import Chunk
from flashinfer_backend.transport.delivery_marks import DeliveryMarks
from flashinfer_backend.transport.stub_processes import SHARED_MEMORY, find_stub
from flashinfer_backend.triton_server.metrics import Metrics
from flashinfer_backend.triton_server.outputs import chunk_outputs
from flashinfer_backend.triton_server.sequence import OpenRequest, Sequence

# A response costs a round trip to the server, so threads overlap their waiting; more than two mostly wait
# for each other's turn in the interpreter (measured).
SENDER_THREADS = 2
# A server that is slower than the engine would queue ever more chunks before postprocessing, and first tokens
# behind them. A stream so far ahead of postprocessing waits, and what arrives meanwhile is one chunk.
AHEAD_NS = 50_000_000
MOST_WAIT_NS = 1_000_000_000  # postprocessing may have noted the older of two chunks it had at once
LOOK_AGAIN_S = 0.01
UNREAD = (
    "postprocessing got no chunk of this stream, so it was ended: its client has left, or has not requested"
    " text_output; request text_output next to the other outputs, or set stream to false"
)
# From here on a final response is sent without its flag, which costs a round trip more: nothing next to what
# it takes to copy it.
LARGE_BYTES = 1 << 16
# Of logits for the ensemble, before the server has to have sent them. It sends the ensemble's answers one
# after the other, JSON at 5 to 10 MiB of logits a second, and others should come between.
MOST_UNSENT_BYTES = MIB
CLOSE_S = 1.0  # a thread that waits for a server which has been killed never ends


class Responder:
    def __init__(self, pb_utils: Any) -> None:
        """pb_utils: the module triton_python_backend_utils."""
        self.engines: Engines  # these are set once they exist; the engines' links refer to us
        self.marks: DeliveryMarks
        self.metrics: Metrics
        self.probe: Callable[[], bool]  # waits until the server has sent what postprocessing got before
        self._pb = pb_utils
        self._open: dict[int, OpenRequest] = {}  # by id()
        self._unsent = 0  # bytes of logits for the ensemble; for their thread
        self._queues: list[queue.SimpleQueue[Sequence | None]] = []
        self._threads: list[threading.Thread] = []
        # The last one is for requests for logits: the server may take seconds for a response of theirs, and
        # those behind it wait.
        for _ in range(SENDER_THREADS + 1):
            waiting: queue.SimpleQueue[Sequence | None] = queue.SimpleQueue()
            self._queues.append(waiting)
            self._threads.append(threading.Thread(target=self._send_loop, args=(waiting,), daemon=True))
        for thread in self._threads:
            thread.start()
        self._next_queue = itertools.cycle(self._queues[:SENDER_THREADS])

    def open_requests(self) -> list[OpenRequest]:
        """The requests that have not had their final response."""
        return list(self._open.values())

    def open(
        self, sender: Any, request_id: str, outputs: set[str], logits: bool = False
    ) -> tuple[OpenRequest, Any]:
        """A new request and the queue to which its sequences are scheduled (`schedule` of Sequence). logits:
        whether it asks for some."""
        request = OpenRequest(lambda handle: self.engines.cancel(handle), sender, request_id, outputs)
        self._open[id(request)] = request
        waiting = self._queues[-1] if logits else next(self._next_queue)
        return request, waiting.put

    def refuse(self, sender: Any, message: str, code: Any) -> None:
        """Answers a request that was never opened with an error."""
        self.metrics.refused()
        self._send_error(sender.send, message, code)

    def drop(self, request: OpenRequest, message: str, code: Any) -> None:
        """Ends an open request with an error; what the engine still does for it is cancelled."""
        if self._open.pop(id(request), None) is None:
            return
        request.drop()
        if not any(sequence.handle for sequence in request.sequences):  # no engine has heard of it
            self.metrics.refused()
        else:
            for sequence in request.sequences:
                sequence.ended = True
                self.metrics.ended(sequence)
                self._free(sequence)
        self._send_error(request.fail, message, code)

    def stop(self, request_id: str) -> None:
        """Ends the requests with this id early; each is answered with what it has."""
        for request in self.open_requests():
            if request.request_id == request_id:
                request.cancel_all()

    def close(self) -> None:
        """Sends what is queued and ends the threads."""
        for waiting in self._queues:
            waiting.put(None)
        deadline = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _send_loop(self, waiting: queue.SimpleQueue[Sequence | None]) -> None:
        ahead: list[Sequence] = []
        look_again = 0.0
        while True:
            due = []
            try:
                sequence = waiting.get(timeout=LOOK_AGAIN_S if ahead else None)
                if sequence is None:
                    break
                due.append(sequence)
            except queue.Empty:
                pass
            if ahead and (now := time.monotonic()) >= look_again:  # streams that kept up come first
                due, ahead, look_again = due + ahead, [], now + LOOK_AGAIN_S
            for sequence in due:
                if self._is_ahead(sequence):
                    ahead.append(sequence)
                else:
                    self._send(sequence)
        for sequence in ahead:
            self._send(sequence)

    def _is_ahead(self, sequence: Sequence) -> bool:
        """Whether the stream has to wait until postprocessing has had more of its chunks. A stream that has
        ended does not wait: postprocessing gets no chunk of a client that has left."""
        if not sequence.sent_at or sequence.ending or not sequence.request.in_ensemble:
            return False
        if sequence.sent_at - self.marks.newest(sequence.handle) <= AHEAD_NS:
            return False
        # The server gives postprocessing no chunk of a client that has not requested its text.
        unseen = not self.marks.last(sequence.handle)
        if unseen and sequence.request.waited:
            return False
        waits = time.monotonic_ns() - sequence.sent_at < MOST_WAIT_NS
        sequence.request.waited |= unseen and not waits
        return waits

    def _send(self, sequence: Sequence) -> None:
        try:
            chunk = sequence.take()
            if chunk is not None:
                self._send_chunk(sequence, chunk)
            if sequence.failed:
                code = "UNAVAILABLE" if sequence.crowded_out else "INTERNAL"
                self.drop(sequence.request, sequence.failure or "", getattr(self._pb.TritonError, code))
        except Exception as error:  # a thread that ends would leave its requests open
            traceback.print_exc()
            self.drop(sequence.request, f"cannot send a response: {error}", self._pb.TritonError.INTERNAL)

    def _free(self, sequence: Sequence) -> None:
        """Tells the engine that the room of a sequence's logits is free: it has ended."""
        if sequence.handle and sequence.row.params.asks_for_logits:
            self.engines.freed(sequence.handle)

    def _send_chunk(self, sequence: Sequence, chunk: Chunk) -> None:
        request, now = sequence.request, time.monotonic_ns()
        outputs = chunk_outputs(sequence, chunk, now, request.outputs)
        tensors = [self._pb.Tensor(name, value) for name, value in outputs.items()]
        if not sequence.sent_at:
            self.marks.begin(sequence.handle, now)
        final = False
        if chunk.last:
            request.remaining -= 1
            final = request.remaining == 0
        if final and request.unread:
            self._send_error(request.fail, UNREAD, self._pb.TritonError.INTERNAL)
        elif final:
            size = sum(value.nbytes for value in outputs.values())
            if size > LARGE_BYTES:
                _check_fits(size)
            finish = request.finish if size <= LARGE_BYTES else request.finish_large
            finish(
                self._pb.InferenceResponse(output_tensors=tensors),
                flags=self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
            )
        elif tensors:
            request.sender.send(self._pb.InferenceResponse(output_tensors=tensors))
        if final:  # until then `drop` can still answer it
            self._open.pop(id(request), None)
        sequence.sent(chunk, now)
        if chunk.last:
            self.metrics.ended(sequence, chunk)
            self._free(sequence)
        if sequence.row.params.asks_for_logits and request.in_ensemble:
            self._let_others_pass(sum(value.nbytes for value in outputs.values()))

    def _let_others_pass(self, size: int) -> None:
        """After `size` bytes for the ensemble: waits for the server where there are many that it may not have
        sent. Other clients' answers do not wait for those that follow then."""
        self._unsent += size
        if self._unsent < MOST_UNSENT_BYTES:
            return
        self._unsent = 0
        try:
            self.probe()
        except Exception:  # as one that fails: the server is ending, or will be ended
            traceback.print_exc()

    def _send_error(self, send: Callable[..., None], message: str, code: Any) -> None:
        error = self._pb.TritonError(message, code)
        try:
            send(
                self._pb.InferenceResponse(output_tensors=[], error=error),
                flags=self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
            )
        except Exception:
            traceback.print_exc()


def _check_fits(size: int) -> None:
    """Raises ValueError if a response of this size cannot fit into the shared memory through which the
    server gets it: what this stub has of it, most of which is free, and what it can get.

    Trying would say so as well, but not to a client of a model that is not decoupled (`fail`).
    """
    stub = find_stub(os.getpid())
    try:
        info = os.statvfs(SHARED_MEMORY)
        most = info.f_bavail * info.f_frsize + (stub.memory_bytes() if stub else 0)
    except OSError:  # then the server's own words have to do
        return
    if size > most:
        raise ValueError(
            f"it has {size / MIB:.1f} MiB, and {SHARED_MEMORY} has room for {most / MIB:.1f} MiB. If you are"
            " running Triton inside docker, use '--shm-size' to give it more; or ask for fewer logits"
        )
