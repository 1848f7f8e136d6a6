# SPDX-License-Identifier: Apache-2.0
"""/v1/completions, /tokenize and /detokenize."""

import math
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from openai_server import OpenAiServer, events

PROMPT = "Once upon a time"


def complete(client: openai.OpenAI, **more: Any) -> Any:
    body = {"model": "tiny-chat", "prompt": PROMPT, "max_tokens": 12, "temperature": 0.0, **more}
    return client.completions.create(**body)


def test_texts_and_ids_are_prompts(client: openai.OpenAI, api: OpenAiServer) -> None:
    text = complete(client).choices[0].text
    ids = api.call("/tokenize", {"prompt": PROMPT})[2]
    assert ids["count"] == len(ids["tokens"]) and ids["max_model_len"] == 2048
    assert complete(client, prompt=ids["tokens"]).choices[0].text == text
    both = complete(client, prompt=[PROMPT, "The king"])
    assert [choice.index for choice in both.choices] == [0, 1] and both.choices[0].text == text
    pairs = complete(client, prompt=[ids["tokens"], ids["tokens"][:2]], n=2)
    assert [choice.index for choice in pairs.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in pairs.choices[:2]] == [text] * 2
    assert pairs.usage.prompt_tokens == ids["count"] + 2
    bare = api.call("/tokenize", {"prompt": PROMPT, "add_special_tokens": False, "return_token_strs": True})
    assert bare[2]["tokens"] == ids["tokens"][1:] and len(bare[2]["token_strs"]) == ids["count"] - 1


def test_nothing_ends_an_answer_before_its_minimum_of_tokens(api: OpenAiServer) -> None:
    """As in vLLM: end ids and stop_token_ids are not chosen, and stop words are no reason."""

    def ask(**more: Any) -> tuple[list[int], str, str]:
        body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0.0, "return_token_ids": True, **more}
        (choice,) = api.call("/v1/completions", body)[2]["choices"]
        return choice["token_ids"], choice["text"], choice["finish_reason"]

    ids, text, _ = ask()
    stop = {"stop_token_ids": [ids[4]]}
    assert ask(**stop)[0][-1] == ids[4] and len(ask(**stop)[0]) == ids.index(ids[4]) + 1
    later, _, _ = ask(**stop, min_tokens=9)
    assert later[: ids.index(ids[4])] == ids[: ids.index(ids[4])]
    assert len(later) >= 9 and ids[4] not in later[:9]

    word = api.call("/detokenize", {"tokens": ids[:6]})[2]["prompt"].strip()[-4:]
    first = text.index(word)
    second = text.index(word, first + 1)
    assert ask(stop=word)[1:] == (text[:first], "stop")
    assert ask(stop=word, min_tokens=9)[1:] == (text[:second], "stop")
    chunks = streamed(api, max_tokens=24, stop=word, min_tokens=9)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text[:second]


def streamed(api: OpenAiServer, **more: Any) -> list[Any]:
    """Raw, since the client's types have no null for the reason of an answer that goes on."""
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0.0, "stream": True, **more}
    with api.opened("/v1/completions", body) as stream:
        return events(stream.read().decode())


def test_a_stream_says_the_same(client: openai.OpenAI, api: OpenAiServer) -> None:
    prompts = [PROMPT, "The king"]
    whole = complete(client, prompt=prompts, max_tokens=30, logprobs=0)
    texts, tokens, reasons = ["", ""], [[], []], [None, None]
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = streamed(api, prompt=prompts, max_tokens=30, logprobs=0, stream_options=options)
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        tokens[choice["index"]] += choice["logprobs"]["tokens"]
        reasons[choice["index"]] = choice["finish_reason"]
        assert chunk["usage"]["prompt_tokens"] == whole.usage.prompt_tokens
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert last["usage"]["completion_tokens"] == whole.usage.completion_tokens and not last["choices"]
    assert chunks[0]["usage"]["completion_tokens"] < last["usage"]["completion_tokens"]


def test_a_stream_has_the_ids_of_tokens_that_write_no_text(api: OpenAiServer) -> None:
    """Of a character's first bytes, for one."""
    asked = {"return_token_ids": True, "structured_outputs": {"choice": ["né🙂京"]}}
    body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0.0, **asked}
    (whole,) = api.call("/v1/completions", body)[2]["choices"]
    choices = [chunk["choices"][0] for chunk in streamed(api, max_tokens=20, **asked)]
    assert whole["text"] == "".join(choice["text"] for choice in choices) == "né🙂京"
    assert len(whole["token_ids"]) > len(whole["text"])
    assert [i for choice in choices for i in choice["token_ids"]] == whole["token_ids"]
    assert [choice["prompt_token_ids"] for choice in choices if "prompt_token_ids" in choice] == [
        whole["prompt_token_ids"]
    ]


def test_the_prompt_comes_back_if_asked(client: openai.OpenAI, api: OpenAiServer) -> None:
    text = complete(client).choices[0].text
    assert complete(client, echo=True).choices[0].text == PROMPT + text
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed(api, echo=True)) == PROMPT + text
    nothing = complete(client, echo=True, max_tokens=0)
    assert (nothing.choices[0].text, nothing.usage.completion_tokens) == (PROMPT, 0)
    # Whatever the engine's one token is, which nobody asked for.
    first = api.call("/v1/completions", {"prompt": PROMPT, "temperature": 0.0, "return_token_ids": True})[2]
    stopped = {"echo": True, "max_tokens": 0, "stop_token_ids": [first["choices"][0]["token_ids"][0]]}
    assert complete(client, extra_body=stopped).choices[0].finish_reason == "length"
    assert streamed(api, **stopped)[-1]["choices"][0]["finish_reason"] == "length"


def test_log_probs_of_a_prompt_are_those_of_making_it(client: openai.OpenAI, api: OpenAiServer) -> None:
    made = complete(client, logprobs=0).choices[0]
    body = {"prompt": PROMPT + made.text, "max_tokens": 0, "echo": True, "logprobs": 2}
    full = SimpleNamespace(**api.call("/v1/completions", body)[2]["choices"][0]["logprobs"])
    assert full.token_logprobs[0] is None and full.top_logprobs[0] is None
    count = len(made.logprobs.tokens)
    assert full.tokens[-count:] == made.logprobs.tokens
    assert full.token_logprobs[-count:] == pytest.approx(made.logprobs.token_logprobs, abs=1e-3)
    for chosen, value, best in zip(
        full.tokens[1:], full.token_logprobs[1:], full.top_logprobs[1:], strict=True
    ):
        assert best[chosen] == pytest.approx(value) and 2 <= len(best) <= 3
        assert math.fsum(math.exp(each) for each in best.values()) <= 1.0001
    assert "".join(full.tokens[1:]) == PROMPT + made.text
    assert full.text_offset[:3] == [0, 0, len(full.tokens[1])], "the text lacks the special token"


def test_parts_of_a_character_are_told_apart(api: OpenAiServer) -> None:
    prompt = "\N{SNOWMAN}\N{COMBINING ENCLOSING KEYCAP}\N{GRINNING FACE}"
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 20, "prompt_logprobs": 20}
    choice = api.call("/v1/completions", body)[2]["choices"][0]
    tokens = choice["logprobs"]["tokens"][1:]
    parts = [token for token in tokens if token.startswith("bytes:")]
    assert len(parts) > 1, "the tokenizer has whole characters: take rarer ones"
    codes = [token.removeprefix("bytes:").split(r"\x")[1:] for token in parts]
    assert prompt.encode().hex() == "".join(map("".join, codes)), "all of these characters are in parts"
    by_id = choice["prompt_logprobs"][1:]
    for best, found in zip(choice["logprobs"]["top_logprobs"][1:], by_id, strict=True):
        assert len(best) == len(found), "no token hides another"
    assert any("\N{REPLACEMENT CHARACTER}" in each["decoded_token"] for each in by_id[1].values())


def test_log_probs_of_a_prompt_by_id(client: openai.OpenAI, api: OpenAiServer) -> None:
    body = {"prompt": PROMPT, "temperature": 0.0, "max_tokens": 3, "echo": True, "logprobs": 2}
    for _ in range(2):  # the second time the prompt is in the prefix cache
        more = {"prompt_logprobs": 2, "n": 2, "return_token_ids": True}
        choices = api.call("/v1/completions", {**body, **more})[2]["choices"]
    lists, ids = choices[0]["logprobs"], choices[0]["prompt_token_ids"]
    first, *others = choices[0]["prompt_logprobs"]
    assert first is None and choices[1]["prompt_logprobs"] == [None, *others]
    for token, text, value, found in zip(
        ids[1:], lists["tokens"][1:], lists["token_logprobs"][1:], others, strict=False
    ):
        own = found[str(token)]
        assert (own["decoded_token"], own["logprob"]) == (text, value) and 2 <= len(found) <= 3
        assert {1, 2} <= {each["rank"] for each in found.values()}
    del body["echo"], body["logprobs"]
    for number in (0, 2):
        choice = api.call("/v1/completions", {**body, "prompt_logprobs": number})[2]["choices"][0]
        assert choice["logprobs"] is None and len(choice["prompt_logprobs"]) == len(ids)
        assert all(len(found) >= max(1, number) for found in choice["prompt_logprobs"][1:])
    messages = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "return_token_ids": True}
    for many in ({}, {"n": 3}):
        answer = api.call("/v1/chat/completions", {**messages, **many, "prompt_logprobs": 1})[2]
        assert answer["prompt_logprobs"][0] is None
        asked, told = answer["prompt_token_ids"][1:], answer["prompt_logprobs"][1:]
        assert all(str(token) in found for token, found in zip(asked, told, strict=True))


def test_the_best_of_several(client: openai.OpenAI) -> None:
    more = {"temperature": 1.0, "seed": 5, "logprobs": 0}
    every = complete(client, n=4, **more).choices
    means = [sum(c.logprobs.token_logprobs) / len(c.logprobs.tokens) for c in every]
    order = sorted(range(4), key=lambda number: -means[number])
    best = complete(client, n=2, best_of=4, **more)
    assert [choice.text for choice in best.choices] == [every[number].text for number in order[:2]]
    assert best.usage.completion_tokens == sum(len(choice.logprobs.tokens) for choice in every)


def test_what_clients_of_vllm_send(client: openai.OpenAI) -> None:
    def ask(prompt: Any = "Once upon a time", **more: Any) -> Any:
        own = {"return_token_ids": True, **more}
        return client.completions.create(
            model="tiny-chat", prompt=prompt, max_tokens=12, temperature=0.0, extra_body=own
        )

    free = ask()
    word = free.choices[0].text.split()[0]
    assert word not in ask(bad_words=[word]).choices[0].text.split()
    one = free.choices[0].token_ids[0]
    assert set(ask(allowed_token_ids=[one, 7, 7]).choices[0].token_ids) <= {one, 7}
    for wrong, words in (
        ({"guided_regex": "a(?=b)"}, "400 - guided_regex is not a valid regex: "),
        (
            {"structured_outputs": {"json": r'{"type": "\ud800"}'}},
            r"400 - structured_outputs .*ud800 is half",
        ),
        ({"guided_regex": "(([a-z ,]{1,60}){1,60}){1,60}"}, "400 - following the grammar failed after"),
        (
            {"structured_outputs": {"choice": [f"word {n:09}" for n in range(20_000)]}},
            r"400 - structured_outputs has \d+ characters as a grammar; it should have at most",
        ),
        ({"allowed_token_ids": [one], "guided_regex": "[^ ]{3}0"}, "allowed_token_ids leaves no token"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            ask(**wrong)
    ids = free.choices[0].prompt_token_ids
    for most in (2, 1000, -1):
        cut = ids[-most:] if most == 2 else ids
        found = ask(truncate_prompt_tokens=most)
        assert (found.usage.prompt_tokens, found.choices[0].text) == (len(cut), ask(cut).choices[0].text)
    assert ask(request_id="mine-1").id == ask(request_id="mine-1")._request_id == "cmpl-mine-1"
    assert ask(guided_choice=["Ulm"]).choices[0].text == "Ulm"
    for name, guide in (("regex", "[ab]{3}"), ("grammar", 'root ::= "abba"'), ("json", {"enum": [7]})):
        new, old = ask(structured_outputs={name: guide}), ask(**{f"guided_{name}": guide})
        assert new.choices[0].text == old.choices[0].text != free.choices[0].text
