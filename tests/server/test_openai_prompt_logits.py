# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of many prompts: the logits that they need have a bound, LOGITS_MIB."""

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from openai_server import LOGITS_MIB, OpenAiServer
from running import wait_for

BYTES = 4 * 2048  # of a token's logits


def prompt(number: int, tokens: int) -> list[int]:
    return [5 + (7 * number + 13 * i) % 2000 for i in range(tokens)]


def asking(*prompts: list[int], **more: Any) -> dict[str, Any]:
    body = {"prompt": list(prompts), "max_tokens": 2, "temperature": 0.0, "ignore_eos": True}
    return {**body, "echo": True, "logprobs": 3, **more}


def held(api: OpenAiServer) -> float:
    return api.metric("prompt_logits_bytes")


def waiting(api: OpenAiServer) -> float:
    return api.metric("prompt_logits_waiting")


def alike(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert (one["text"], one["finish_reason"]) == (other["text"], other["finish_reason"])
    first, second = one["logprobs"], other["logprobs"]
    assert first["tokens"] == second["tokens"] and first["text_offset"] == second["text_offset"]
    assert first["token_logprobs"][0] is second["token_logprobs"][0] is None
    assert first["token_logprobs"][1:] == pytest.approx(second["token_logprobs"][1:], abs=1e-3)
    for mine, others in zip(first["top_logprobs"][1:], second["top_logprobs"][1:], strict=True):
        assert max(mine.values()) == pytest.approx(max(others.values()), abs=1e-3)


def test_many_prompts_get_the_answers_of_one_at_a_time_within_the_bound(api: OpenAiServer) -> None:
    prompts = [prompt(n, 40 + 9 * n) for n in range(16)]
    assert sum(map(len, prompts)) * BYTES > 3 * (LOGITS_MIB << 20)
    _, _, together = api.call("/v1/completions", asking(*prompts))
    assert (LOGITS_MIB << 19) < api.metric("prompt_logits_peak_bytes") <= LOGITS_MIB << 20
    assert (held(api), waiting(api)) == (0.0, 0.0)
    for ids, choice in zip(prompts[::3], together["choices"][::3], strict=True):
        assert len(choice["logprobs"]["tokens"]) == len(ids) + 2
        alike(choice, api.call("/v1/completions", asking(ids))[2]["choices"][0])
    # A prompt that is larger than the bound goes alone.
    tokens = (LOGITS_MIB << 20) // BYTES + 9
    _, _, answer = api.call("/v1/completions", asking(prompt(1, tokens), n=3))
    first, *others = answer["choices"]
    for choice in others:
        alike(choice, first)
    assert api.metric("prompt_logits_peak_bytes") == tokens * BYTES  # alone, and once for all three


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


@contextlib.contextmanager
def engine_held(api: OpenAiServer) -> Iterator[None]:
    """The engine answers nothing meanwhile, so that what has room for its logits keeps it."""
    engine = api.engine()
    engine.suspend()
    try:
        yield
    finally:
        engine.resume()


def test_a_wait_for_room_ends_when_it_was_asked_to(api: OpenAiServer) -> None:
    with engine_held(api), api.asked("/v1/completions", asking(prompt(1, 400))):
        wait_for(lambda: held(api) == 400 * BYTES, "room for the first")
        late = asking(prompt(2, 400), queue_timeout=0.2)
        status, message, _, code = api.error("/v1/completions", late)
        assert (status, code) == (503, "queue_timeout") and "room" in message
    wait_for(lambda: held(api) == 0, "all room to be free")
