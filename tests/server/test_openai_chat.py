# SPDX-License-Identifier: Apache-2.0
"""/v1/chat/completions through OpenAI's own client, which checks every answer against its types."""

from typing import Any

import openai
import pytest
from openai_server import OpenAiServer, events

ASK: list[Any] = [{"role": "user", "content": "Why is the sky blue?"}]


def ask(client: openai.OpenAI, **more: Any) -> Any:
    body = {"model": "tiny-chat", "messages": ASK, "max_tokens": 12, "temperature": 0.0, **more}
    return client.chat.completions.create(**body)


def streamed(client: openai.OpenAI, **more: Any) -> list[Any]:
    return list(ask(client, stream=True, **more))


def test_an_answer_and_its_usage(client: openai.OpenAI) -> None:
    answer = ask(client)
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content.strip()
    assert choice.finish_reason in ("stop", "length")
    assert choice.to_dict().keys() == {"index", "message", "logprobs", "finish_reason"}
    usage = answer.usage
    assert usage.prompt_tokens > 5 and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens <= 12 and answer.model == "tiny-chat"


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    # The engine is quick, and what comes while this API's process stands still is one chunk.
    long = {"max_tokens": 300, "extra_body": {"ignore_eos": True}}
    whole = ask(client, **long)
    chunks = streamed(client, **long, stream_options={"include_usage": True})
    *parts, last = chunks
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == whole.choices[0].message.content
    assert parts[0].choices[0].delta.role == "assistant"
    finishes = [part.choices[0].finish_reason for part in parts]
    assert finishes[-1] == whole.choices[0].finish_reason and not any(finishes[:-1])
    assert last.choices == [] and last.usage.completion_tokens == whole.usage.completion_tokens
    assert len(parts) > 3, "it was streamed"


def test_n_answers_of_one_prompt(client: openai.OpenAI) -> None:
    answer = ask(client, n=3, temperature=1.0, seed=7)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    alone = [ask(client, temperature=1.0, seed=7 + number).choices[0].message.content for number in range(3)]
    assert [choice.message.content for choice in answer.choices] == alone
    texts = dict.fromkeys(range(3), "")
    for chunk in streamed(client, n=3, temperature=1.0, seed=7):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert list(texts.values()) == alone


def test_stop_words_are_left_out(client: openai.OpenAI) -> None:
    text = ask(client, max_tokens=30).choices[0].message.content
    word = text.split()[3]
    before = text[: text.index(word)]
    answer = ask(client, max_tokens=30, stop=[word, "never said"])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (before, "stop")
    chunks = streamed(client, max_tokens=30, stop=word)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == before
    kept = ask(client, max_tokens=30, stop=word, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].message.content == before + word


def test_log_probs_of_the_chosen_tokens(client: openai.OpenAI) -> None:
    whole = {"logprobs": True, "extra_body": {"ignore_eos": True}}  # no stop word, whose tokens have some too
    answer = ask(client, **whole, top_logprobs=3)
    found = answer.choices[0].logprobs.content
    assert "".join(one.token for one in found) == answer.choices[0].message.content
    for one in found:
        assert one.logprob <= 0 and bytes(one.bytes).decode() == one.token
        values = [other.logprob for other in one.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True)
        assert values[0] == pytest.approx(one.logprob), "greedy: the likeliest was chosen"
    parts = [part for chunk in streamed(client, **whole) for part in _probs(chunk)]
    assert [(p.token, round(p.logprob, 3)) for p in parts] == [(p.token, round(p.logprob, 3)) for p in found]


def _probs(chunk: Any) -> list[Any]:
    probs = chunk.choices[0].logprobs
    return probs.content if probs else []


def test_ids_and_text_parts(api: OpenAiServer) -> None:
    parts = [{"type": "text", "text": "Why is the sky"}, {"type": "text", "text": "blue?"}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 5, "return_token_ids": True}
    _, _, answer = api.call("/v1/chat/completions", body)
    prompt = api.call("/detokenize", {"tokens": answer["prompt_token_ids"]})[2]["prompt"]
    assert prompt == "<|begin_of_text|>Question: Why is the sky\nblue?\nAnswer:"
    assert len(answer["choices"][0]["token_ids"]) == answer["usage"]["completion_tokens"]
    messages = {"messages": body["messages"]}
    assert api.call("/tokenize", messages)[2]["tokens"] == answer["prompt_token_ids"]
    with api.opened("/v1/chat/completions", {**body, "stream": True, "temperature": 0}) as stream:
        chunks = events(stream.read().decode())
    ids = [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]]
    assert chunks[0]["prompt_token_ids"] == answer["prompt_token_ids"] and 0 < len(ids) <= 5


def test_an_answer_that_is_begun_goes_on(client: openai.OpenAI) -> None:
    whole = ask(client, max_tokens=20).choices[0].message.content
    half = whole[: whole.index(" ", len(whole) // 2)]
    begun = [*ASK, {"role": "assistant", "content": half.strip()}]
    more = {
        "add_generation_prompt": False,
        "continue_final_message": True,
        "chat_template_kwargs": {"continue_final": True},
    }
    rest = ask(client, messages=begun, max_tokens=20, extra_body=more).choices[0].message.content
    assert (half + rest).startswith(whole[: len(half) + 3])


def test_reasoning_is_split_off_and_counted(client: openai.OpenAI, api: OpenAiServer) -> None:
    think = {"chat_template_kwargs": {"think_first": True}}
    answer = ask(client, extra_body=think)
    message = answer.choices[0].message
    assert message.content is None and message.reasoning_content
    told = {"prompt": message.reasoning_content, "add_special_tokens": False}
    details = answer.usage.completion_tokens_details
    assert details.reasoning_tokens == len(api.call("/tokenize", told)[2]["tokens"]) > 1
    assert ask(client).usage.completion_tokens_details.reasoning_tokens == 0
    *chunks, last = streamed(client, extra_body=think, stream_options={"include_usage": True})
    assert last.usage.completion_tokens_details == details
    parts = [getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in chunks]
    assert "".join(parts) == message.reasoning_content
    assert not any(chunk.choices[0].delta.content for chunk in chunks)


def test_roles_and_the_system_prompt(client: openai.OpenAI, api: OpenAiServer) -> None:
    developer = {"role": "developer", "content": "Speak plainly."}
    body = {"messages": [developer, *ASK]}
    tokens = api.call("/tokenize", body)[2]["tokens"]
    text = api.call("/detokenize", {"tokens": tokens})[2]["prompt"]
    assert text == "<|begin_of_text|>Speak plainly.\nQuestion: Why is the sky blue?\nAnswer:"
    assert ask(client, messages=body["messages"]).usage.prompt_tokens == len(tokens)


def test_a_prefix_that_is_cached_is_counted(client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "Once upon a time there was a king. " * 12}, *ASK]
    ask(client, messages=messages)
    details = ask(client, messages=messages).usage.prompt_tokens_details
    assert details.cached_tokens >= 64


def test_models_and_paths_without_a_version(client: openai.OpenAI, api: OpenAiServer) -> None:
    assert [model.id for model in client.models.list()] == ["tiny-chat"]
    assert client.models.retrieve("tiny-chat").id == "tiny-chat"
    status, _, answer = api.call("/chat/completions", {"messages": ASK, "max_tokens": 2})
    assert (status, answer["object"]) == (200, "chat.completion")
    assert api.call("/health")[0] == 200


def test_an_answer_ends_at_the_checkpoints_own_stop_string(api: OpenAiServer) -> None:
    """The bundled model goes on with a question of its own, which its generation_config.json takes for the
    end."""
    messages = [{"role": "user", "content": "What sound does a cat make?"}]
    asked = {"messages": messages, "temperature": 0, "max_tokens": 60}
    _, _, answer = api.call("/v1/chat/completions", asked)
    (choice,) = answer["choices"]
    _, _, more = api.call("/v1/chat/completions", {**asked, "ignore_eos": True})
    ended, own, _ = more["choices"][0]["message"]["content"].partition("\nQuestion:")
    assert own and choice["message"]["content"] == ended and choice["finish_reason"] == "stop"
    body = {"model": "tiny-chat", "messages": messages, "max_tokens": 60, "temperature": 0}
    _, _, message = api.call("/v1/messages", body)
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    _, _, message = api.call("/v1/messages", {**body, "stop_sequences": ["\nQuestion:"]})
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "\nQuestion:")
