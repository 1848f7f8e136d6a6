# SPDX-License-Identifier: Apache-2.0
"""Every output of TensorRT-LLM's ensemble holds what it holds there, and is absent unless asked for."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from asking import int32, strings
from contract import (
    PROMPT,
    TEXT,
    answers,
    body,
    decode,
    encode,
    events,
    flag,
    generate,
    greedy,
    log_probs,
    logits,
    number,
    output_names,
)
from running import Server

ALWAYS = {"model_name", "model_version", TEXT, "finish_reason"}
PERF = {
    *("kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks"),
    *("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns"),
    *("acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens"),
}
ASKED = {
    "return_log_probs": {"cum_log_probs", "output_log_probs"},
    "return_context_logits": {"context_logits"},
    "return_generation_logits": {"generation_logits"},
    "return_perf_metrics": PERF,
    "return_kv_cache_reuse_stats": PERF,
    "return_num_input_tokens": {"num_input_tokens"},
    "return_num_output_tokens": {"num_output_tokens"},
}
N = 20


@pytest.mark.parametrize("name", [None, *ASKED])
def test_outputs_are_there_when_asked_for_and_only_then(contract: Server, name: str | None) -> None:
    expected = ALWAYS | (ASKED[name] if name else set())
    asked = {name: True} if name else {}
    ours = {*generate(contract, 4, **asked)} - {"sequence_end", "sequence_id", "sequence_start"}
    assert ours == expected
    declined = generate(contract, 4, **{name: False for name in asked})
    assert {*declined} == {*generate(contract, 4)}


def test_text_output_is_one_string_in_a_flat_array(contract: Server) -> None:
    (result,) = answers(contract, "ensemble", {"text_input": strings(PROMPT), "max_tokens": int32(N)})
    assert result.as_numpy(TEXT).shape == (1,)
    assert result.as_numpy(TEXT)[0].decode() == PROMPT + decode(greedy(PROMPT, N))


def test_characters_of_several_tokens_are_sent_whole(contract: Server) -> None:
    guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "([ぁ-ん][а-я]🙂){6}"}
    request = body(96, stream=True, **guide)
    del request["end_id"]
    chunks = contract.post(request, stream=True)
    text = "".join(chunk[TEXT] for chunk in chunks)
    assert re.fullmatch("([ぁ-ん][а-я]🙂){6}", text) and len(encode(text)) > 2 * len(text)
    assert not any("\ufffd" in chunk[TEXT] for chunk in chunks)


def test_log_probs_equal_those_of_transformers(contract: Server) -> None:
    plain = greedy(PROMPT, N)
    expected = log_probs(encode(PROMPT), plain)
    answer = generate(contract, N, return_log_probs=True)
    np.testing.assert_allclose(answer["output_log_probs"], expected, atol=1e-4)
    np.testing.assert_allclose(answer["cum_log_probs"], expected.sum(), atol=1e-3)


def flat(value: float | list[float]) -> list[float]:
    """An output of a JSON answer: one number is no list there."""
    return value if isinstance(value, list) else [value]


def test_log_probs_of_a_stream(server: Server) -> None:
    """Each chunk has those of its own tokens. The sum always covers all so far."""
    check_log_probs_of_a_stream(server, so_far=False)


def test_log_probs_of_a_stream_under_tensorrt_llms_name(contract: Server) -> None:
    """Each chunk has those of all tokens so far, as TensorRT-LLM's clients read the last chunk."""
    check_log_probs_of_a_stream(contract, so_far=True)


def check_log_probs_of_a_stream(server: Server, so_far: bool) -> None:
    expected = log_probs(encode(PROMPT), greedy(PROMPT, N))
    chunks = several(lambda: events(server, N, return_log_probs=True, return_num_output_tokens=True))
    tokens = 0
    for chunk in chunks:
        first, tokens = 0 if so_far else tokens, tokens + chunk["num_output_tokens"]
        np.testing.assert_allclose(flat(chunk["output_log_probs"]), expected[first:tokens], atol=1e-4)
        np.testing.assert_allclose(chunk["cum_log_probs"], expected[:tokens].sum(), atol=1e-3)
    assert tokens == N


def several(ask: Callable[[], list[Any]], fewest: int = 2) -> list[Any]:
    """The chunks of an answer; asked again if a busy machine sends all or most of it as one."""
    for _ in range(9):
        if len(chunks := ask()) >= fewest:
            return chunks
    raise AssertionError(f"{len(chunks)} chunks, nine times")


def sampled_ids(result: Any, vocabulary: int) -> list[int]:
    return [int(row.argmax()) for row in result.as_numpy("generation_logits").reshape(-1, vocabulary)]


def test_logits_equal_those_of_transformers(contract: Server) -> None:
    prompt, plain = encode(PROMPT), greedy(PROMPT, N)
    values = {
        "text_input": strings(PROMPT), "max_tokens": int32(N), "return_log_probs": flag(True),
        "return_context_logits": flag(True), "return_generation_logits": flag(True),
    }  # fmt: skip
    (result,) = answers(contract, "ensemble", values)
    reference = logits(prompt + plain).numpy()
    vocabulary = reference.shape[1]
    context, generation = result.as_numpy("context_logits"), result.as_numpy("generation_logits")
    assert context.shape == (1, len(prompt), vocabulary) and context.dtype == np.float32
    assert generation.shape == (1, 1, N, vocabulary) and generation.dtype == np.float32
    np.testing.assert_allclose(context[0], reference[: len(prompt)], atol=1e-3)
    np.testing.assert_allclose(generation[0, 0], reference[len(prompt) - 1 : -1], atol=1e-3)
    assert result.as_numpy("output_log_probs").shape == (1, 1, N)
    assert result.as_numpy("cum_log_probs").shape == (1, 1)
    chunks = several(lambda: answers(contract, "ensemble", {**values, "stream": flag(True)}), 3)
    assert [token for chunk in chunks for token in sampled_ids(chunk, vocabulary)] == plain
    first, *between, last = (output_names(chunk) for chunk in chunks)
    assert "context_logits" in first & last and not any("context_logits" in names for names in between)
    assert (chunks[-1].as_numpy("context_logits") == chunks[0].as_numpy("context_logits")).all()
    np.testing.assert_allclose(chunks[0].as_numpy("context_logits"), context, atol=1e-3)


def test_a_last_chunk_without_a_token_has_what_was_asked_for(contract: Server) -> None:
    """TensorRT-LLM's clients read every output in every chunk, and keep those of the last."""
    asked = ("return_log_probs", "return_context_logits", "return_generation_logits", "return_perf_metrics")
    plain = greedy(PROMPT, N)
    end = max(plain, key=plain.index)  # as late as there is one
    values = {
        "text_input": strings(PROMPT),
        "max_tokens": int32(N),
        "end_id": int32(end),
        "stream": flag(True),
    }
    values |= {name: flag(True) for name in asked}
    chunks = several(lambda: answers(contract, "ensemble", values))
    count = plain.index(end)
    assert chunks[-1].as_numpy("finish_reason").item() == b"stop"
    every = PERF | ASKED["return_log_probs"] | ASKED["return_generation_logits"]
    assert all(every <= output_names(chunk) for chunk in chunks)
    assert "context_logits" in output_names(chunks[-1])
    last = chunks[-1]
    assert last.as_numpy("generation_logits").shape[-1] == last.as_numpy("context_logits").shape[-1]
    assert last.as_numpy("output_log_probs").shape == (1, 1, count)


def test_perf_metrics_of_a_repeated_prompt(contract: Server) -> None:
    prompt = "A horse, a duck and a frog lived by the river and were friends. " * 5
    blocks = len(encode(prompt)) // 16

    def perf(stream: bool) -> dict[str, Any]:
        asked = {"text_input": prompt, "return_perf_metrics": True}
        if not stream:
            return generate(contract, 4, **asked)
        chunks = several(lambda: events(contract, 4, **asked))
        assert all({*chunk} >= PERF for chunk in chunks)
        *_, before, last = chunks
        for name in ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns"):
            assert before[name] == last[name]
        # Until the last chunk they are those of the first token.
        assert before["last_token_time_ns"] == before["first_token_time_ns"] < last["last_token_time_ns"]
        return last

    first, second, third = perf(False), perf(False), perf(True)
    total = first["kv_cache_alloc_total_blocks"]
    assert blocks > 4 and first["kv_cache_reused_blocks"] == 0 and blocks <= total <= blocks + 1
    for again in (second, third):
        # What is reused is not allocated, as in TensorRT-LLM's own tests.
        assert again["kv_cache_reused_blocks"] >= blocks - 1
        assert again["kv_cache_alloc_total_blocks"] == total - again["kv_cache_reused_blocks"]
    for one in (first, second, third):
        assert 0 <= one["kv_cache_alloc_new_blocks"] <= one["kv_cache_alloc_total_blocks"]
    for again in (second, third):
        times = [again[f"{moment}_time_ns"] for moment in ("arrival", "first_scheduled", "first_token")]
        assert 0 < times[0] <= times[1] <= times[2] <= again["last_token_time_ns"]
        nothing = [again[name] for name in ("acceptance_rate", "total_draft_tokens")]
        assert [*nothing, again["total_accepted_draft_tokens"]] == [0, 0, 0]
    assert second[TEXT] == first[TEXT]


@pytest.mark.parametrize("stream", [True, False])
def test_perf_metrics_of_an_answer_that_a_stop_word_ends(contract: Server, stream: bool) -> None:
    """The llm model finds these words in the text, and the engine has to be told."""
    whole = generate(contract, 40)[TEXT].removeprefix(PROMPT)
    word = whole.split()[5]
    asked = {"stop_words": f" {word}", "return_perf_metrics": True, "return_num_output_tokens": True}
    chunks = events(contract, 40, **asked) if stream else [generate(contract, 40, **asked)]
    last = chunks[-1]
    assert last["finish_reason"] == "stop" and sum(c["num_output_tokens"] for c in chunks) < 40
    assert "".join(c[TEXT] for c in chunks).removeprefix(PROMPT) == whole[: whole.index(word) + len(word)]
    assert all({*chunk} >= PERF for chunk in chunks)
    assert 0 < last["first_token_time_ns"] <= last["last_token_time_ns"]
    assert last["kv_cache_alloc_total_blocks"] > 0


def test_token_counts_add_up_over_chunks(contract: Server) -> None:
    asked = {"return_num_input_tokens": True, "return_num_output_tokens": True}
    chunks = several(lambda: events(contract, N, **asked))
    assert {chunk["num_input_tokens"] for chunk in chunks} == {len(encode(PROMPT))}
    assert sum(chunk["num_output_tokens"] for chunk in chunks) == N


@pytest.mark.parametrize(
    ("changes", "reason"), [({}, "length"), ({"end_id": "4th"}, "stop"), ({"stop_words": "4th"}, "stop")]
)
def test_finish_reason_comes_with_the_last_chunk(
    contract: Server, changes: dict[str, Any], reason: str
) -> None:
    token = greedy(PROMPT, N)[4]
    values: dict[str, Any] = {
        name: token if name == "end_id" else decode([token]).strip() for name in changes
    }
    chunks = events(contract, N, **values)
    assert [chunk.get("finish_reason") for chunk in chunks] == [None] * (len(chunks) - 1) + [reason]
    assert generate(contract, N, **values)["finish_reason"] == reason


def test_an_answer_ends_by_itself_unless_its_end_id_is_another(contract: Server) -> None:
    asked = {"text_input": "A little girl", "max_tokens": 200, "stream": True}
    assert contract.post(asked, stream=True)[-1]["finish_reason"] == "stop"
    assert contract.post({**asked, "end_id": 1048576}, stream=True)[-1]["finish_reason"] == "length"


def test_a_batch_tags_its_rows_and_its_sequences(contract: Server) -> None:
    values = {
        "text_input": strings(PROMPT, "The"), "max_tokens": int32(5, 7), "num_return_sequences": int32(2, 2),
        "seed": np.array([[1], [2]], np.uint64), "temperature": number(1.0, 1.0),
    }  # fmt: skip
    found = answers(contract, "ensemble", values)
    tags = {(r.as_numpy("batch_index").item(), r.as_numpy("sequence_index").item()) for r in found}
    assert len(found) == 4 and tags == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert all(r.as_numpy("batch_index").shape == (1, 1) for r in found)


def test_guided_decoding(contract: Server) -> None:
    asked = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[0-9]{3}-[a-f]{2}"}
    request = body(160, **asked)
    del request["end_id"]  # Once a guide is complete it allows nothing but the model's end id.
    status, answer = contract.post(request)
    assert status == 200, answer
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", answer[TEXT]), answer
    assert answer["finish_reason"] == "stop"
