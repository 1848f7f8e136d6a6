# SPDX-License-Identifier: Apache-2.0
"""The OpenAI API while clients leave, engines and processes end, and the server is stopped."""

import contextlib
import json
import os
import select
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai_server import OpenAiServer, events, openai_running
from running import TIMEOUT_S, BothApis, files_below, wait_for

from client.load import Load

LONG: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "max_tokens": 1500,
    "ignore_eos": True,
    "temperature": 0.0,
}
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ECHO = {"prompt": [7] * 20, "max_tokens": 1500, "ignore_eos": True, "echo": True, "logprobs": 1}


@pytest.fixture(scope="module")
def harmed(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAiServer]:
    """Parts of it are killed, one after the other; the last test that takes it ends it."""
    options = ["--drain-seconds", "20"]
    with openai_running(chat_model, tmp_path_factory.mktemp("harmed"), *options) as started:
        yield started


def engine(server: OpenAiServer, name: str) -> float:
    return server.metric(f"engine_{name}")


def idle(server: OpenAiServer) -> bool:
    return engine(server, "requests_running") == engine(server, "requests_waiting") == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks(api: OpenAiServer, stream: bool) -> None:
    wait_for(lambda: idle(api), "the end of what other tests left")
    before = engine(api, "cancellations")
    with api.asked(CHAT, {**LONG, "stream": stream, "n": 2}) as connection:
        wait_for(lambda: engine(api, "requests_running") == 2, "both to run")
        if stream:
            assert connection.getresponse().read(10)
    wait_for(lambda: engine(api, "blocks_used") == engine(api, "requests_running") == 0, "free blocks")
    assert engine(api, "cancellations") == before + 2, "they did not come to their end"


def test_an_engine_that_ends_is_replaced(harmed: OpenAiServer) -> None:
    first = harmed.engine()
    with harmed.opened(CHAT, {**LONG, "stream": True}) as answer:
        assert answer.status == 200 and answer.read(10)
        with harmed.asked(COMPLETIONS, ECHO) as whole:
            wait_for(lambda: engine(harmed, "requests_running") == 2, "both to run")
            first.kill()
            error = json.load(whole.getresponse())["error"]
            assert error["code"] == "engine_unavailable"
        text = answer.read().decode()
    last = json.loads(text.splitlines()[-2].removeprefix("data: "))
    assert last["error"]["code"] == "engine_unavailable" and "[DONE]" not in text
    status, headers, answer_body = harmed.call(CHAT, {**LONG, "max_tokens": 3})
    if status != 200:  # it may be back already
        assert (status, answer_body["error"]["code"]) == (503, "engine_unavailable")
        assert int(headers["Retry-After"]) > 0 and harmed.call("/health")[0] == 503
    wait_for(lambda: harmed.call("/health")[0] == 200, "another engine")
    assert harmed.call(CHAT, {**LONG, "max_tokens": 3})[0] == 200 and harmed.engine().pid != first.pid


def test_a_process_that_ends_is_replaced(harmed: OpenAiServer) -> None:
    """Its counters go on in its files."""
    ended = 'sequences_finished_total{finish_reason="length"}'
    assert harmed.call(CHAT, {**LONG, "max_tokens": 3})[0] == 200
    before = harmed.metric(ended)
    (folder,) = harmed.runs.glob("flashinfer-backend-*/*-openai-metrics")
    files = sorted(folder.iterdir())
    (first,) = harmed.workers()
    harmed.engine().suspend()  # the other process does not find it at once
    first.kill()
    wait_for(lambda: any(each.pid != first.pid for each in harmed.workers()), "another process")
    threading.Timer(2.0, harmed.engine().resume).start()
    assert harmed.call(CHAT, {**LONG, "max_tokens": 3})[0] == 200, "the connection waited for it"
    assert "another takes its place" in harmed.log
    assert harmed.metric(ended) == before + 1
    assert sorted(folder.iterdir()) == files


def test_running_requests_end_before_the_server_does(harmed: OpenAiServer) -> None:
    with harmed.opened(CHAT, {**LONG, "max_tokens": 300, "stream": True}) as answer:
        answer.read(10)
        harmed.parent.terminate()
        text = answer.read().decode()
    assert '"finish_reason":"length"' in text and text.endswith("data: [DONE]\n\n")
    assert harmed.parent.wait(TIMEOUT_S) == 0
    wait_for(lambda: not harmed.leftovers(), "nothing to be left")


def test_requests_without_time_to_end_are_told_so_and_the_log_keeps_still(
    chat_model: Path, tmp_path: Path
) -> None:
    """It had a traceback for each, and an answer that had not begun was a 500 without words."""
    with openai_running(chat_model, tmp_path, "--drain-seconds", "1", "--workers", "2") as server:
        with server.opened(CHAT, {**LONG, "stream": True}) as stream, server.asked(CHAT, LONG) as whole:
            stream.read(10)
            wait_for(lambda: engine(server, "requests_running") == 2, "both to run")
            server.parent.send_signal(signal.SIGINT)
            answer = whole.getresponse()
            error = json.loads(answer.read())["error"]
            assert (answer.status, error["message"]) == (503, "The server is shutting down.")
            assert "The server is shutting down." in stream.read().decode().splitlines()[-2]
        assert server.parent.wait(TIMEOUT_S) == 0
        assert "Traceback" not in server.log
        wait_for(lambda: not server.leftovers(), "nothing to be left")


@pytest.mark.parametrize("apis", ["alone", "with tritonserver"])
def test_a_process_that_cannot_start_ends_the_whole(
    chat_model: Path, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apis: str
) -> None:
    """It was replaced for ever."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "prometheus_client.py").write_text("raise ImportError('no such codec')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"), prepend=os.pathsep)
    server: OpenAiServer | BothApis
    if apis == "alone":
        server = OpenAiServer(chat_model, tmp_path)
        process = server.parent
    else:
        server = BothApis(repository, tmp_path)
        process = server.launcher
    try:
        assert process.wait(TIMEOUT_S) == 1
        assert server.log.count("ImportError: no such codec") == 1
        assert "openai: a process ended with status 1 before it could serve" in server.log
        assert apis == "alone" or "serve: the OpenAI API cannot serve" in server.log
        wait_for(lambda: not server.leftovers(), "nothing to be left")
    finally:
        server.close()


def test_an_engine_that_cannot_start(chat_model: Path, tmp_path: Path) -> None:
    with contextlib.closing(OpenAiServer(chat_model, tmp_path, "max_seq_len=999999")) as server:
        assert server.parent.wait(TIMEOUT_S * 2) == 1
        assert "max_seq_len 999999" in server.log
        wait_for(lambda: not server.leftovers(), "nothing to be left")


@pytest.fixture(scope="module")
def narrow(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAiServer]:
    """One runs, two wait. The last test that takes it ends it."""
    settings = ["max_num_seqs=1", "max_queue_size=2"]
    with openai_running(chat_model, tmp_path_factory.mktemp("narrow"), *settings) as started:
        yield started


def test_a_full_queue_is_said_before_a_stream_begins(narrow: OpenAiServer) -> None:
    body = {**LONG, "stream": True}
    with narrow.opened(CHAT, body) as first:
        assert first.read(10)
        with narrow.asked(CHAT, body), narrow.asked(CHAT, body):
            wait_for(lambda: engine(narrow, "requests_waiting") == 2, "two to wait")
            status, headers, answer = narrow.call(CHAT, body)
            assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
            assert headers["Retry-After"]
    wait_for(lambda: idle(narrow), "the others to be dropped")
    with narrow.opened(CHAT, {**LONG, "max_tokens": 3, "stream": True}) as answer:
        assert events(answer.read().decode())[-1]["choices"][0]["finish_reason"] == "length"


def test_a_request_that_has_waited_too_long(narrow: OpenAiServer) -> None:
    with narrow.opened(CHAT, {**LONG, "stream": True, "queue_timeout": 60}) as first:
        assert first.read(10)
        for stream in (True, False):
            status, headers, answer = narrow.call(CHAT, {**LONG, "stream": stream, "queue_timeout": 0.001})
            error = answer["error"]
            assert (status, error["type"], error["code"]) == (503, "server_error", "queue_timeout")
            assert error["message"].startswith("Request timeout expired: it waited in the queue for")
            assert headers["Retry-After"]
        wait_for(lambda: engine(narrow, "requests_running") == 1, "the first to run on")
    wait_for(lambda: idle(narrow), "the first to be dropped")


def test_the_longest_of_known_lengths_goes_first(narrow: OpenAiServer) -> None:
    """As rows of known lengths ask for it, by a smaller priority: the longer one, which comes last."""
    load = Load("openai-chat", narrow.url, "tiny-chat", priority_per_output_token=-1)
    shorter, longer = (load.body("Tell me a story.", tokens) for tokens in (1000, 1500))
    with contextlib.ExitStack() as waiting, contextlib.ExitStack() as running:
        assert running.enter_context(narrow.opened(CHAT, {**LONG, "stream": True})).read(10)
        first = waiting.enter_context(narrow.asked(CHAT, shorter))
        wait_for(lambda: engine(narrow, "requests_waiting") == 1, "one to wait")
        overtaking = waiting.enter_context(narrow.asked(CHAT, longer))
        wait_for(lambda: engine(narrow, "requests_waiting") == 2, "two to wait")
        running.close()  # its client leaves
        assert overtaking.getresponse().read(10)
        assert select.select([first.sock], [], [], 0)[0] == [], "it has begun already"
    wait_for(lambda: idle(narrow), "both to be dropped")


def test_no_process_outlives_a_parent_that_is_killed(narrow: OpenAiServer) -> None:
    assert narrow.workers() and narrow.engine().is_running()
    narrow.parent.kill()
    narrow.parent.wait(TIMEOUT_S)
    files = files_below(narrow.runs)
    wait_for(lambda: set(narrow.leftovers()) <= set(files), "the processes to end")
