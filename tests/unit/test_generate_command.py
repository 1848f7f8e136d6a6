# SPDX-License-Identifier: Apache-2.0
"""`client generate` against servers that answer otherwise than was due."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from answering import answering, response
from client import generate

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
