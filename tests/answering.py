# SPDX-License-Identifier: Apache-2.0
"""A local HTTP server that answers as a test says."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def response(status: int, text: str = "", missing: int = 0) -> bytes:
    """missing: bytes that its header tells of and that never come."""
    head = f"HTTP/1.0 {status} X\r\nContent-Length: {len(text.encode()) + missing}\r\n\r\n"
    return (head + text).encode()


@contextmanager
def answering(answer: Callable[[str, bytes], bytes]) -> Iterator[str]:
    """The URL of a server that sends answer(path, body) and closes the connection."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            self.wfile.write(answer(self.path, body))

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
