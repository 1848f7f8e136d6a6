# SPDX-License-Identifier: Apache-2.0
"""Limits of connections that uvicorn has none for: how long a request may take to arrive, how long its
headers may be, and how many connections there are. They are in a protocol made of uvicorn's, and around the
application.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from itertools import islice
from typing import Any

import httptools
import msgspec
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from flashinfer_backend.core.bounds import (
    MOST_HEADERS,
    MOST_LATER,
    MOST_PIPELINED,
    MOST_UNREAD,
    READ_BYTES,
    READ_S,
)
from flashinfer_backend.openai.errors import RETRY_S, ApiError
from flashinfer_backend.openai.request_ids import new_id

# Of a request's line and headers, of what stands between two parts of its body, or behind the last one, each
# in addition to the read in which it begins.
MOST_HEADER_BYTES = 1 << 16

# A client's request has this long to follow its connection, however many others come at the same time.
ARRIVES_S = 0.05
# Between two looks whether a client that sends nothing more still reads.
FIRST_LOOK_S, LOOK_S = 0.1, 1.0
MOST_OLDEST = 64  # connections of which one makes room: the oldest of which all is read
UNREAD_LOOK_S = 0.25  # between two looks at what is kept for clients that do not read
# For which what is left of a body is read, and dropped, behind the answer that is a connection's last one.
# Closed with bytes unread, it would be reset, and clients that still send would not see the answer.
LINGER_S = 10.0

# Refusals: status and message.
NO_METHOD = (
    400,
    "what has arrived does not begin with a method of HTTP/1.1, such as POST; this port has no TLS",
)
CUT_OFF = 400, "the connection's sending side was closed before all of the request had arrived"
NO_PATH = 400, "the request's path cannot be read; it should begin with / and have less than 65536 bytes"
TOO_MANY = (
    429,
    f"the connection has {MOST_PIPELINED} requests without an answer, the most it may have; wait for answers,"
    " or send requests on further connections",
)
TOO_LONG = 431, f"the request's headers have more than {MOST_HEADER_BYTES} bytes"
MANY_HEADERS = 431, f"the request has more than {MOST_HEADERS} headers and trailers"

# Of a request's scope: sends parts of a body without the layers in between, which have no part in them.
BODY_SEND = "flashinfer_backend.body_send"
# Of a request's scope: its connection.
CONNECTION = "flashinfer_backend.connection"
_connection: ContextVar[Connection] = ContextVar("connection")  # of the request that the application handles


def client_left() -> bool:
    """Whether the client of the request that is being handled has closed its connection."""
    connection = _connection.get(None)
    return connection is not None and connection.transport.is_closing()


def limited_config(
    app: ASGIApp, receive_s: float, connections: int, count_error: Callable[[int], None], **options: Any
) -> uvicorn.Config:
    """uvicorn's settings with limits. receive_s: seconds from a connection's or request's first byte until
    all of the request is there; 0: any time. connections: of this process. count_error: told the status of
    each refusal. options: of uvicorn.Config."""
    protocol: Any = partial(Connection, _Process(receive_s, connections, count_error))
    return uvicorn.Config(_Answers(app), http=protocol, interface="asgi3", **options)


@dataclass
class _Process:
    """What all connections of a process share. waiting: those whose request is not whole, the oldest first.
    unread: those whose client has not read what was sent. later: those of which something has arrived that is
    not parsed yet; they take turns, so that many that send much do not keep the process from others. fresh:
    the same, without a turn since it arrived; each second turn is one of these. later_bytes: of both."""

    receive_s: float
    connections: int
    count_error: Callable[[int], None]
    waiting: dict[Connection, None] = field(default_factory=dict)
    unread: set[Connection] = field(default_factory=set)
    later: deque[Connection] = field(default_factory=deque)
    fresh: deque[Connection] = field(default_factory=deque)
    later_bytes: int = 0
    turns: int = 0
    looks: bool = False
    reads_until: float | None = None  # in this turn of the event loop

    def may_read(self) -> bool:
        """Whether this turn of the event loop has time left to parse what arrives, and none waits for it."""
        loop = asyncio.get_running_loop()
        if self.reads_until is None:
            self.reads_until = loop.time() + READ_S
            loop.call_soon(self._next_turn)
        return not self.later and not self.fresh and loop.time() < self.reads_until

    def _next_turn(self) -> None:
        self.reads_until = None

    def read_later(self, connection: Connection) -> None:
        if not self.later and not self.fresh:
            asyncio.get_running_loop().call_soon(self._read_on)
        self.fresh.append(connection)

    def _read_on(self) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + READ_S
        while self.fresh or self.later:
            self.turns += 1
            first, other = (self.fresh, self.later) if self.turns % 2 else (self.later, self.fresh)
            self._read_one((first or other).popleft())
            if loop.time() >= until:
                break
        if self.fresh or self.later:
            loop.call_soon(self._read_on)

    def _read_one(self, connection: Connection) -> None:
        try:
            if connection.read_on():
                self.later.append(connection)
        except Exception as error:  # as the event loop does where data_received raises
            text = "Fatal error: what had arrived could not be read."
            loop = asyncio.get_running_loop()
            loop.call_exception_handler({"message": text, "exception": error, "protocol": connection})
            connection.drop()

    def look_at_unread(self) -> None:
        """Soon, and again while there are some: where they hold too much together, the largest are cut."""
        if not self.looks and self.unread:
            self.looks = True
            asyncio.get_running_loop().call_later(UNREAD_LOOK_S, self._look_at_unread)

    def _look_at_unread(self) -> None:
        sizes = {connection: connection.kept() for connection in self.unread}
        total = sum(sizes.values())
        for connection in sorted(sizes, key=sizes.__getitem__, reverse=True):
            if total <= MOST_UNREAD:
                break
            total -= sizes[connection]
            connection.drop(at_once=True)
        self.looks = False
        self.look_at_unread()


class _Answers:
    """Tells a request's connection of its answer. HTTP/1.0 has no chunks, though uvicorn would send
    them: there the end of the connection ends an answer of unknown length."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = _connection.get()
        connection.answered_cycle = getattr(send, "__self__", None)
        ended = unchunked = lingers = False

        async def noted(message: Message) -> None:
            nonlocal ended, unchunked, lingers
            connection.answering = True
            old = scope["http_version"] == "1.0" and scope["method"] != "HEAD"
            if message["type"] == "http.response.start" and old:
                unchunked = all(name != b"content-length" for name, _ in message.get("headers", ()))
            if unchunked:  # uvicorn adds nothing to an answer to HEAD, and writes no body
                scope["method"] = "HEAD"
                connection.write(message.get("body", b""))
            await send(message)
            if message["type"] == "http.response.start":
                lingers = connection.keep_open_for_body()
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                ended = True
                connection.answered()
                if lingers:
                    connection.linger()

        scope[BODY_SEND], scope[CONNECTION] = noted, connection
        try:
            await self._app(scope, receive, noted)
        finally:
            if not ended:
                connection.answered()


class _Flow(FlowControl):
    """uvicorn's. It reads on where an answer wants more, but not while parts wait to be parsed."""

    def __init__(self, transport: asyncio.Transport, later: deque[bytes]) -> None:
        super().__init__(transport)
        self._later = later

    def resume_reading(self) -> None:
        if self._later:
            self.read_paused = False  # Connection.read_on does it
        super().resume_reading()


class Connection(HttpToolsProtocol):
    """One connection. It waits while nothing of a request, or not all of it, has arrived. Where there are as
    many connections as there may be, a new one takes the place of the one that has waited longest: clients
    that ask are served, however many others are silent."""

    def __init__(self, process: _Process, **named: Any) -> None:
        """named: what uvicorn gives its protocol."""
        super().__init__(**named)
        self.parser = httptools.HttpRequestParser(self)  # in place of a lenient one
        self._process = process
        self._deadline: asyncio.TimerHandle | None = None
        self._arriving = self._in_headers = False  # a request
        self._read_bytes = 0  # at the last read
        self._header_bytes = 0  # read since the request began, or the last part of its body
        self._field_bytes = 0  # of its headers and trailers that are whole, read at once or not
        self._refusal = NO_PATH  # if one of the parser's callbacks raises
        self._later: deque[bytes] = deque()  # what has arrived and is not parsed yet
        self._ends_later = False  # behind that, the client sends nothing more
        self._fields = 0  # of the request's headers and trailers
        self._unanswered = 0  # requests whose headers are there
        self._whole = 0  # of these, those whose bodies are there as well
        self._ended = False  # the client sends nothing more
        # Nothing more is read once this is set; it is sent behind the answers to the requests before.
        self._last_words: bytes | None = None
        self.answering = False  # an answer has begun that has not ended
        self.answered_cycle: Any = None  # uvicorn's, of the request that is being answered
        self.held: Callable[[], int] = int  # bytes that its answer keeps besides what was sent

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self._later)
        process = self._process
        over = len(self.connections) - process.connections
        if over > len(process.waiting):
            most = process.connections
            self._refuse(503, f"{most} connections have requests, the most this process takes; try again")
            return
        if over > 0:
            self.loop.call_later(ARRIVES_S, self._make_room)
        process.waiting[self] = None
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._forget_later()
        self._process.unread.discard(self)
        if self.answered_cycle is not None:  # uvicorn tells the request that came last alone
            self.answered_cycle.disconnected = True
            self.answered_cycle.message_event.set()
        super().connection_lost(exc)

    def write(self, body: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(body)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._process.unread.add(self)
        self._process.look_at_unread()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._process.unread.discard(self)

    def kept(self) -> int:
        """Bytes that are kept until its client reads."""
        return self.transport.get_write_buffer_size() + self.held()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing() or self._last_words is not None:
            return
        self._unset_keepalive_if_required()
        if len(data) <= READ_BYTES and not self._later and self._process.may_read():
            self._read(data)
            return
        process, waits = self._process, bool(self._later)
        if process.later_bytes + len(data) > MOST_LATER:
            self._refuse(503, "too much arrives at the same time; try again")
            return
        process.later_bytes += len(data)
        self._later.extend(data[at : at + READ_BYTES] for at in range(0, len(data), READ_BYTES))
        self.transport.pause_reading()
        if not waits:
            process.read_later(self)

    def _forget_later(self) -> None:
        self._process.later_bytes -= sum(map(len, self._later))
        self._later.clear()

    def read_on(self) -> bool:
        """Parses a part of what has arrived; whether there is more."""
        if self._later and not self.transport.is_closing():
            part = self._later.popleft()
            self._process.later_bytes -= len(part)
            self._read(part)
        if self.transport.is_closing():
            self._forget_later()
            return False
        if self._later:
            return True
        if self._ends_later and not self.eof_received():
            self.transport.close()
        elif not self._ended and not self.flow.read_paused:
            self.transport.resume_reading()
        return False

    def _read(self, data: bytes) -> None:
        self._read_bytes = len(data)
        _connection.set(self)
        try:
            while data and self._last_words is None:
                data = self._parse(data)
        except httptools.HttpParserError as error:
            if self._last_words is None:
                if isinstance(error, httptools.HttpParserCallbackError):
                    self._refuse(*self._refusal)
                elif isinstance(error, httptools.HttpParserInvalidMethodError):
                    self._refuse(*NO_METHOD)
                else:
                    self._refuse(400, f"what has arrived is not a request in HTTP/1.1: {error}")
                return
        if self._arriving:
            self._header_bytes += self._read_bytes
            if self._header_bytes > MOST_HEADER_BYTES:
                where = "headers" if self._in_headers else "chunks' extensions or trailers"
                self._refuse(431, f"the request's {where} have more than {MOST_HEADER_BYTES} bytes")
                return
        if self.transport.is_closing():
            return
        if self._arriving or not self._unanswered:
            self._start_clock()
        else:
            self._stop_waiting()

    def _parse(self, data: bytes) -> bytes:
        """What has to be parsed once more: a request that asks for another protocol, without that. Java's
        client asks for one, h2c, with every request, and goes on without; the parser takes the body, and all
        behind it, to be of that protocol. Raises httptools.HttpParserError."""
        try:
            self.parser.feed_data(data)
            return b""
        except httptools.HttpParserUpgrade as upgrade:
            method, version = self.parser.get_method(), self.parser.get_http_version().encode()
            # A new one: the other reads nothing behind connection: close.
            self.parser = httptools.HttpRequestParser(self)
            line = b"%s %s HTTP/%s" % (method, self.url, version)
            kept = [b"%s: %s" % field for field in self.headers if field[0] != b"upgrade"]
            return b"\r\n".join([line, *kept, b"", data[upgrade.args[0] :]])

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client may end its own side once its request is whole, and read on. It says the same where it has
        left; then its system refuses what is sent next. HTTP/1.0 has nothing to send before the answer, and
        proxies that speak it say in this way that their client has left."""
        self._ends_later = bool(self._later)
        if self._ends_later or self._ended:
            return True
        if self._arriving and self._whole > 0:
            self._refuse(*CUT_OFF)
        if self._arriving or not self._unanswered or self.cycle.scope["http_version"] != "1.1":
            return False
        self._ended = True
        self._look(FIRST_LOOK_S)
        return True

    def _look(self, again_s: float) -> None:
        """Sends what clients ignore until there is an answer to send."""
        if self.transport.is_closing() or self._unanswered != 1 or self.answering:
            return
        self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.loop.call_later(again_s, self._look, LOOK_S)

    def on_message_begin(self) -> None:
        """The parser's, as are the next four. Raises OverflowError for one request too many: uvicorn would
        keep all that come."""
        if self._unanswered >= MOST_PIPELINED:
            self._refusal = TOO_MANY
            raise OverflowError
        super().on_message_begin()
        self._field_bytes = self._fields = 0
        self._arriving, self._in_headers, self._header_bytes = True, True, -self._read_bytes

    def on_header(self, name: bytes, value: bytes) -> None:
        """Also of trailers. Raises OverflowError."""
        self._field_bytes += len(name) + len(value) + len(": \r\n")
        self._fields += 1
        if self._field_bytes > MOST_HEADER_BYTES or self._fields > MOST_HEADERS:
            self._refusal = MANY_HEADERS if self._fields > MOST_HEADERS else TOO_LONG
            raise OverflowError
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Raises OverflowError for CONNECT, whose path is none."""
        if self.parser.get_method() == b"CONNECT":
            raise OverflowError
        if self.parser.should_upgrade():  # it comes once more
            return
        super().on_headers_complete()
        self._in_headers = False
        self._unanswered += 1

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._header_bytes = -self._read_bytes

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._arriving = False
        self._whole += 1
        if not self.parser.should_keep_alive():  # what is behind it is no request
            self._last_words = b""

    def on_response_complete(self) -> None:
        """uvicorn's, which begins with the next request."""
        last = not self.pipeline
        super().on_response_complete()
        if last and self._last_words:
            self.write(self._last_words)
            self.transport.close()

    def answered(self) -> None:
        """The oldest request has been."""
        self.answering, self.held = False, int
        self._unanswered -= 1
        self._whole -= 1  # -1: its body is still arriving
        if self._ended:
            if self._unanswered:  # it sent several requests, of which another one is answered now
                self._look(LOOK_S)
            else:
                self.transport.close()
        if not self.transport.is_closing() and not self._unanswered:
            self._process.waiting.setdefault(self)

    def keep_open_for_body(self) -> bool:
        """Whether the connection, which would end with the answer that has begun, does not because its
        request's body is still arriving."""
        if self._whole > 0 or self.answered_cycle is None or self.answered_cycle.keep_alive:
            return False
        self.answered_cycle.keep_alive = True  # uvicorn would close the connection
        return True

    def linger(self) -> None:
        """Ends the server's side, and drops what arrives until the client has ended its own."""
        if self.transport.is_closing():
            return
        self._last_words, self._arriving = b"", False
        self._forget_later()
        self._unset_keepalive_if_required()
        self._stop_waiting()
        self._process.waiting[self] = None  # others may need its place
        self._deadline = self.loop.call_later(LINGER_S, self.transport.close)
        self.transport.write_eof()
        self.transport.resume_reading()

    def shutdown(self) -> None:
        """uvicorn's word that the server ends. A request that has not arrived is not waited for."""
        if (self._unanswered or self._later) and self._whole <= 0 and not self.answering:
            self._refuse(503, "the server is shutting down, and the request had not arrived")
        super().shutdown()

    def drop(self, at_once: bool = False) -> None:
        """Closes it; what its client has not read is lost. at_once: the kernel keeps none of that either."""
        self._stop_waiting()
        self._process.unread.discard(self)
        self.connections.discard(self)
        if at_once:
            sock = self.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _make_room(self) -> None:
        process = self._process
        while len(self.connections) > process.connections and process.waiting:
            oldest = list(islice(process.waiting, MOST_OLDEST))
            next((each for each in oldest if not each._later), oldest[0]).drop()

    def _start_clock(self) -> None:
        if self._deadline is None and self._process.receive_s:
            self._deadline = self.loop.call_later(self._process.receive_s, self._late)

    def _stop_waiting(self) -> None:
        self._process.waiting.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        self._deadline = None
        if self.transport.is_closing():
            return
        if self._later:  # more has arrived than the process has read
            self._deadline = self.loop.call_later(LOOK_S, self._late)
            return
        if self._whole > 0:
            self._start_clock()  # what came behind a request that is being answered is not read meanwhile
        elif self._arriving and not self.answering:
            receive_s = self._process.receive_s
            self._refuse(408, f"the request had not arrived after {receive_s:g} s")
        else:
            self.drop()

    def _refuse(self, status: int, message: str) -> None:
        """Ends the connection, behind the answers to whole requests; with an answer, where it would not be
        taken for a part of another one."""
        self._process.count_error(status)
        body = msgspec.json.encode(ApiError(message, status).body({}))
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", "content-type: application/json"]
        lines += [f"content-length: {len(body)}", f"x-request-id: {new_id()}", "connection: close"]
        lines += [f"retry-after: {RETRY_S}"] if status == 503 else []
        answer = "\r\n".join([*lines, "", ""]).encode() + body
        self._stop_waiting()
        if self._whole > 0:
            if self._unanswered > self._whole:  # the refused one, whose headers were right
                self.pipeline.popleft()
                self._unanswered -= 1
            self._last_words, self._arriving = answer, False
            self._forget_later()
            return
        if not self.answering and not self._whole:  # -1: it has its answer
            self.transport.write(answer)
        self.transport.close()
