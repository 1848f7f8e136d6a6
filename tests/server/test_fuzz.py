# SPDX-License-Identifier: Apache-2.0
"""Random requests: the short form of `make fuzz` (tests/reliability/fuzz.py)."""

from __future__ import annotations

from fuzz import Findings, OpenAiFuzz, TritonFuzz, fuzz, judge_words
from openai_server import OpenAiServer
from running import Server


def check(findings: Findings, *kinds: str) -> None:
    assert not findings.wrong, "\n".join(findings.wrong)
    for kind in ("control", *kinds):
        assert findings.counts[kind], findings.counts


def test_random_requests_to_the_models(server: Server) -> None:
    kinds = [f"{way} {model}: {end}" for way in ("generate", "gRPC stream") for model in ("ensemble", "llm")
             for end in ("whole", "error")]  # fmt: skip
    kinds += [
        f"gRPC {model}: {end}" for model in ("preprocessing", "postprocessing") for end in ("whole", "error")
    ]
    check(fuzz(TritonFuzz(server), 500, seed=7), *kinds)
    assert "Traceback" not in server.log


def test_random_requests_to_the_openai_api(door: OpenAiServer) -> None:
    routes = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize")
    kinds = [f"{route}: {end}" for route in routes for end in ("whole", "error")]
    check(fuzz(OpenAiFuzz(door), 400, seed=7), *kinds)
    assert "Traceback" not in door.log


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
