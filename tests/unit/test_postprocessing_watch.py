# SPDX-License-Identifier: Apache-2.0
"""A postprocessing that does not answer is told from one that is slow, refuses, or is gone."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import pytest

from answering import answering, response
from flashinfer_backend.launch.postprocessing_watch import PostprocessingWatch
from waiting import wait_for


class Server:
    """Answers with a status once it may."""

    def __init__(self) -> None:
        self.status, self.asked, self.may = 200, 0, threading.Event()

    def answer(self, path: str, body: bytes) -> bytes:
        assert path == "/v2/models/postprocessing/infer" and len(json.loads(body)["inputs"]) == 2
        self.asked += 1
        self.may.wait()
        return response(self.status)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    with answering(made.answer) as made.url:  # type: ignore[attr-defined]
        yield made
        made.may.set()


@pytest.mark.parametrize("status", [200, 400, 503])
def test_any_answer_will_do(server, status):
    server.status = status
    server.may.set()
    watch = PostprocessingWatch(server.url, answer_s=30.0, every_s=0.01)
    wait_for(lambda: server.asked > 3)
    assert not watch.stuck
    watch.close()


def test_no_answer_is_noticed_and_stays(server):
    watch = PostprocessingWatch(server.url, answer_s=0.2, every_s=0.01)
    wait_for(lambda: watch.stuck)
    time.sleep(1.5)  # its own patience is over by then
    assert watch.stuck and server.asked == 1
    watch.close()


def test_a_server_that_has_gone_is_not_stuck():
    watch = PostprocessingWatch("http://127.0.0.1:9", answer_s=0.05, every_s=0.01)
    time.sleep(0.3)
    assert not watch.stuck
    watch.close()
