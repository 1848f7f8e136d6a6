# SPDX-License-Identifier: Apache-2.0
"""A request's tensors: what is accepted, and that each mistake is named."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from flashinfer_backend.core.bounds import FIELDS, MOST_WORD
from flashinfer_backend.triton_server.requests import LlmLimits, Row, is_stop, parse_request

LIMITS = LlmLimits(vocab_size=100, max_input_len=20)
WORDS = FIELDS["stop_words_text"].values


def tensors(**changes: Any) -> dict[str, np.ndarray]:
    base: dict[str, Any] = {
        "input_ids": np.array([[1, 2, 3, 4]], np.int32),
        "input_lengths": np.array([[4]], np.int32),
        "request_output_len": np.array([[5]], np.int32),
    }
    base.update(changes)
    return {name: value for name, value in base.items() if value is not None}


def one(**changes: Any) -> Row:
    (row,) = parse_request(tensors(**changes), LIMITS)
    return row


def int32(*rows: Any) -> np.ndarray:
    return np.array(rows, np.int32)


def fp32(*rows: Any) -> np.ndarray:
    return np.array(rows, np.float32)


def text(*rows: Any) -> np.ndarray:
    return np.array(rows, np.object_)


def test_a_prompt_beyond_the_checkpoints_limit_is_told_so() -> None:
    limits = LlmLimits(vocab_size=100, max_input_len=20, max_seq_len=21, longest_seq_len=21)
    long = {"input_ids": int32([1] * 21), "input_lengths": int32([21])}
    with pytest.raises(ValueError, match=r"\(20\). Shorten the prompt; max_seq_len \(21\) is the most"):
        parse_request(tensors(**long), limits)


def test_defaults_are_greedy() -> None:
    row = one()
    assert row.prompt.tolist() == [1, 2, 3, 4] and row.prompt.dtype == np.int32
    assert (row.params.max_tokens, row.params.temperature, row.params.end_id, row.params.seed) == (
        5,
        0.0,
        -1,
        0,
    )
    assert not row.streaming and not row.exclude_input and row.num_return_sequences == 1


@pytest.mark.parametrize(
    ("changes", "temperature"),
    [
        ({"temperature": fp32([1.0])}, 0.0),  # TensorRT-LLM's clients always send it
        ({"temperature": fp32([0.7])}, 0.7),
        ({"seed": np.array([[7]], np.uint64)}, 1.0),
        ({"temperature": fp32([0.7]), "runtime_top_k": int32([5])}, 0.7),
        ({"temperature": fp32([0.7]), "runtime_top_p": fp32([1.0])}, 0.7),
        ({"temperature": fp32([1.0]), "runtime_top_p": fp32([0.0])}, 0.0),  # 0 counts as unset
        ({"temperature": fp32([1.0]), "runtime_top_p": fp32([-1.0])}, 0.0),  # and so does less, as there
        ({"temperature": fp32([0.7]), "runtime_top_k": int32([1])}, 0.0),
        ({"temperature": fp32([0.0]), "runtime_top_k": int32([5])}, 0.0),
        ({"temperature": fp32([1e-6]), "runtime_top_p": fp32([1.0])}, 0.0),
        ({"runtime_top_k": int32([5])}, 1.0),
    ],
)
def test_when_sampling_is_greedy(changes: dict[str, np.ndarray], temperature: float) -> None:
    params = one(**changes).params
    assert params.temperature == pytest.approx(temperature)
    assert 0.0 < params.top_p <= 1.0


def test_scalars_with_and_without_batch_column() -> None:
    rows = parse_request(
        tensors(
            input_ids=int32([1, 2, 3, 0], [5, 6, 0, 0]),
            input_lengths=int32(3, 2),
            request_output_len=int32([5], [6]),
            temperature=fp32(0.5, 0.9),
            runtime_top_k=int32([4], [3]),
        ),
        LIMITS,
    )
    assert [row.prompt.tolist() for row in rows] == [[1, 2, 3], [5, 6]]
    assert [row.params.max_tokens for row in rows] == [5, 6]
    assert [row.params.temperature for row in rows] == pytest.approx([0.5, 0.9])
    assert [row.params.top_k for row in rows] == [4, 3]


def test_both_names_of_a_value() -> None:
    seed = np.array([[2**64 - 1]], np.uint64)
    assert one(random_seed=seed).params.seed == 2**64 - 1
    assert one(seed=seed, random_seed=seed).params.seed == 2**64 - 1
    assert one(min_length=int32([3])).params.min_tokens == 3
    assert one(return_kv_cache_reuse_stats=np.array([[True]])).params.perf_metrics


def test_word_lists_and_bias() -> None:
    words = int32([[7, 8, 9, 0], [2, 3, -1, -1]])
    row = one(
        stop_words_list=words, bad_words_list=np.zeros((1, 2, 0), np.int32), embedding_bias=fp32([0, 0, -2.5])
    )
    assert row.params.stop_sequences == [[7, 8], [9]]
    assert row.params.bad_words == []
    assert (row.params.bias_ids, row.params.bias_values) == ([2], [-2.5])
    assert one(stop_words_text=text([b"END", b"", "é".encode()])).stop_words == ["END", "é"]


def test_end_id_outside_the_vocabulary_is_accepted() -> None:
    assert one(end_id=int32([1048576])).params.end_id == 1048576


def test_configured_and_requested_exclude_input() -> None:
    limits = LlmLimits(vocab_size=100, max_input_len=20, default_exclude_input=True)
    assert parse_request(tensors(), limits)[0].exclude_input
    asked = tensors(exclude_input_in_output=np.array([[False]]))
    assert not parse_request(asked, limits)[0].exclude_input


def test_values_that_ask_for_nothing_pass() -> None:
    one(
        beam_width=int32([1]),
        len_penalty=fp32([1.0]),
        runtime_top_p_decay=fp32([1.0]),
        lora_weights=np.zeros((1, 0, 0), np.float16),
        draft_input_ids=np.zeros((1, 0), np.int32),
        decoder_input_ids=int32([0]),
        decoder_input_lengths=int32([0]),
    )


@pytest.mark.parametrize("length", [None, int32([0]), int32([1])])
def test_one_decoder_id_a_row_passes(length: np.ndarray | None) -> None:
    one(decoder_input_ids=int32([5]), decoder_input_lengths=length)


def test_ids_outside_the_vocabulary_can_be_folded_into_it() -> None:
    limits = LlmLimits(vocab_size=100, max_input_len=20, fold_input_ids=True)
    wild = tensors(input_ids=int32([7, 2**31 - 1, -1, 100]))
    (row,) = parse_request(wild, limits)
    assert row.prompt.tolist() == [7, (2**31 - 1) % 100, 99, 0] and row.prompt.dtype == np.int32
    with pytest.raises(ValueError, match="build the model repository with fold_input_ids true"):
        parse_request(wild, LIMITS)


def test_sequences_of_one_request_are_bounded_together() -> None:
    prompts = tensors(
        input_ids=int32([1], [2]), input_lengths=int32([1], [1]), request_output_len=int32([5], [5])
    )
    parse_request(prompts | {"num_return_sequences": int32([4095], [1])}, LIMITS)
    with pytest.raises(ValueError, match="asks for 4097 sequences in all; it should be at most 4096"):
        parse_request(prompts | {"num_return_sequences": int32([4095], [2])}, LIMITS)


def test_a_bias_may_have_zeros_for_ids_that_only_the_tokenizer_has() -> None:
    row = one(embedding_bias=fp32([0.0] * 3 + [1.5] + [0.0] * 97))
    assert (row.params.bias_ids, row.params.bias_values) == ([3], [1.5])


def test_stop() -> None:
    assert is_stop({"stop": np.array([[True]])})
    assert not is_stop({"stop": np.array([[False]])}) and not is_stop(tensors())


NAN, INFINITY = float("nan"), float("inf")
UNSUPPORTED = {
    "encoder-decoder models": "encoder_input_features encoder_output_lengths cross_attention_mask"
    " skip_cross_attn_blocks",
    "multimodal prompts": "mrope_rotary_cos_sin mrope_position_deltas",
    "prompt tuning": "prompt_embedding_table prompt_table_extra_ids prompt_vocab_size",
    "LoRA": "lora_task_id lora_weights lora_config",
    "speculative decoding": "draft_input_ids draft_logits draft_acceptance_threshold",
    "lookahead decoding": "lookahead_window_size lookahead_ngram_size lookahead_verification_set_size",
    "disaggregated serving": "context_phase_params",
    "KV cache retention": "retention_token_range_starts retention_token_range_ends"
    " retention_token_range_priorities retention_token_range_durations_ms"
    " retention_decode_priority retention_decode_duration_ms",
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"request_output_len": int32([0])},
         r"request_output_len \(max_tokens\) is 0; it should be at least 1"),
        ({"request_output_len": None}, "request_output_len .* is missing"),
        ({"request_output_len": int32([1, 2])},
         r"request_output_len has shape \[1, 2\]; it should be \[1, 1\]"),
        ({"input_ids": None}, "input_ids is missing"),
        ({"input_lengths": None}, "input_lengths is missing"),
        ({"input_lengths": int32([5])}, r"input_lengths holds 5; it should lie in 1..4"),
        ({"input_lengths": int32([0])}, "input_lengths holds 0"),
        ({"input_lengths": int32([2], [2])}, "one length for each"),
        ({"input_ids": int32([1, 2, 3, 100])}, r"input_ids holds 100; token ids should lie in 0..99"),
        ({"input_ids": int32([1, -2, 3, 4])}, "input_ids holds -2"),
        ({"input_ids": int32([1] * 21), "input_lengths": int32([21])},
         r"Prompt length \(21\) exceeds maximum input length \(20\). Shorten the prompt, or raise max_"),
        ({"temperature": fp32([-0.5])}, "temperature is -0.5; it should be at least 0"),
        ({"temperature": fp32([NAN])}, "temperature is nan; it should be a finite number"),
        ({"runtime_top_k": int32([-1])}, r"runtime_top_k \(top_k\) is -1"),
        ({"runtime_top_p": fp32([1.5])}, r"runtime_top_p \(top_p\) is 1.5; it should lie in \(0, 1\]"),
        ({"runtime_top_p": fp32([-INFINITY])}, r"runtime_top_p \(top_p\) is -inf; it should be a finite"),
        ({"runtime_top_p": fp32([NAN])}, "runtime_top_p"),
        ({"repetition_penalty": fp32([0.0])}, "repetition_penalty is 0; it should be greater than 0"),
        ({"repetition_penalty": fp32([INFINITY])}, "repetition_penalty is inf"),
        ({"presence_penalty": fp32([NAN])}, "presence_penalty is nan"),
        ({"frequency_penalty": fp32([NAN])}, "frequency_penalty is nan"),
        ({"min_tokens": int32([-1])}, "min_tokens is -1; it should be at least 0"),
        ({"num_return_sequences": int32([0])}, "num_return_sequences is 0"),
        ({"min_tokens": int32([2]), "min_length": int32([3])},
         "min_tokens is 2 and min_length is 3: .* two names"),
        ({"seed": np.array([[1]], np.uint64), "random_seed": np.array([[2]], np.uint64)},
         "seed is 1 and random_seed is 2"),
        ({"beam_width": int32([2])},
         "beam_width is 2, which is not supported: this backend has no beam search"),
        ({"beam_width": int32([1], [3])}, "beam_width is 3"),  # of a batch the value that is refused
        ({"runtime_top_p_decay": fp32([0.9])},
         "runtime_top_p_decay is 0.9, which is not supported: this backend has no decay of top_p"),
        ({"decoder_input_ids": int32([1, 2])}, "decoder_input_ids is not supported: .* a row has 2 ids"),
        ({"decoder_input_ids": int32([1, 2]), "decoder_input_lengths": int32([2])},
         "decoder_input_ids is not supported"),
        ({"decoder_input_lengths": int32([2])}, "decoder_input_lengths is not supported"),
        ({"decoder_input_lengths": int32([-1])}, "decoder_input_lengths is -1"),
        ({"stop_words_list": int32([7, 8])}, r"stop_words_list holds|stop_words_list has shape"),
        ({"stop_words_list": int32([[7, 8], [3, -1]])}, "Sparse list must not hold offsets beyond its ids"),
        ({"stop_words_list": int32([[7, 8], [2, 1]])}, "Sparse list must not hold offsets that do not grow"),
        ({"stop_words_list": int32([[7, 8], [-1, 2]])},
         "Sparse list must not hold offsets after its padding"),
        ({"bad_words_list": int32([[7, 100], [2, -1]])},
         "bad_words_list holds 100; token ids should lie in 0..99"),
        ({"embedding_bias": np.ones((1, 101), np.float32)},
         "embedding_bias has 101 values; it should have 100"),
        ({"embedding_bias": fp32([0, NAN])}, "embedding_bias holds NaN"),
        ({"guided_decoding_guide_type": text([b"yaml"])},
         "guided_decoding_guide_type is 'yaml'; it should be one of"),
        ({"guided_decoding_guide": text([b"[a]"])}, "guided_decoding_guide_type is ''"),
        ({"guided_decoding_guide_type": text([b"regex"])}, "guided_decoding_guide is missing"),
        ({"guided_decoding_guide_type": text([b"json"]), "guided_decoding_guide": text([b"{}"])},
         "for a schema use the type json_schema"),
        ({"stop_words_text": text([b"\xff"])}, "stop_words_text is not UTF-8"),
        *[
            ({name: int32([0])}, f"^{name} is not supported: this .* has no {feature};")
            for feature, names in UNSUPPORTED.items()
            for name in names.split()
        ],
    ],
)  # fmt: skip
def test_mistakes_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_request(tensors(**changes), LIMITS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"streaming": np.array([[True]])},
         "Streaming is only supported if model is deployed using decoupled mode"),
        ({"num_return_sequences": int32([2])}, "num_return_sequences is 2"),
        (
            {
                "input_ids": int32([1], [2]),
                "input_lengths": int32([1], [1]),
                "request_output_len": int32([1], [1]),
            },
            "batch size greater than 1",
        ),
    ],
)  # fmt: skip
def test_several_responses_need_decoupled_mode(changes: dict[str, Any], message: str) -> None:
    limits = LlmLimits(vocab_size=100, max_input_len=20, decoupled=False)
    parse_request(tensors(), limits)
    with pytest.raises(ValueError, match=message):
        parse_request(tensors(**changes), limits)


def test_guided_decoding_that_is_switched_off() -> None:
    limits = LlmLimits(vocab_size=100, max_input_len=20, guided_decoding=False)
    guide = {"guided_decoding_guide_type": text([b"regex"]), "guided_decoding_guide": text([b"[a]"])}
    assert one(**guide).params.grammar == "[a]"
    with pytest.raises(ValueError, match="guided_decoding_backend none"):
        parse_request(tensors(**guide), limits)


def test_lists_of_words_are_bounded() -> None:
    words = WORDS + 1
    lists = np.array([[[1] * words, list(range(1, words + 1))]], np.int32)
    with pytest.raises(ValueError, match=f"stop_words_list has {words} words in a row"):
        one(stop_words_list=lists)
    assert len(one(stop_words_text=text(["a"] * WORDS)).stop_words) == WORDS
    long = np.array([[[1] * (MOST_WORD + 1), [MOST_WORD + 1] + [-1] * MOST_WORD]], np.int32)
    with pytest.raises(ValueError, match=f"stop_words_list has {MOST_WORD + 1} ids in a word"):
        one(stop_words_list=long)


def test_guides_and_prompts_of_all_sequences_are_bounded() -> None:
    guide = {
        "guided_decoding_guide_type": text([b"regex"]),
        "guided_decoding_guide": text([b"a" * (1 << 20)]),
    }
    one(**guide, num_return_sequences=int32([64]))
    with pytest.raises(ValueError, match=r"guided_decoding_guide has .* 68157440 for all sequences"):
        one(**guide, num_return_sequences=int32([65]))
    limits = dataclasses.replace(LIMITS, max_input_len=1 << 20)
    prompt = {"input_ids": int32([1] * (1 << 13)), "input_lengths": int32([1 << 13])}
    assert parse_request(tensors(**prompt), limits)
    with pytest.raises(ValueError, match=r"input_ids has 16384 ids, and with \w+ 67108864 for all sequences"):
        long = {"input_ids": int32([1] * (1 << 14)), "input_lengths": int32([1 << 14])}
        parse_request(tensors(**long, num_return_sequences=int32([4096])), limits)


def test_what_each_sequence_takes_to_the_engine_is_bounded_for_all_of_them() -> None:
    ids = [5] * 1024
    several = {"num_return_sequences": int32([1025])}
    for name in ("stop_words_list", "bad_words_list"):
        words = {name: np.array([[ids, [1024] + [-1] * 1023]], np.int32)}
        one(**words, num_return_sequences=int32([1024]))
        with pytest.raises(ValueError, match=rf"{name} has 1024 ids, and with \w+ 1049600 for all sequences"):
            one(**words, **several)
    bias = fp32([1.0] * LIMITS.vocab_size)
    one(embedding_bias=bias, **several)
    limits = dataclasses.replace(LIMITS, vocab_size=5000)
    with pytest.raises(ValueError, match=rf"embedding_bias has 5000 biases, .* at most {1 << 22}"):
        parse_request(tensors(embedding_bias=fp32([1.0] * 5000), **several), limits)
