# SPDX-License-Identifier: Apache-2.0
"""A postprocessing that does not answer is told from one that is slow, refuses, or is gone."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator

import pytest

from flashinfer_backend.launch.postprocessing_watch import PostprocessingWatch
from waiting import wait_for


class Handler(http.server.BaseHTTPRequestHandler):
    status, asked = 200, 0
    held = threading.Event()  # cleared: nothing is answered

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v2/models/postprocessing/infer" and len(body["inputs"]) == 2
        type(self).asked += 1
        self.held.wait()
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


@pytest.fixture
def handler() -> Iterator[type[Handler]]:
    class Mine(Handler):
        held = threading.Event()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Mine) as server:
        server.daemon_threads = True
        Mine.url = f"http://127.0.0.1:{server.server_port}"  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Mine
        Mine.held.set()
        server.shutdown()


@pytest.mark.parametrize("status", [200, 400, 503])
def test_any_answer_will_do(handler, status):
    handler.status = status
    handler.held.set()
    watch = PostprocessingWatch(handler.url, answer_s=30.0, every_s=0.01)
    wait_for(lambda: handler.asked > 3)
    assert not watch.stuck
    watch.close()


def test_no_answer_is_noticed_and_stays(handler):
    watch = PostprocessingWatch(handler.url, answer_s=0.2, every_s=0.01)
    wait_for(lambda: watch.stuck)
    time.sleep(1.5)  # its own patience is over by then
    assert watch.stuck and handler.asked == 1
    watch.close()


def test_a_server_that_has_gone_is_not_stuck():
    watch = PostprocessingWatch("http://127.0.0.1:9", answer_s=0.05, every_s=0.01)
    time.sleep(0.3)
    assert not watch.stuck
    watch.close()
