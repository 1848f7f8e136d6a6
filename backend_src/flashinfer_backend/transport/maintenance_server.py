# SPDX-License-Identifier: Apache-2.0
"""Answers 503 on an API's HTTP port while tritonserver, or the processes of the OpenAI API, are being started
again.

tritonserver and its maintenance server both listen with SO_REUSEPORT, so there is no moment at which a
connection is refused. Of two sockets that listen, the later one is given all new connections: that is the
maintenance server while the old server ends, and the new server from the moment that it listens.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from flashinfer_backend.transport.addresses import Address

RESTARTING = "The server is being started again; please try again."
READ_S = 2.0  # how long a client may take to send its request
LARGEST_BODY = 1 << 20  # bytes that are read before the answer; a larger body is cut off


Answer = Callable[[str], bytes | None]  # path to the body of a 503; None: 200, without a body


def triton_answer(path: str) -> bytes | None:
    """tritonserver is live meanwhile, and nothing else."""
    return None if path == "/v2/health/live" else json.dumps({"error": RESTARTING}).encode()


class _Handler(BaseHTTPRequestHandler):
    timeout = READ_S
    server: _Server

    def do_GET(self) -> None:
        """200, or 503 with the reason."""
        with contextlib.suppress(OSError, ValueError):  # an answer before the body was read would be lost
            self.rfile.read(max(0, min(int(self.headers.get("Content-Length", "0")), LARGEST_BODY)))
        body = self.server.answer(self.path.partition("?")[0])
        live = body is None
        with contextlib.suppress(OSError):
            self.send_response(200 if live else 503)
            if not live:
                self.send_header("Retry-After", "1")
                self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body or b"")))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body or b"")
        self.close_connection = True

    do_POST = do_PUT = do_HEAD = do_DELETE = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024

    def __init__(self, address: Address, port: int, answer: Answer, listener: socket.socket | None) -> None:
        self.answer = answer
        self._own = listener is None
        self._began: dict[socket.socket, float] = {}  # by connection; those that are open
        self.address_family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
        super().__init__((str(address), port), _Handler, bind_and_activate=listener is None)
        if listener is not None:
            self.socket.close()
            self.socket = listener.dup()

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)  # the base class would look its host name up

    def server_activate(self) -> None:
        super().server_activate()
        # "Return 1": the index of the later of two sockets. Where there is only one, the kernel takes that.
        so_attach_reuseport_cbpf = 51
        program = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 1))
        with contextlib.suppress(OSError):  # then each is given some
            where = struct.pack("@HP", 1, ctypes.addressof(program))
            self.socket.setsockopt(socket.SOL_SOCKET, so_attach_reuseport_cbpf, where)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._began[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._began.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        self._cut(READ_S)

    def server_close(self) -> None:
        if self._own:  # connections that wait for it would be reset
            with contextlib.suppress(OSError, RuntimeError):  # none is left, or no room for a thread
                self.socket.setblocking(False)
                for _ in range(self.request_queue_size):
                    request, address = self.socket.accept()
                    request.setblocking(True)
                    self.process_request(request, address)
        super().server_close()
        late = threading.Timer(READ_S, self._cut, [0.0])  # requests on their way are answered still
        late.daemon = True
        with contextlib.suppress(RuntimeError):
            late.start()

    def _cut(self, after_s: float) -> None:
        """Reads no more of connections that are this old: each is answered by what has come of its request. A
        handler's own timeout is for one read: a client that sends a byte a second never meets it."""
        for request, began in list(self._began.items()):
            if time.monotonic() >= began + after_s:
                with contextlib.suppress(OSError):  # its client has left
                    request.shutdown(socket.SHUT_RD)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that leaves is no news."""


@contextlib.contextmanager
def maintenance_server(
    address: Address, port: int, answer: Answer = triton_answer, listener: socket.socket | None = None
) -> Iterator[None]:
    """Answers until the block is left; not at all if the port is taken. listener: a socket that
    listens there already."""
    try:
        server = _Server(address, port, answer, listener)
    except OSError:
        yield
        return
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
