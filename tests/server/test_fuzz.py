# SPDX-License-Identifier: Apache-2.0
"""Random requests: the short form of `make fuzz` (tests/reliability/fuzz.py)."""

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
