# SPDX-License-Identifier: Apache-2.0
"""`client generate` and `client chat` against servers that answer otherwise than was due."""

import io
import json
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from answering import answering, response
from client import chat, generate

ROOT = Path(__file__).parents[2]


@pytest.fixture
def answers():
    """(URL of a server, the answers that it still has to give)."""
    waiting = []
    other = b"\x00\x00\x18\x04 HTTP/2\r\n"
    with answering(lambda *_: waiting.pop(0) if waiting else other) as url:
        yield url, waiting


def events(*events):
    return response(200, "".join(f"data: {json.dumps(event)}\n\n" for event in events))


@pytest.mark.parametrize(
    "answer, message",
    [
        (response(200, "<html>"), "the answer holds no text_output"),
        (response(200, "data: nonsense\n\n"), "an answer that is none: JSONDecodeError"),
        (events([1]), "an answer that is none: ValueError"),
        (events({"output_ids": [1]}), "an answer that is none: KeyError('text_output')"),
    ],
)
def test_generate_says_what_is_no_answer(answers, capsys, answer, message):
    url, waiting = answers
    waiting.append(answer)
    assert generate.main(["--url", url, "Hello"]) == 1
    assert message in capsys.readouterr().err


def test_generate_says_that_nothing_listens(capsys):
    with socket.create_server(("127.0.0.1", 0)) as closed_soon:
        place = f"127.0.0.1:{closed_soon.getsockname()[1]}"
    assert generate.main(["--url", f"http://{place}", "Hello"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: http://{place}/")
    assert "nothing listens there; start the server first" in said
    assert generate.main(["--grpc", "--url", place, "Hello"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: {place}: nothing listens there; start the server first")


def test_without_grpcs_packages_it_is_said_what_to_install():
    words = [sys.executable, "-S", "-E", "-m", "client", "generate", "--grpc", "Hello"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and done.stderr.startswith("client generate needs numpy: `pip install -e")


def test_chat_goes_on_after_an_answer_that_is_none(answers, capsys, monkeypatch):
    url, waiting = answers
    thought, said = {"reasoning": "hm "}, {"content": "yes"}
    good = [{"choices": [{"delta": delta}]} for delta in (thought, said, None)]
    waiting += [events(*good), events({"choices": [None]}), events({"choices": [{"delta": [1]}]})]
    monkeypatch.setattr(sys, "stdin", io.StringIO("Is it?\nAnd then?\n/retry\n/history\n"))
    assert chat.main(["--backend", "openai-chat", "--model", "m", "--url", url]) == 0
    shown = capsys.readouterr()
    assert shown.err.count("error: an answer that is none: ") == 2 and waiting == []
    # What failed leaves no trace, and the answer that was to be given again stays.
    assert "you: Is it?\nmodel: yes" in shown.out and "And then?" not in shown.out
    # What the model thought is shown, and is not said to it again.
    assert "\nhm \n\nyes\n" in shown.out


def test_chat_takes_no_other_conversation(capsys):
    for name in sorted(chat.OF_THE_CHAT):
        with pytest.raises(SystemExit):
            chat.parse_args(["--extra-body", json.dumps({name: "x", "top_k": 1})])
        assert f"--extra-body: {name} is what the conversation says" in capsys.readouterr().err


def test_what_is_no_tokens_is_called_chunks():
    answer = chat.Answer(chunks=9, ttft=0.1, seconds=0.5)
    assert answer.statistics() == "9 chunks, TTFT 100 ms, 20.0 chunks/s, 0.5 s"
    assert "9 tokens" in replace(answer, tokens=9).statistics()
    assert "20.0 tok/s" in replace(answer, tokens=9).statistics()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.0 401 Unauthorized\r\n\r\n",
         "HTTP Error 401: Unauthorized; --api-key-env NAME gives a key"),
        (b"HTTP/1.0 404 Not Found\r\n\r\n",
         "HTTP Error 404: Not Found; it has no OpenAI API (Triton's ensemble: --backend triton)"),
        (b'HTTP/1.0 200 OK\r\n\r\n{"data": []}', "{url}/v1/models lists no model; name one with --model"),
    ],
)  # fmt: skip
def test_chat_says_why_no_model_is_listed(answers, capsys, answer, said):
    url, waiting = answers
    waiting.append(answer)
    assert chat.main(["--backend", "openai-chat", "--url", url]) == 1
    assert capsys.readouterr().err == f"error: {url}: {said.format(url=url)}\n"
