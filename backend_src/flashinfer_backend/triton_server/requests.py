# SPDX-License-Identifier: Apache-2.0
"""A Triton request's tensors, checked and split into rows.

Everything a client can get wrong is found here, before the engine sees it. Errors are ValueErrors
that name the input, say what it holds and what would be right.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashinfer_backend.core.bounds import MOST_SEQUENCES
from flashinfer_backend.core.config import prompt_too_long
from flashinfer_backend.core.sampling_params import GRAMMAR_TYPES, GREEDY_TEMPERATURE, SamplingParams
from flashinfer_backend.serving.adapters import AdapterNames
from flashinfer_backend.serving.generation import GenerationRequest
from flashinfer_backend.triton_server.adapters import chosen_adapters
from flashinfer_backend.triton_server.bounds import check_sequences, check_tensors, known_as
from flashinfer_backend.triton_server.refused import refuse_unsupported
from flashinfer_backend.triton_server.request_parameters import NO_PARAMETERS, RequestParameters
from flashinfer_backend.triton_server.word_lists import embedding_bias, word_list

Tensors = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class LlmLimits:
    """What the engine and the model's configuration allow. `default_*`: where a request is silent."""

    vocab_size: int
    max_input_len: int
    decoupled: bool = True
    default_exclude_input: bool = False
    guided_decoding: bool = True
    fold_input_ids: bool = False  # ids outside of the vocabulary are taken modulo its size
    log_probs_so_far: bool = False  # each chunk of a stream has those of all tokens so far
    max_seq_len: int = 0
    longest_seq_len: int = 0  # the checkpoint's
    max_json_logits_mib: int = 0  # of a sequence whose answer from the ensemble is JSON; 0: any number


@dataclass(frozen=True)
class Row(GenerationRequest):
    """One prompt of a request: what the engine needs, and what its responses should hold."""

    num_return_sequences: int = 1
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False
    log_probs_so_far: bool = False  # of a stream: output_log_probs of all its tokens, not the chunk's own
    vocab_size: int = 0  # width of its logits


def is_stop(tensors: Tensors) -> bool:
    """Whether the request asks to stop the running one with its request id."""
    stop = tensors.get("stop")
    return stop is not None and bool(np.any(stop))


def parse_request(
    tensors: Tensors,
    limits: LlmLimits,
    parameters: RequestParameters = NO_PARAMETERS,
    adapters: AdapterNames | None = None,
) -> list[Row]:
    """The rows of a request. Tensors by input name of the llm model, B rows: input_ids int32 [B, L] or
    [L], scalars [B, 1] or [B], word lists int32 [B, 2, W], embedding_bias float32 [B, V]. parameters hold
    for each row. adapters: those that it can ask for; None: the model has none."""
    refuse_unsupported(tensors)
    check_tensors(tensors)
    ids, lengths = _prompts(tensors)
    batch = len(ids)
    if not limits.decoupled and batch > 1:
        raise ValueError(
            f"input_ids holds {batch} prompts: a batch size greater than 1 is only supported if the model is"
            " deployed using decoupled mode; send one request for each prompt"
        )
    reader = _Reader(tensors, batch)
    rows = [_row(reader, limits, row, ids[row, : lengths[row]], parameters) for row in range(batch)]
    chosen = chosen_adapters(tensors, batch, parameters.lora_name, adapters)
    for row, adapter in zip(rows, chosen, strict=True):
        row.params.adapter, row.params.adapter_name = adapter
    sequences = sum(row.num_return_sequences for row in rows)
    if sequences > MOST_SEQUENCES:
        raise ValueError(
            f"num_return_sequences asks for {sequences} sequences in all; it should be at most"
            f" {MOST_SEQUENCES} in one request"
        )
    for name, held in (
        ("guided_decoding_guide", lambda params: len(params.grammar)),
        ("stop_words_list", lambda params: sum(map(len, params.stop_sequences))),
        ("bad_words_list", lambda params: sum(map(len, params.bad_words))),
        ("embedding_bias", lambda params: len(params.bias_ids)),
    ):
        check_sequences(name, [(held(row.params), row.num_return_sequences) for row in rows])
    check_sequences("input_ids", [(len(row.prompt), row.num_return_sequences) for row in rows])
    return rows


def _prompts(tensors: Tensors) -> tuple[np.ndarray, list[int]]:
    if "input_ids" not in tensors:
        raise ValueError("input_ids is missing; it should be INT32 [batch, length]")
    ids = np.atleast_2d(tensors["input_ids"])
    if ids.ndim != 2:
        raise ValueError(f"input_ids has shape {list(ids.shape)}; it should be [batch, length]")
    if "input_lengths" not in tensors:
        raise ValueError("input_lengths is missing; it should be INT32 [batch, 1]")
    given = tensors["input_lengths"]
    if given.size != len(ids):
        raise ValueError(
            f"input_lengths has shape {list(given.shape)}; it should be [{len(ids)}, 1], one length for each"
            " row of input_ids"
        )
    lengths = [int(n) for n in given.flat]
    for n in lengths:
        if not 0 < n <= ids.shape[1]:
            raise ValueError(
                f"input_lengths holds {n}; it should lie in 1..{ids.shape[1]}, the width of input_ids"
            )
    return ids, lengths


def _row(
    reader: _Reader, limits: LlmLimits, row: int, prompt: np.ndarray, parameters: RequestParameters
) -> Row:
    if len(prompt) > limits.max_input_len:
        lengths = limits.max_input_len, limits.max_seq_len, limits.longest_seq_len
        raise ValueError(prompt_too_long(len(prompt), *lengths))
    prompt = _in_vocabulary(prompt, limits)
    streaming = reader.flag(row, "streaming")
    if streaming and not limits.decoupled:
        raise ValueError("Streaming is only supported if model is deployed using decoupled mode.")
    sequences = reader.integer(row, "num_return_sequences", 1, at_least=1)
    if sequences > 1 and not limits.decoupled:
        raise ValueError(
            f"num_return_sequences is {sequences}: more than one is only supported if the model is deployed"
            " using decoupled mode"
        )
    return Row(
        prompt=np.ascontiguousarray(prompt, dtype="<i4"),
        params=_sampling_params(reader, limits, row, parameters.speculative_decoding),
        streaming=streaming,
        exclude_input=reader.flag(row, "exclude_input_in_output", limits.default_exclude_input),
        num_return_sequences=sequences,
        stop_words=[word for word in reader.strings(row, "stop_words_text") if word],
        exclude_stop_words=reader.flag(row, "exclude_stop_words_in_output"),
        priority=parameters.priority,
        timeout_us=parameters.timeout_us,
        return_num_input_tokens=reader.flag(row, "return_num_input_tokens"),
        return_num_output_tokens=reader.flag(row, "return_num_output_tokens"),
        log_probs_so_far=limits.log_probs_so_far,
        vocab_size=limits.vocab_size,
    )


def _in_vocabulary(prompt: np.ndarray, limits: LlmLimits) -> np.ndarray:
    low, high = int(prompt.min()), int(prompt.max())
    if low >= 0 and high < limits.vocab_size:
        return prompt
    if limits.fold_input_ids:
        return prompt % limits.vocab_size
    raise ValueError(
        f"input_ids holds {low if low < 0 else high}; token ids should lie in 0..{limits.vocab_size - 1}. For"
        " a benchmark which draws ids without regard to the vocabulary, build the model repository with"
        " fold_input_ids true: they are then taken modulo its size"
    )


def _sampling_params(
    reader: _Reader, limits: LlmLimits, row: int, speculative_decoding: bool
) -> SamplingParams:
    if "request_output_len" not in reader.tensors:
        raise ValueError("request_output_len (max_tokens) is missing; it should be INT32 [batch, 1]")
    temperature = reader.number(row, "temperature", 1.0, at_least=0.0)
    top_k = reader.integer(row, "runtime_top_k", 0, at_least=0)
    top_p = max(0.0, reader.number(row, "runtime_top_p", 0.0))  # less than 0 is also unset there
    if top_p > 1.0:
        raise ValueError(f"runtime_top_p (top_p) is {top_p:g}; it should lie in (0, 1], or be 0 for unset")
    # TensorRT-LLM's default is the likeliest token; a request samples when something in it asks for that.
    # A temperature of exactly 1 does not: its shipped clients send that with every request.
    seeded = any(reader.scalar(row, name) is not None for name in ("seed", "random_seed"))
    asks = top_k > 1 or top_p > 0.0 or temperature != 1.0 or seeded
    greedy = temperature < GREEDY_TEMPERATURE or top_k == 1 or not asks
    repetition_penalty = reader.number(row, "repetition_penalty", 1.0)
    if repetition_penalty <= 0.0:
        raise ValueError(f"repetition_penalty is {repetition_penalty:g}; it should be greater than 0")
    grammar_type, guide = _guide(reader, limits, row)
    bias_ids, bias_values = embedding_bias(reader.tensors, row, limits.vocab_size)
    perf = reader.flag(row, "return_perf_metrics") or reader.flag(row, "return_kv_cache_reuse_stats")
    return SamplingParams(
        max_tokens=reader.integer(row, "request_output_len", 0, at_least=1),
        min_tokens=reader.either_integer(row, "min_tokens", "min_length"),
        end_id=reader.integer(row, "end_id", -1),
        temperature=0.0 if greedy else temperature,
        top_k=top_k,
        top_p=top_p or 1.0,
        seed=reader.either_integer(row, "seed", "random_seed"),
        repetition_penalty=repetition_penalty,
        presence_penalty=reader.number(row, "presence_penalty", 0.0),
        frequency_penalty=reader.number(row, "frequency_penalty", 0.0),
        stop_sequences=word_list(reader.tensors, "stop_words_list", row, limits.vocab_size),
        bad_words=word_list(reader.tensors, "bad_words_list", row, limits.vocab_size),
        bias_ids=bias_ids,
        bias_values=bias_values,
        grammar_type=grammar_type,
        grammar=guide,
        log_probs=reader.flag(row, "return_log_probs"),
        context_logits=reader.flag(row, "return_context_logits"),
        generation_logits=reader.flag(row, "return_generation_logits"),
        perf_metrics=perf,
        speculative_decoding=speculative_decoding,
    )


def _guide(reader: _Reader, limits: LlmLimits, row: int) -> tuple[str, str]:
    grammar_type = "".join(reader.strings(row, "guided_decoding_guide_type"))
    guide = "".join(reader.strings(row, "guided_decoding_guide"))
    if not grammar_type and not guide:
        return "", ""
    if not limits.guided_decoding:
        raise ValueError(
            "guided_decoding_guide is set, but this model was built with guided_decoding_backend none; build"
            " the model repository with llguidance"
        )
    if grammar_type not in GRAMMAR_TYPES:
        raise ValueError(
            f"guided_decoding_guide_type is {grammar_type!r}; it should be one of {', '.join(GRAMMAR_TYPES)}"
        )
    if not guide and grammar_type != "json":
        raise ValueError(f"guided_decoding_guide is missing; guide type {grammar_type} needs one")
    if guide and grammar_type == "json":
        raise ValueError(
            "guided_decoding_guide should be left out: guide type json allows any JSON; for a schema use the"
            " type json_schema"
        )
    return grammar_type, guide


class _Reader:
    """Values of one row by input name."""

    def __init__(self, tensors: Tensors, batch: int) -> None:
        self.tensors = tensors
        self._batch = batch

    def scalar(self, row: int, name: str) -> Any:
        """The one value of a row, or None when the input is absent or empty."""
        values = self.tensors.get(name)
        if values is None or values.size == 0:
            return None
        if values.size != self._batch:
            raise ValueError(
                f"{name} has shape {list(values.shape)}; it should be [{self._batch}, 1], one value for each"
                " row of input_ids"
            )
        return values.reshape(-1)[row].item()

    def flag(self, row: int, name: str, default: bool = False) -> bool:
        value = self.scalar(row, name)
        return default if value is None else bool(value)

    def integer(self, row: int, name: str, default: int, at_least: int | None = None) -> int:
        value = self.scalar(row, name)
        if value is None:
            value = default
        if at_least is not None and value < at_least:
            raise ValueError(f"{known_as(name)} is {value}; it should be at least {at_least}")
        return int(value)

    def number(self, row: int, name: str, default: float, at_least: float | None = None) -> float:
        value = self.scalar(row, name)
        if value is None:
            return default
        if not math.isfinite(value):
            raise ValueError(f"{known_as(name)} is {value}; it should be a finite number")
        if at_least is not None and value < at_least:
            raise ValueError(f"{known_as(name)} is {value:g}; it should be at least {at_least:g}")
        return float(value)

    def either_integer(self, row: int, name: str, older_name: str) -> int:
        """An input of at least 0 with two names; 0 when neither is given."""
        both = [(n, self.scalar(row, n)) for n in (name, older_name)]
        given = [(n, value) for n, value in both if value is not None]
        if len(given) == 2 and given[0][1] != given[1][1]:
            raise ValueError(
                f"{name} is {given[0][1]} and {older_name} is {given[1][1]}: they are two names of one value;"
                " give one, or the same value twice"
            )
        return self.integer(row, given[0][0], 0, at_least=0) if given else 0

    def strings(self, row: int, name: str) -> list[str]:
        """A row's strings of a BYTES input [B, n]."""
        values = self.tensors.get(name)
        if values is None or values.size == 0:
            return []
        if values.shape[0] != self._batch:
            raise ValueError(
                f"{name} has shape {list(values.shape)}; its first dimension should be {self._batch}, the"
                " number of rows of input_ids"
            )
        try:
            return [v if isinstance(v, str) else v.decode() for v in np.atleast_1d(values[row]).flat]
        except UnicodeDecodeError as error:
            raise ValueError(f"{name} is not UTF-8: {error}; it should hold text as UTF-8") from None
