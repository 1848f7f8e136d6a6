# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of many and of long prompts."""

import json
import time
from typing import Any

import pytest
from openai_server import OpenAiServer


def prompt(number: int, tokens: int) -> list[int]:
    return [5 + (7 * number + 13 * i) % 2000 for i in range(tokens)]


def asking(*prompts: list[int], **more: Any) -> dict[str, Any]:
    body = {"prompt": list(prompts), "max_tokens": 2, "temperature": 0.0, "ignore_eos": True}
    return {**body, "echo": True, "logprobs": 3, **more}


def alike(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert (one["text"], one["finish_reason"]) == (other["text"], other["finish_reason"])
    first, second = one["logprobs"], other["logprobs"]
    assert first["tokens"] == second["tokens"] and first["text_offset"] == second["text_offset"]
    assert first["token_logprobs"][0] is second["token_logprobs"][0] is None
    assert first["token_logprobs"][1:] == pytest.approx(second["token_logprobs"][1:], abs=1e-3)
    for mine, others in zip(first["top_logprobs"][1:], second["top_logprobs"][1:], strict=True):
        assert max(mine.values()) == pytest.approx(max(others.values()), abs=1e-3)


def test_many_prompts_get_the_answers_of_one_at_a_time(api: OpenAiServer) -> None:
    """Some of them are computed in several steps."""
    prompts = [prompt(n, 40 + 100 * n) for n in range(16)]
    _, _, together = api.call("/v1/completions", asking(*prompts))
    for ids, choice in zip(prompts[::3], together["choices"][::3], strict=True):
        assert len(choice["logprobs"]["tokens"]) == len(ids) + 2
        alike(choice, api.call("/v1/completions", asking(ids))[2]["choices"][0])
    _, _, answer = api.call("/v1/completions", asking(prompts[-1], n=3))
    for choice in answer["choices"]:
        alike(choice, together["choices"][-1])


@pytest.mark.parametrize("more", [{"echo": True, "logprobs": 20}, {"prompt_logprobs": 20}], ids=str)
def test_what_all_answers_repeat_of_their_prompt_is_held_once(
    api: OpenAiServer, more: dict[str, Any]
) -> None:
    """Together they are 50 and 90 MB, which a client could leave unread."""
    (worker,) = api.workers()
    body = {"prompt": prompt(1, 500), "max_tokens": 1, "n": 128, **more}
    before = worker.memory_info().rss
    with api.opened("/v1/completions", body) as answer:
        time.sleep(1.0)
        grown = worker.memory_info().rss - before
        first, *others = json.loads(answer.read())["choices"]
    assert grown < 24 << 20
    told = "logprobs" if "echo" in more else "prompt_logprobs"
    assert [other["index"] for other in others] == list(range(1, 128)) and len(str(first[told])) > 100_000
    if "echo" not in more:
        assert all(other[told] == first[told] for other in others)
