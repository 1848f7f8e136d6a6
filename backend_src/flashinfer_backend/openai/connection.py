# SPDX-License-Identifier: Apache-2.0
"""Limits of connections that uvicorn has none for: how long a request may take to arrive, how long its
headers may be, and how many connections there are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from flashinfer_backend.openai.errors import RETRY_S, ApiError
from flashinfer_backend.openai.request_ids import new_id

MOST_HEADER_BYTES = 1 << 16  # of a request's line and headers, beside what came with their first byte

# A client's request has this long to follow its connection, however many others come at the same time.
ARRIVES_S = 0.05
# Between two looks whether a client that sends nothing more still reads.
FIRST_LOOK_S, LOOK_S = 0.1, 1.0


@dataclass(frozen=True)
class ConnectionLimits:
    """receive_s: seconds from a connection's or request's first byte until all of the request is there; 0:
    any time. connections: of this process."""

    receive_s: float
    connections: int


def limited(limits: ConnectionLimits, count_error: Callable[[int], None]) -> type[HttpToolsProtocol]:
    """uvicorn's protocol with limits. count_error: told the status of each refusal."""
    waiting: dict[Connection, None] = {}  # whose request is not whole, the oldest first

    class Limited(Connection):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.limits, self.count_error, self.waiting = limits, count_error, waiting

    return Limited


class Connection(HttpToolsProtocol):
    """One connection. It waits while nothing of a request, or not all of it, has arrived. Where there are as
    many connections as there may be, a new one takes the place of the one that has waited longest: clients
    that ask are served, however many others are silent."""

    limits: ConnectionLimits
    count_error: Callable[[int], None]
    waiting: dict[Connection, None]

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._deadline: asyncio.TimerHandle | None = None
        self._began = self._in_headers = False  # of the request that is arriving
        self._header_bytes = 0
        self._ended = False  # the client sends nothing more

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        over = len(self.connections) - self.limits.connections
        if over > len(self.waiting):
            most = self.limits.connections
            self._refuse(503, f"{most} connections have requests, the most this process takes; try again")
            return
        if over > 0:
            self.loop.call_later(ARRIVES_S, self._make_room)
        self.waiting[self] = None
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        in_headers = self._in_headers
        super().data_received(data)
        if self.transport.is_closing():
            return
        if in_headers and self._in_headers:
            self._header_bytes += len(data)
            if self._header_bytes > MOST_HEADER_BYTES:
                self._refuse(431, f"the request's headers have more than {MOST_HEADER_BYTES} bytes")
                return
        if self._began or self.cycle is None or self.cycle.response_complete:
            self._start_clock()
        else:
            self._stop_waiting()

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client may end its own side once its request is whole, and read on. It says the same where it has
        left; then its system refuses what is sent next."""
        cycle = self.cycle
        whole = not self._began and cycle is not None and not cycle.more_body
        answered = cycle is None or (cycle.response_complete and not self.pipeline)
        if not whole or answered or self.scope["http_version"] != "1.1":
            return False
        self._ended = True
        self._look(FIRST_LOOK_S)
        return True

    def _look(self, again_s: float) -> None:
        """Sends what clients ignore until there is an answer to send."""
        if self.transport.is_closing() or self.pipeline or self.cycle.response_started:
            return
        self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.loop.call_later(again_s, self._look, LOOK_S)

    def on_message_begin(self) -> None:
        self._began, self._in_headers, self._header_bytes = True, True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_headers = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._began = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._ended:
            if self.cycle.response_complete:
                self.transport.close()
            else:  # it sent several requests, of which another one is answered now
                self._look(LOOK_S)
        if not self.transport.is_closing() and not self.pipeline:
            self.waiting.setdefault(self)

    def shutdown(self) -> None:
        """The server ends. A request that has not arrived is not waited for."""
        cycle = self.cycle
        if cycle is not None and cycle.more_body and not cycle.response_started:
            self._refuse(503, "the server is shutting down, and the request had not arrived")
        super().shutdown()

    def drop(self) -> None:
        """Closes it at once; another one takes its place."""
        self._stop_waiting()
        self.connections.discard(self)
        self.transport.abort()

    def _make_room(self) -> None:
        while len(self.connections) > self.limits.connections and self.waiting:
            next(iter(self.waiting)).drop()

    def _start_clock(self) -> None:
        if self._deadline is None and self.limits.receive_s:
            self._deadline = self.loop.call_later(self.limits.receive_s, self._late)

    def _stop_waiting(self) -> None:
        self.waiting.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        self._deadline = None
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if self.pipeline or (cycle is not None and not cycle.response_complete and not cycle.more_body):
            self._start_clock()  # what came behind a request that is being answered is not read meanwhile
        elif self._began and (cycle is None or cycle.response_complete or not cycle.response_started):
            self._refuse(408, f"the request had not arrived after {self.limits.receive_s:g} s")
        else:
            self.drop()

    def _refuse(self, status: int, message: str) -> None:
        self.count_error(status)
        body = msgspec.json.encode(ApiError(message, status).body)
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", "content-type: application/json"]
        lines += [f"content-length: {len(body)}", f"x-request-id: {new_id().decode()}", "connection: close"]
        lines += [f"retry-after: {RETRY_S}"] if status == 503 else []
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self._stop_waiting()
        self.transport.close()
