# SPDX-License-Identifier: Apache-2.0
"""Random requests: the short form of `make fuzz` (tests/reliability/fuzz.py)."""

import contextlib
from typing import Any

import fuzz as program
import pytest
from fuzz import MODELS, Findings, OpenAiFuzz, TritonFuzz, fuzz, judge_words
from openai_server import OpenAiServer
from running import Server


def check(findings: Findings, targets: tuple[str, ...]) -> None:
    """Nothing is wrong, and each target gave answers and errors."""
    assert not findings.wrong, "\n".join(findings.wrong)
    assert findings.counts["control"], findings.counts
    for target in targets:
        for end in ("whole", "error"):
            assert any(kind.endswith(f"{target}: {end}") for kind in findings.counts), (target, end)


def test_random_requests_to_the_models(server: Server) -> None:
    check(fuzz(TritonFuzz(server), 500, seed=7), MODELS)
    assert "Traceback" not in server.log


def test_random_requests_to_the_openai_api(api: OpenAiServer) -> None:
    check(fuzz(OpenAiFuzz(api, "hermes"), 400, seed=7), tuple(OpenAiFuzz.ROUTES))
    assert "Traceback" not in api.log


def served_by(server: Server | OpenAiServer) -> Any:
    """What starts a server for the program: the tests' one is there."""
    return lambda *_, **__: contextlib.nullcontext(server)


def test_the_program_sends_requests_to_the_models(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "running", served_by(server))
    assert program.main(["--api", "triton", "--requests", "10", "--threads", "2"]) == 0


def test_the_program_sends_requests_to_the_openai_api(
    api: OpenAiServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "openai_running", served_by(api))
    options = ["--requests", "10", "--threads", "2", "--tool-format", "hermes"]
    assert program.main(["--api", "openai", *options]) == 0
    said = capsys.readouterr().out
    assert "the OpenAI API: seed 1" in said and "0 findings" in said


def test_what_an_error_must_not_show() -> None:
    for text in (
        "no",
        "KeyError: 'x' was raised",
        "see /tmp/x/y for more",
        "it is None but should not be",
        "b<class 'int'>",
    ):
        assert judge_words(text), text
    assert not judge_words("max_tokens is -1; it should be at least 1 (/v2/models/llm)")
