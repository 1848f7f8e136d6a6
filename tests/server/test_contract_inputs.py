# SPDX-License-Identifier: Apache-2.0
"""Every input of TensorRT-LLM's ensemble does what it does there, or is refused by its name.

The reference is transformers on the bundled model. The rows of docs/compatibility.md are these tests' claims.
"""

from typing import Any

import pytest
import torch
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
    number,
    text_of,
    words,
)
from running import Server
from transformers import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor

BOTH_MIN = ("min_tokens", "min_length")
BOTH_SEEDS = ("seed", "random_seed")
MAX_SEQ_LEN = 2048  # of the bundled model


def test_prompt_is_in_front_unless_excluded(contract: Server) -> None:
    completion = decode(greedy(PROMPT, 24))
    _, answer = contract.post({"text_input": PROMPT, "max_tokens": 24})
    assert answer[TEXT] == PROMPT + completion
    assert generate(contract, exclude_input_in_output=False)[TEXT] == PROMPT + completion
    assert generate(contract, exclude_input_in_output=True)[TEXT] == completion
    for excluded in (True, False):  # a stream never holds the prompt
        assert text_of(events(contract, exclude_input_in_output=excluded)) == completion
    for count in (1, 2):
        assert text_of(events(contract, count)) == decode(greedy(PROMPT, count))


def test_values_of_the_sampling_inputs_that_mean_greedy(contract: Server) -> None:
    completion = decode(greedy(PROMPT, 24))
    for greedy_values in (
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.0, "top_p": 1.0},  # vLLM's benchmark
        {"temperature": 0.000001, "top_p": 1.0},  # sglang's benchmark
        {"temperature": 0.7, "top_k": 1},
        {"top_p": 0.0, "top_k": 0},
        {"top_p": -1.0},
        {"temperature": 1.5, "top_p": 1e-6},
        {"temperature": 0.0, "top_k": 50, "top_p": 0.9, "seed": 3},
    ):
        assert generate(contract, **greedy_values)[TEXT] == completion, greedy_values


@pytest.mark.parametrize("asking", [{"temperature": 1.3}, {"top_k": 40}, {"top_p": 0.95}, {}])
def test_what_asks_for_sampling_and_both_names_of_its_seed(contract: Server, asking: dict[str, Any]) -> None:
    texts = [generate(contract, 16, **asking, **{name: 2**63 + 5})[TEXT] for name in BOTH_SEEDS]
    assert texts[0] == texts[1]
    assert len({generate(contract, 16, **asking, seed=n)[TEXT] for n in range(6)}) > 1
    if asking:  # the seed is 0 unless given
        assert generate(contract, 16, **asking)[TEXT] == generate(contract, 16, **asking, seed=0)[TEXT]


@pytest.mark.parametrize("name", BOTH_MIN)
def test_minimum_of_tokens_keeps_the_end_id_away(contract: Server, name: str) -> None:
    plain = greedy(PROMPT, 24)
    end = plain[6]
    length = plain.index(end)
    early = generate(contract, end_id=end, return_num_output_tokens=True)
    assert (early[TEXT], early["finish_reason"]) == (decode(plain[:length]), "stop")
    assert early["num_output_tokens"] == length  # the end id is no part of the output

    def suppressed(ids: list[int], start: int, row: torch.Tensor) -> torch.Tensor:
        if len(ids) - start < 12:
            row[end] = -torch.inf
        return row

    later = generate(contract, 12, end_id=end, **{name: 12})
    assert later[TEXT] == decode(greedy(PROMPT, 12, suppressed))
    # TensorRT-LLM takes more than max_tokens, and so does this server: max_tokens is what ends it.
    assert generate(contract, 12, end_id=end, **{name: 50})[TEXT] == later[TEXT]


@pytest.mark.parametrize("name", BOTH_MIN)
def test_stop_words_end_a_sequence_before_its_minimum_of_tokens(contract: Server, name: str) -> None:
    plain = greedy(PROMPT, 24)
    text = decode(plain)
    word = text[len(decode(plain[:5])) :][:4]
    expected = text[: text.index(word) + len(word)]
    values = {"stop_words": word, name: 20, "return_num_output_tokens": True}
    whole, chunks = generate(contract, **values), events(contract, **values)
    assert (whole[TEXT], whole["finish_reason"]) == (expected, "stop")
    assert (text_of(chunks), chunks[-1]["finish_reason"]) == (expected, "stop")
    assert whole["num_output_tokens"] == sum(chunk["num_output_tokens"] for chunk in chunks) < 20


def test_max_tokens_is_cut_to_what_max_seq_len_leaves(contract: Server) -> None:
    prompt = "Once upon a time there was a cat. " * 220
    counts = {"return_num_input_tokens": True, "return_num_output_tokens": True}
    for max_tokens in (2000, 2**31 - 1):
        whole = generate(contract, max_tokens, text_input=prompt, **counts)
        assert whole["finish_reason"] == "length"
        room = MAX_SEQ_LEN - whole["num_input_tokens"]
        assert 0 < whole["num_output_tokens"] == room < 1000
        assert (
            f"max_tokens {max_tokens} is cut to {room}, what max_seq_len {MAX_SEQ_LEN} leaves" in contract.log
        )
    assert events(contract, 2000, text_input=prompt)[-1]["finish_reason"] == "length"


def test_pad_id_changes_nothing(contract: Server) -> None:
    values = {"text_input": strings(PROMPT, "The"), "max_tokens": int32(6, 6), "pad_id": int32(7, 7)}
    found = {r.as_numpy("batch_index").item(): r for r in answers(contract, "ensemble", values)}
    for row, prompt in enumerate((PROMPT, "The")):
        assert found[row].as_numpy(TEXT)[0].decode() == prompt + decode(greedy(prompt, 6))


def test_penalties_bad_words_and_biases_are_those_of_transformers(contract: Server) -> None:
    """All at once. The repetition penalty counts the prompt, the others the completion; bad words are banned
    where their beginning stands; a bias is added to all ids of a word."""
    plain = greedy(PROMPT, 40)
    bad = [decode(plain[1:2]), decode(plain[4:6]), decode(plain[8:11])]
    suppressed, favoured = decode(plain[2:3]), " tree and house"
    repetition = RepetitionPenaltyLogitsProcessor(1.7)
    banned = NoBadWordsLogitsProcessor([words(word) for word in bad], eos_token_id=[])

    def changed(ids: list[int], start: int, row: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(torch.tensor(ids[start:], dtype=torch.int64), minlength=len(row))
        row = repetition(torch.tensor([ids]), row[None])[0] - 2.0 * (counts > 0) - 1.5 * counts
        row[words(suppressed)] -= 50.0
        row[words(favoured)] += 4.0
        return banned(torch.tensor([ids]), row[None])[0]

    asked: dict[str, Any] = {"repetition_penalty": 1.7, "presence_penalty": 2.0, "frequency_penalty": 1.5}
    asked |= {"bad_words": [*bad, ""], "embedding_bias_words": [suppressed, favoured]}
    asked |= {"embedding_bias_weights": [-50.0, 4.0]}
    text = generate(contract, 40, **asked)[TEXT]
    assert text == decode(greedy(PROMPT, 40, changed))
    for left_out in ("repetition", "presence", "frequency", "bad_words", "embedding_bias"):
        others = {name: value for name, value in asked.items() if not name.startswith(left_out)}
        assert generate(contract, 40, **others)[TEXT] != text, left_out
    assert generate(contract, 40, bad_words="")[TEXT] == decode(plain)


def test_stop_words_inside_a_token_and_across_chunks(contract: Server) -> None:
    plain = greedy(PROMPT, 40)
    text = decode(plain)
    pieces = [decode([token]) for token in plain]
    long = next(n for n, piece in enumerate(pieces) if n > 4 and len(piece) >= 5)
    start = len(decode(plain[:long]))
    inside = text[start + 1 : start + 3]  # neither the token's beginning nor its end
    across = text[start - 2 : start + 2] + text[start + 2 : start + len(pieces[long]) + 2]
    for word in (inside, across):
        begin = text.index(word)
        for excluded, expected in ((False, text[: begin + len(word)]), (True, text[:begin])):
            values = {"stop_words": ["never said", word], "exclude_stop_words_in_output": excluded}
            chunks = events(contract, 40, **values)
            assert text_of(chunks) == expected
            assert chunks[-1]["finish_reason"] == "stop"
            assert generate(contract, 40, **values)[TEXT] == expected
        assert generate(contract, 40, stop_words=word)[TEXT] == text[: begin + len(word)]  # kept by default
    for nothing in ([], "", ["", ""]):
        assert generate(contract, 40, stop_words=nothing)[TEXT] == text


def test_several_sequences_share_the_prompt_and_differ_by_seed(contract: Server) -> None:
    prompt = "One day a kind girl met a fox who had lost his way. " * 6
    sampling = {"text_input": prompt, "temperature": 1.0, "top_k": 50, "seed": 40}
    chunks = events(contract, 16, num_return_sequences=3, return_perf_metrics=True, **sampling)
    parts = [[chunk for chunk in chunks if chunk["sequence_index"] == n] for n in range(3)]
    assert [text_of(part) for part in parts] == [
        generate(contract, 16, **{**sampling, "seed": 40 + n})[TEXT] for n in range(3)
    ]
    full_blocks = (len(encode(prompt)) - 1) // 16
    for part in parts[1:]:
        assert part[-1]["kv_cache_reused_blocks"] == full_blocks > 1
    (single,) = events(contract, 1, num_return_sequences=1)
    assert "sequence_index" not in single
    _, answer = contract.post(body(num_return_sequences=2))
    assert "exactly 1 response" in answer["error"]


def test_inputs_of_beam_search_that_ask_for_nothing_pass(contract: Server) -> None:
    plain = {"text_input": strings(PROMPT), "max_tokens": int32(4)}
    (expected,) = answers(contract, "ensemble", plain)
    neutral = {"beam_width": int32(1), "length_penalty": number(0.7), "stream": flag(False)}
    (found,) = answers(contract, "ensemble", {**plain, **neutral})
    assert found.as_numpy(TEXT).tolist() == expected.as_numpy(TEXT).tolist()
