# SPDX-License-Identifier: Apache-2.0
"""Limits of the OpenAI API's connections: uvicorn and real sockets, an application that only reads."""

import asyncio
import contextlib
import itertools
import json
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn
import uvloop
from starlette.requests import Request

from flashinfer_backend.core.bounds import MOST_HEADERS, MOST_PIPELINED
from flashinfer_backend.openai import connection
from flashinfer_backend.openai.app import MANY_BODIES, Bodies
from flashinfer_backend.openai.connection import (
    CONNECTION,
    MOST_HEADER_BYTES,
    Connection,
    client_left,
    limited_config,
)
from flashinfer_backend.openai.errors import ApiError
from waiting import wait_for

WHOLE = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nbody"
LONG_S = 600.0  # a limit that no test reaches


class Running:
    """A server; `release` lets requests to /wait be answered."""

    def __init__(self, receive_s: float, connections: int) -> None:
        self.errors: list[int] = []
        self.release = threading.Event()
        self.left = threading.Event()  # the client of a request to /leave
        self.sent = threading.Event()  # an answer, or what was left of it
        self.found_left: list[bool] = []  # client_left() of requests to /wait, once they are released
        self.waits = False  # what is sent to a client that does not read
        config = limited_config(
            self._app,
            receive_s,
            connections,
            self.errors.append,
            ws="none",
            lifespan="off",
            log_level="critical",
            timeout_keep_alive=int(LONG_S),
        )
        self.server = uvicorn.Server(config)
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self) -> None:
        with self.listener:
            uvloop.run(self.server.serve(sockets=[self.listener]))

    async def _app(self, scope: Any, receive: Callable, send: Callable) -> None:
        body, more = b"", scope["path"] not in ("/early", "/held")
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
        if scope["path"] == "/echo":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": body})
            return
        if scope["path"] == "/unread":
            more = {"type": "http.response.body", "body": bytes(64 << 20), "more_body": True}
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send(more)
            further = asyncio.ensure_future(send(more))
            await asyncio.sleep(0.05)
            self.waits = not further.done()
            scope["path"] = "/leave"
        if scope["path"] == "/held":
            scope[CONNECTION].held = lambda: 16 << 20
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": bytes(8 << 20), "more_body": True})
            scope["path"] = "/leave"
        if scope["path"] == "/leave":
            while (await receive())["type"] != "http.disconnect":
                pass
            self.left.set()
            return
        while scope["path"].startswith("/wait") and not self.release.is_set():
            await asyncio.sleep(0.01)
        if scope["path"] == "/wait":
            self.found_left.append(client_left())
        if scope["path"] == "/stream":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for part in (b"one,", b"two"):
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        if scope["path"] == "/wait-amid":
            await asyncio.sleep(0.05)  # in which a connection's end is noticed
        await send({"type": "http.response.body", "body": b"done"})
        self.sent.set()

    def connect(self, data: bytes = b"") -> socket.socket:
        sock = socket.create_connection(self.listener.getsockname(), timeout=120)
        sock.sendall(data)
        return sock


@contextlib.contextmanager
def running(receive_s: float = LONG_S, connections: int = 100) -> Iterator[Running]:
    """Its end, which takes uvicorn two tenths of a second, is not waited for."""
    server = Running(receive_s, connections)
    server.thread.start()
    try:
        yield server
    finally:
        server.release.set()
        server.server.should_exit = server.server.force_exit = True


def answer(sock: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(65536):
            data += part
    return data


@pytest.mark.parametrize(
    ("line", "body"),
    [
        (b"GET /stream HTTP/1.0", b"one,two"),
        (b"GET / HTTP/1.0", b"done"),
        (b"HEAD /stream HTTP/1.0", b""),
        (b"GET /stream HTTP/1.1", b"4\r\none,\r\n3\r\ntwo\r\n0\r\n\r\n"),
    ],
)
def test_only_clients_of_http_1_1_get_chunks(line: bytes, body: bytes) -> None:
    with running() as server, server.connect(line + b"\r\nhost: x\r\nconnection: close\r\n\r\n") as sock:
        head, _, got = answer(sock).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ") and got == body
    assert (b"transfer-encoding" in head.lower()) == body.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_a_request_that_would_rather_have_another_protocol_is_answered_with_its_body(protocol: bytes) -> None:
    """As Java's client sends every one. A body's own lines stay."""
    head = b"POST /echo HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nUPGRADE: " + protocol + b"\r\n"
    body = b"a\r\nupgrade: b\r\n\r\nc"
    with running() as server, server.connect(head + b"content-length: 18\r\n\r\n" + body) as sock:
        got = b""
        while body not in got:
            got += sock.recv(4096)
        sock.sendall(head + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n")
        sock.sendall(b"12\r\n" + body + b"\r\n0\r\n\r\n")
        got += answer(sock)
    assert got.count(b"HTTP/1.1 200 ") == 2 and got.count(body) == 2


@pytest.mark.parametrize("piece", [1, 100, 1 << 16])
def test_such_requests_can_stand_anywhere(piece: int) -> None:
    """Behind others, and behind an empty line, with a body of each kind and with none."""
    upgrade = b"\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
    chunks, none = b"transfer-encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n", b"content-length: 0\r\n\r\n"
    echo = WHOLE.replace(b"/ ", b"/echo ", 1)
    begin = echo.partition(b"\r\n")[0] + upgrade
    sized = echo.replace(b"\r\n", upgrade, 1)
    sent = [echo, sized, echo, b"\r\n" + sized, begin + chunks, begin + none, begin + b"\r\n", sized, echo]
    with running() as server, server.connect() as sock:
        last = WHOLE.replace(b"\r\n", upgrade + b"connection: close\r\n", 1)
        data = b"".join([*sent, last])
        for at in range(0, len(data), piece):
            sock.sendall(data[at : at + piece])
        got = answer(sock)
    assert got.count(b"HTTP/1.1 200 ") == len(sent) + 1 and got.count(b"body") == len(sent) - 2
    assert got.endswith(b"done") and not server.errors


def test_such_a_request_can_come_in_pieces() -> None:
    """Each cut of its headers, and a byte at a time."""
    lines = b"x: y\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nX-Upgrade: z\r\n"
    body = b"a\r\nupgrade: b\r\n\r\nc"
    request = b"POST /echo HTTP/1.1\r\n" + lines + b"content-length: 18\r\n\r\n" + body
    cuts = [[at] for at in range(1, len(request))] + [list(range(1, len(request)))]
    with running() as server, server.connect() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for cut in cuts:
            for begin, end in itertools.pairwise([0, *cut, len(request)]):
                sock.sendall(request[begin:end])
                time.sleep(0.003)
            got = b""
            while not got.endswith(b"0\r\n\r\n"):
                got += sock.recv(4096)
            assert got.startswith(b"HTTP/1.1 200 ") and body in got


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", b""),
        (b"POST / HT", b"HTTP/1.1 408 "),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nbo", b"HTTP/1.1 408 "),
        (b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nbo", b"HTTP/1.1 200 "),
        (WHOLE + WHOLE[:20], b"HTTP/1.1 200 "),
    ],
)
def test_a_request_that_does_not_arrive_is_cut(sent: bytes, status: bytes) -> None:
    with running(receive_s=0.2) as server, server.connect(sent) as sock:
        got = answer(sock)
        assert got.startswith(status) and bool(got) == bool(status)
        if status.endswith(b"408 "):
            body = json.loads(got.partition(b"\r\n\r\n")[2])
            assert "had not arrived after 0.2 s" in body["error"]["message"] and server.errors == [408]
        wait_for(lambda: not server.server.server_state.connections)


NO_HTTP, NO_PATH = "not a request in HTTP/1.1: ", "the request's path cannot be read"
TOO_LONG = "the request's headers have more than 65536 bytes"


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (
            b"\x16\x03\x01\x02\x00\x01\x00",
            "does not begin with a method of HTTP/1.1, such as POST; this port has no TLS",
        ),
        (b"GET / HTTP/7.1\r\n\r\n", NO_HTTP + "Invalid HTTP version"),
        (WHOLE.replace(b": 4", b": x"), NO_HTTP + "Invalid character in Content-Length"),
        (b"CONNECT x:80 HTTP/1.1\r\n\r\n" + WHOLE, NO_PATH),
        (b"GET /" + b"x" * 65535 + b" HTTP/1.1\r\n\r\n", NO_PATH),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 65535 + b"\r\n\r\n", TOO_LONG),  # all of it is read at once
    ],
    ids=range(6),
)
def test_what_cannot_be_read_is_answered_in_the_form_of_errors(sent: bytes, words: str) -> None:
    status = 431 if words == TOO_LONG else 400
    with running() as server, server.connect(sent) as sock:
        head, _, body = answer(sock).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d " % status) and server.errors == [status]
        assert words in json.loads(body)["error"]["message"]


def test_a_byte_at_a_time_does_not_start_the_clock_again() -> None:
    with running(receive_s=0.5) as server, server.connect() as sock, contextlib.suppress(OSError):
        for byte in b"POST / HTTP/1.1\r\n" + b"x: y\r\n" * 100:
            sock.sendall(bytes([byte]))
            time.sleep(0.02)
        raise AssertionError("it was never cut")


def test_lines_that_begin_no_request_are_cut() -> None:
    """Any byte stops the clock that uvicorn has for connections that are kept open."""
    with running(receive_s=0.2) as server, server.connect(WHOLE) as sock:
        while not sock.recv(4096).endswith(b"done"):
            pass
        sock.sendall(b"\r\n")
        assert answer(sock) == b""


def test_an_answer_may_take_longer_than_its_request() -> None:
    with running(receive_s=0.2) as server:
        waits = WHOLE.replace(b"/ ", b"/wait ", 1)
        # A second request behind it, half of it there, is not read while the first is answered.
        with server.connect(waits) as alone, server.connect(waits + WHOLE[:20]) as two:
            time.sleep(0.6)
            server.release.set()
            assert alone.recv(4096).startswith(b"HTTP/1.1 200 ")
            assert two.recv(4096).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("requests", [1, 2])
@pytest.mark.parametrize("half", [b"", b"GET / HT", WHOLE[:-1]], ids=["", "half", "half-body"])
def test_a_client_that_ends_its_side_behind_its_requests_is_answered(requests: int, half: bytes) -> None:
    waits = WHOLE.replace(b"/ ", b"/wait ", 1)
    with running() as server, server.connect(waits * requests + half) as sock:
        sock.shutdown(socket.SHUT_WR)
        wait_for(lambda: server.server.server_state.connections)
        time.sleep(0.3)
        server.release.set()
        got, *refused = answer(sock).split(b"HTTP/1.1 400 ")
        lines = got.split(b"\r\n")
        assert lines.count(b"HTTP/1.1 200 OK") == requests and lines[-1] == b"done"
        assert lines[0] == b"HTTP/1.1 100 Continue" or requests > 1
        assert len(refused) == len(server.errors) == bool(half)
        wait_for(lambda: not server.server.server_state.connections)


@pytest.mark.parametrize("half_first", [False, True])
def test_a_client_that_has_left_is_noticed(half_first: bool) -> None:
    """Also one that has ended its own side before."""
    with running() as server, server.connect(WHOLE.replace(b"/ ", b"/leave ", 1)) as sock:
        wait_for(lambda: server.server.server_state.tasks)
        if half_first:
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(4096).startswith(b"HTTP/1.1 100 Continue") and not server.left.is_set()
        sock.close()
        wait_for(server.left.is_set)


def test_a_client_of_http_1_0_has_left_with_its_side_alone() -> None:
    """As nginx, without further settings, says of its client. Nothing can ask whether it still reads."""
    with running() as server, server.connect(b"GET /leave HTTP/1.0\r\n\r\n") as sock:
        wait_for(lambda: server.server.server_state.tasks)
        sock.shutdown(socket.SHUT_WR)
        assert answer(sock) == b"" and server.left.wait(20)


def test_before_its_work_a_request_can_be_asked_whether_its_client_has_left() -> None:
    waits = WHOLE.replace(b"/ ", b"/wait ", 1)
    with running() as server, server.connect(waits) as stays:
        with server.connect(waits):
            wait_for(lambda: len(server.server.server_state.tasks) == 2)
        wait_for(lambda: len(server.server.server_state.connections) == 1)
        server.release.set()
        wait_for(lambda: len(server.found_left) == 2)
        assert sorted(server.found_left) == [False, True]
        assert stays.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_what_is_sent_to_a_client_that_left_with_several_requests_is_dropped() -> None:
    """It is no error, also of the first of them."""
    with running() as server:
        with server.connect(WHOLE.replace(b"/ ", b"/wait-amid ", 1) + WHOLE) as sock:
            wait_for(lambda: server.server.server_state.tasks)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        server.release.set()
        assert server.sent.wait(20)


def test_a_server_that_ends_waits_for_whole_requests_alone() -> None:
    waits, half = WHOLE.replace(b"/ ", b"/wait ", 1), WHOLE[:-1]
    with running() as server, server.connect(waits) as open_, server.connect(half) as late:
        wait_for(lambda: len(server.server.server_state.tasks) == 2)
        server.server.should_exit = True
        got = answer(late)
        assert got.startswith(b"HTTP/1.1 503 ") and b"shutting down" in got and server.errors == [503]
        server.release.set()
        assert answer(open_).endswith(b"done")
        server.thread.join(120)
        assert not server.thread.is_alive()


def test_silent_connections_make_room_for_those_that_ask() -> None:
    with running(connections=8) as server, contextlib.ExitStack() as opened:
        silent = [opened.enter_context(server.connect(b"POST"[: n % 5])) for n in range(30)]
        for _ in range(10):
            with server.connect(WHOLE) as sock:
                assert sock.recv(4096).startswith(b"HTTP/1.1 200 ")
        assert all(answer(sock) == b"" for sock in silent[:22])  # the oldest were closed
        assert server.errors == []


def test_where_all_connections_have_requests_another_one_is_refused_and_nobody_cut() -> None:
    with running(connections=3) as server, contextlib.ExitStack() as opened:
        waits = WHOLE.replace(b"/ ", b"/wait ", 1)
        busy = [opened.enter_context(server.connect(waits)) for _ in range(3)]
        wait_for(lambda: len(server.server.server_state.tasks) == 3)
        with server.connect(WHOLE) as sock:
            got = answer(sock)
        assert got.startswith(b"HTTP/1.1 503 ") and b"retry-after" in got and server.errors == [503]
        assert b"\r\nx-request-id: req_" in got
        server.release.set()
        assert all(sock.recv(4096).startswith(b"HTTP/1.1 200 ") for sock in busy)
        with server.connect(WHOLE) as sock:  # an answered one that is kept open makes room
            assert sock.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_requests_of_a_connection_that_wait_for_answers_are_bounded() -> None:
    """uvicorn would make a request of each that is in a read, of which 14,000 have room in one."""
    first, others = WHOLE.replace(b"/ ", b"/wait ", 1), WHOLE * (MOST_PIPELINED - 1)
    with running() as server, server.connect(first) as over, server.connect(first + others) as most:
        wait_for(lambda: len(server.server.server_state.tasks) == 2)
        over.sendall(others + WHOLE)
        wait_for(lambda: server.errors == [429])
        server.release.set()
        got = answer(over).split(b"HTTP/1.1 ")[1:]
        assert [each[:4] for each in got] == [b"200 "] * MOST_PIPELINED + [b"429 "]
        assert b"without an answer" in got[-1]
        wait_for(lambda: most.recv(65536, socket.MSG_PEEK).count(b"done") == MOST_PIPELINED)
        most.sendall(others)  # the first ones count no more
        wait_for(lambda: most.recv(65536, socket.MSG_PEEK).count(b"done") == 2 * MOST_PIPELINED - 1)


CLOSING = WHOLE.replace(b"host: x", b"host: x\r\nconnection: close")


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("first", "behind", "refusals"),
    [
        (WHOLE, b"nonsense\r\n\r\n", [400]),
        (WHOLE, b"GET / HTTP/7.1\r\n\r\n", [400]),
        (WHOLE, WHOLE.replace(b"content-length: 4", b"transfer-encoding: chunked"), [400]),
        (WHOLE, b"GET / HTTP/1.1\r\nx: " + b"y" * 65536 + b"\r\n\r\n", [431]),
        (CLOSING, WHOLE, []),
        (CLOSING, b"nonsense\r\n\r\n", []),
    ],
    ids=["line", "version", "body", "headers", "closed", "closed-nonsense"],
)
def test_what_is_wrong_behind_a_request_is_refused_behind_its_answer(
    first: bytes, behind: bytes, refusals: list[int], at_once: bool
) -> None:
    """Each request before it is answered, and what is behind `connection: close` is none."""
    first = first.replace(b"/ ", b"/wait ", 1)
    with running() as server, server.connect(first + behind if at_once else first) as sock:
        wait_for(lambda: server.server.server_state.tasks)
        if not at_once:
            sock.sendall(behind)
        sock.shutdown(socket.SHUT_WR)
        time.sleep(0.1)
        server.release.set()
        answers = answer(sock).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"").split(b"HTTP/1.1 ")[1:]
        assert answers[0].startswith(b"200 ") and answers[0].endswith(b"done")
        assert [int(each[:3]) for each in answers[1:]] == refusals == server.errors


def test_a_client_that_leaves_behind_a_request_that_is_wrong_is_noticed() -> None:
    with running() as server, server.connect(WHOLE.replace(b"/ ", b"/leave ", 1)) as sock:
        sock.sendall(b"nonsense\r\n\r\n")
        wait_for(lambda: server.errors == [400])
        sock.sendall(WHOLE * 1000)  # the server ignores these
        assert not server.left.is_set()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
        assert server.left.wait(20)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_an_early_last_answer_reaches_a_client_that_still_sends(version: str) -> None:
    """It is sent at once, and the connection ends when the client has ended its side."""
    body = bytes(32 << 20)
    head = (
        f"POST /early HTTP/{version}\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    with running() as server, server.connect(head.encode()) as sock:
        assert server.sent.wait(20)
        sock.sendall(body)  # a reset would end it
        said = answer(sock)
        assert said.startswith(b"HTTP/1.1 200 ") and said.endswith(b"\r\n\r\ndone")
        assert len(server.server.server_state.connections) == 1
        sock.shutdown(socket.SHUT_WR)
        wait_for(lambda: not server.server.server_state.connections)


def test_a_client_that_sends_on_for_long_behind_its_last_answer_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.3)
    head = b"POST /early HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 99999999999\r\n\r\n"
    with running() as server, server.connect(head) as sock, pytest.raises(OSError):
        for _ in range(1000):
            sock.sendall(bytes(1000))
            time.sleep(0.01)


@pytest.mark.parametrize("path", [b"/held", b"/early"])
def test_what_is_wrong_amid_a_body_that_has_an_answer_is_not_answered_as_well(path: bytes) -> None:
    """Neither within the answer nor behind it, where it would be that of the next request."""
    chunked = b"POST %s HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n" % path
    with running() as server, server.connect(chunked) as sock:
        assert sock.recv(4096).startswith(b"HTTP/1.1 200 ")
        wait_for(lambda: server.sent.is_set() or path == b"/held")
        sock.sendall(b"nonsense\r\n\r\n")
        assert b"HTTP/1.1" not in answer(sock) and server.errors == [400]


def test_clients_that_do_not_read_are_cut_where_too_much_is_kept_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The largest first, with what their answers keep besides: small ones stay, however slow their client."""
    monkeypatch.setattr("flashinfer_backend.openai.connection.MOST_UNREAD", 20 << 20)
    with running() as server, contextlib.ExitStack() as opened:

        def asked(path: bytes, size: int) -> socket.socket:
            head = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path, size)
            return opened.enter_context(server.connect(head + b"x" * size))

        def cut(sock: socket.socket) -> bool:
            return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != 1

        small, large = asked(b"/echo", 8 << 20), [asked(b"/echo", 12 << 20) for _ in range(3)]
        held = asked(b"/held", 4)
        wait_for(lambda: cut(held) and server.left.is_set() and any(map(cut, large)))
        assert not cut(small) and not all(map(cut, large))
        with server.connect(WHOLE) as sock:
            assert sock.recv(4096).startswith(b"HTTP/1.1 200 ")
        assert small.recv(1) == b"H"


def test_what_is_sent_to_a_client_that_does_not_read_waits() -> None:
    with running() as server, server.connect(WHOLE.replace(b"/ ", b"/unread ", 1)):
        wait_for(lambda: server.waits)


def test_endless_headers_are_refused() -> None:
    for begun, end in ((b"", b"\r\n"), (b"upgrade: ", b"z")):
        with running() as server, server.connect(b"POST / HTTP/1.1\r\n" + begun) as sock:
            with contextlib.suppress(OSError):
                for _ in range(20 * MOST_HEADER_BYTES // 1000):  # more than is read at once
                    sock.sendall(b"x: " + b"y" * 995 + end)
            wait_for(lambda server=server: server.errors == [431])
    with running() as server, server.connect(WHOLE[:-4].replace(b": 4", b": 300000")) as sock:
        sock.sendall(b"x" * 300_000)
        assert sock.recv(4096).startswith(b"HTTP/1.1 200 "), "a body is no header"
    chunked = b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n4\r\nbody\r\n"
    for begun in (b"0\r\n", b"0\r\nx: ", b"4;x=", b"4;x=y\r\nmore\r\n4;x="):  # trailers, extensions
        with running() as server, server.connect(chunked + begun) as sock:
            with contextlib.suppress(OSError):
                for _ in range(20 * MOST_HEADER_BYTES // 1000):
                    sock.sendall(b"y" * 995 + (b":z\r\n" if begun == b"0\r\n" else b"y"))
            wait_for(lambda server=server: server.errors == [431], timeout_s=20)
    with running() as server, server.connect(chunked) as sock:
        for size in (1, 70_000, 5) * 20:
            sock.sendall(b"%x;x=%s\r\n%s\r\n" % (size, b"y" * 60_000, b"z" * size))
        sock.sendall(b"0\r\nx: y\r\n\r\n")
        assert sock.recv(4096).startswith(b"HTTP/1.1 200 "), "a chunk begins anew"


def test_many_headers_are_refused() -> None:
    """Within their bytes, each is a call of Python's, and the process does nothing else meanwhile."""
    begun, fields = WHOLE.partition(b"\r\n")[0] + b"\r\n", b"a: b\r\n" * (MOST_HEADERS - 2)
    rest = WHOLE[len(begun) :]  # with two headers
    chunked = b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    trailers = b"0\r\n" + fields + b"\r\n"
    for data, status in (
        (begun + fields + rest, 200),
        (begun + fields + b"a: b\r\n" + rest, 431),
        (chunked + trailers, 200),
        (chunked + b"0\r\na: b\r\n" + trailers[3:], 431),
        (chunked + b"1\r\nx\r\n" * 20_000 + b"0\r\n\r\n", 200),  # chunks may be small
    ):
        with running() as server, server.connect(data) as sock:
            assert sock.recv(4096).startswith(b"HTTP/1.1 %d " % status)
            assert server.errors == [status] * (status != 200)


@pytest.mark.parametrize("size", [7, 1 << 14])
def test_what_arrives_waits_its_turn_where_the_process_is_busy(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """In parts, and with all that may come behind it: further requests, the end, nonsense."""
    monkeypatch.setattr("flashinfer_backend.openai.connection.READ_S", 0.0)
    monkeypatch.setattr("flashinfer_backend.openai.connection.READ_BYTES", size)
    body = bytes(range(256)) * 300
    head = b"POST /echo HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n"
    chunks = b"".join(
        b"%x\r\n%s\r\n" % (len(body) // 300, body[at : at + 256]) for at in range(0, len(body), 256)
    )
    with running() as server:
        for data in (
            head + b"content-length: %d\r\n\r\n%s" % (len(body), body),
            head + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n",
        ):
            with server.connect(data) as sock:
                sock.shutdown(socket.SHUT_WR)
                assert answer(sock).removesuffix(b"\r\n0\r\n\r\n").endswith(body)
        with server.connect(WHOLE * 3) as sock:
            sock.shutdown(socket.SHUT_WR)
            assert answer(sock).count(b"done") == 3
        with server.connect(WHOLE + b"nonsense\r\n\r\n") as sock:
            got = answer(sock).split(b"HTTP/1.1 ")[1:]
            assert [each[:3] for each in got] == [b"200", b"400"] and server.errors == [400]
        left = server.connect(head + b"content-length: %d\r\n\r\n%s" % (1 << 20, body))
        left.close()  # amid what was not parsed
        wait_for(lambda: not server.server.server_state.connections)


def test_what_is_not_parsed_yet_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashinfer_backend.openai.connection.READ_S", 0.0)
    monkeypatch.setattr("flashinfer_backend.openai.connection.MOST_LATER", 50_000)
    head = b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    with running() as server:
        for _ in range(20):  # what was parsed counts no more
            with server.connect(head % 30_000 + bytes(30_000)) as sock:
                assert sock.recv(4096).startswith(b"HTTP/1.1 200 ")
        monkeypatch.setattr("flashinfer_backend.openai.connection.MOST_LATER", 5)
        with server.connect(WHOLE) as sock:
            got = answer(sock)
        assert got.startswith(b"HTTP/1.1 503 ") and b"at the same time" in got and server.errors == [503]


def test_a_connection_whose_turn_fails_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashinfer_backend.openai.connection.READ_S", 0.0)
    read = Connection._read

    def fails(connection: Connection, data: bytes) -> None:
        if b"fail" in data:
            raise RuntimeError
        read(connection, data)

    monkeypatch.setattr(Connection, "_read", fails)
    with running() as server, server.connect(b"fail") as failed:
        assert answer(failed) == b""
        with server.connect(WHOLE) as sock:
            assert sock.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_clients_that_send_much_let_others_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashinfer_backend.openai.connection.READ_S", 0.0)
    monkeypatch.setattr("flashinfer_backend.openai.connection.READ_BYTES", 256)
    head = b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (2 << 20)
    with running() as server, server.connect(head) as much:
        sender = threading.Thread(target=much.sendall, args=(bytes(2 << 20),), daemon=True)
        sender.start()
        for _ in range(3):
            with server.connect(WHOLE) as sock:
                assert sock.recv(4096).startswith(b"HTTP/1.1 200 ")
        assert select.select([much], [], [], 0)[0] == []  # its body is not whole yet
        assert much.recv(4096).startswith(b"HTTP/1.1 200 ")
        sender.join()


def test_bodies_that_arrive_at_the_same_time_are_bounded_together() -> None:
    async def arriving(size: int, go_on: asyncio.Event, bodies: Bodies) -> bytes:
        async def receive() -> dict[str, Any]:
            if sent:
                await go_on.wait()
            sent.append(0)
            return {"type": "http.request", "body": b"x" * size, "more_body": len(sent) == 1}

        sent: list[int] = []
        async with bodies.arriving(Request({"type": "http", "headers": []}, receive)) as body:
            return body

    async def main() -> None:
        bodies, go_on = Bodies(1000), asyncio.Event()
        slow = [asyncio.ensure_future(arriving(450, go_on, bodies)) for _ in range(2 * MANY_BODIES)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="try again") as error:
            await arriving(900, go_on, bodies)
        assert error.value.status == 503
        slow[0].cancel()  # a client that has left counts no more
        await asyncio.wait([slow[0]])
        go_on.set()
        assert await arriving(450, go_on, bodies) == b"x" * 900
        with pytest.raises(ApiError, match="larger than 1000 bytes"):
            await arriving(501, go_on, bodies)
        for one in slow[1:]:
            assert await one == b"x" * 900
        assert await arriving(500, go_on, bodies) == b"x" * 1000

    asyncio.run(main())


def test_the_length_of_a_body_can_begin_with_any_number_of_zeros() -> None:
    """Python reads numbers of up to 4300 digits."""

    async def main() -> int:
        headers = [(b"content-length", b"0" * 5000 + b"4")]
        request = Request({"type": "http", "headers": headers}, receive)
        async with Bodies(1000).arriving(request) as body:
            return len(body)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"body", "more_body": False}

    assert asyncio.run(main()) == 4


def test_the_largest_bodies_give_way_to_smaller_ones() -> None:
    """Else clients that hold large ones kept all others out, also with a hundred bytes. Of those of one size
    the last one is refused, by the size that it says."""

    async def arriving(size: int, bodies: Bodies, said: int, go_on: asyncio.Event) -> int:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"x" * size, "more_body": False}

        headers = [(b"content-length", b"%d" % said)]
        async with bodies.arriving(Request({"type": "http", "headers": headers}, receive)) as body:
            await go_on.wait()
            return len(body)

    async def main() -> None:
        bodies, go_on = Bodies(1000), asyncio.Event()
        held = [asyncio.ensure_future(arriving(1000, bodies, 1000, go_on)) for _ in range(MANY_BODIES)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="try again"):
            await arriving(10, bodies, 1000, go_on)
        small = [asyncio.ensure_future(arriving(100, bodies, 100, go_on)) for _ in range(11)]
        await asyncio.sleep(0)
        go_on.set()
        found = await asyncio.gather(*held, *small, return_exceptions=True)
        refused = [each for each in found if isinstance(each, ApiError)]
        assert [each.status for each in refused] == [503, 503] and not {*refused} & {*found[MANY_BODIES:]}
        cancelled = asyncio.ensure_future(arriving(1, bodies, 1, asyncio.Event()))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled

    asyncio.run(main())
