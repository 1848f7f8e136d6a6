# SPDX-License-Identifier: Apache-2.0
"""The preprocessing model: text to token ids."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from flashinfer_backend.config_tools.knobs import PRE
from flashinfer_backend.core.paths import owner_pid, processes_dir
from flashinfer_backend.text.tokenizer import TextTokenizer
from flashinfer_backend.triton_server.bounds import check_padded, check_prompts, check_tensors, known_as
from flashinfer_backend.triton_server.freeze_guard import FreezeGuard
from flashinfer_backend.triton_server.parameters import knob_value, read_parameters, read_tokenizer
from flashinfer_backend.triton_server.texts import bound_texts

Tensors = dict[str, np.ndarray]

REFUSED = {
    "DECODER_QUERY": "text for a decoder",
    "IMAGE_BYTES": "images",
    "IMAGE_URL": "images",
    "VIDEO_BYTES": "videos",
    "PROMPT_TABLE_EXTRA_ID": "prompt embedding tables",
}

TO_LLM = {"STOP_WORDS_DICT": "stop_words_list", "BAD_WORDS_DICT": "bad_words_list"}  # what becomes of them


class MissingInput(ValueError):
    """A request lacks an input without which there is nothing to do."""


class Preprocessor:
    """Turns the tensors of requests into the tensors of the llm step."""

    def __init__(
        self, tokenizer: TextTokenizer, add_special_tokens: bool = True, max_prompt_bytes: int = 0
    ) -> None:
        """max_prompt_bytes: a longer prompt is refused before it is tokenised, 0: none is."""
        self._tokenizer = tokenizer
        self._add_special_tokens = add_special_tokens
        self._max_prompt_bytes = max_prompt_bytes

    def run(self, requests: Sequence[Tensors]) -> list[Tensors | ValueError]:
        """One entry a request: its output tensors, or what is wrong with it.

        Inputs by name, B rows: QUERY bytes objects [B,1], REQUEST_OUTPUT_LEN int32 [B,1]; optional
        STOP_WORDS_DICT, BAD_WORDS_DICT, EMBEDDING_BIAS_WORDS bytes objects [B,N],
        EMBEDDING_BIAS_WEIGHTS float32 [B,N], END_ID and PAD_ID int32 [B,1].

        Outputs: INPUT_ID int32 [B,L] right-padded, REQUEST_INPUT_LEN, REQUEST_OUTPUT_LEN, OUT_END_ID,
        OUT_PAD_ID int32 [B,1], STOP_WORDS_IDS and BAD_WORDS_IDS int32 [B,2,W] (row 0 the ids of all
        words padded with 0, row 1 the words' end offsets padded with -1; W = 0 where the input is absent),
        EMBEDDING_BIAS float32 [B, tokenizer's vocabulary, or 0], and what a decoder-only model has
        for a decoder prompt: DECODER_INPUT_ID int32 [B,1] of pad ids, REQUEST_DECODER_INPUT_LEN 1.
        """
        texts = [_attempt(_prompts, inputs, self._max_prompt_bytes) for inputs in requests]
        prompts = self._encode_prompts([text for text in texts if not isinstance(text, ValueError)])
        results: list[Tensors | ValueError] = []
        for inputs, text in zip(requests, texts, strict=True):
            ids = text if isinstance(text, ValueError) else prompts.pop(0)
            results.append(ids if isinstance(ids, ValueError) else _attempt(self._outputs, inputs, ids))
        return results

    def _encode_prompts(self, requests: list[list[str]]) -> list[list[array[int]] | ValueError]:
        """Ids of the rows of each request, of all requests together."""
        rows = [text for request in requests for text in request]
        try:
            encoded = self._encode(rows, self._add_special_tokens) if rows else []
        except ValueError as error:
            if len(requests) == 1:
                return [error]
            return [self._encode_prompts([request])[0] for request in requests]
        return [[encoded.pop(0) for _ in request] for request in requests]

    def _encode(self, texts: list[str], add_special_tokens: bool) -> list[array[int]]:
        try:
            return [array("i", ids) for ids in self._tokenizer.encoded(texts, add_special_tokens)]
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"the tokenizer cannot encode the text: {error}") from error

    def _outputs(self, inputs: Tensors, prompts: list[array[int]]) -> Tensors:
        batch = len(prompts)
        for row, ids in enumerate(prompts):
            if not ids:
                raise ValueError(f"QUERY (text_input) row {row} gives no tokens; it should not be empty")
        check_padded("QUERY (text_input)", [len(ids) for ids in prompts])
        if "REQUEST_OUTPUT_LEN" not in inputs:
            raise MissingInput("REQUEST_OUTPUT_LEN (max_tokens) is missing; it should be INT32 [batch, 1]")
        end_ids = _column(inputs, "END_ID", batch, self._tokenizer.eos_id)
        if end_ids is None:
            raise ValueError("END_ID (end_id) is missing, and the tokenizer has no eos token to take instead")
        pad_ids = _column(inputs, "PAD_ID", batch, self._tokenizer.pad_id)
        if pad_ids is None:
            pad_ids = end_ids
        lengths = np.array([[len(ids)] for ids in prompts], dtype=np.int32)
        input_ids = np.repeat(pad_ids, lengths.max(), axis=1)
        for row, ids in enumerate(prompts):
            input_ids[row, : len(ids)] = ids
        return {
            "INPUT_ID": input_ids,
            "REQUEST_INPUT_LEN": lengths,
            "DECODER_INPUT_ID": pad_ids,
            "REQUEST_DECODER_INPUT_LEN": np.ones((batch, 1), dtype=np.int32),
            "REQUEST_OUTPUT_LEN": _column(inputs, "REQUEST_OUTPUT_LEN", batch, None),
            "STOP_WORDS_IDS": self._word_list(inputs, "STOP_WORDS_DICT", batch),
            "BAD_WORDS_IDS": self._word_list(inputs, "BAD_WORDS_DICT", batch),
            "EMBEDDING_BIAS": self._embedding_bias(inputs, batch),
            "OUT_END_ID": end_ids,
            "OUT_PAD_ID": pad_ids,
        }

    def _words(self, inputs: Tensors, name: str, batch: int) -> list[list[tuple[int, array[int]]]]:
        """Per row, (position, ids) of each word that has some."""
        rows = _strings(inputs, name, batch)
        places = [(r, n, word) for r, row in enumerate(rows) for n, word in enumerate(row) if word]
        found: list[list[tuple[int, array[int]]]] = [[] for _ in rows]
        if places:
            encoded = self._encode([word for _, _, word in places], add_special_tokens=False)
            for (row, position, _), ids in zip(places, encoded, strict=True):
                if ids:  # TensorRT-LLM also leaves the others out
                    found[row].append((position, ids))
        return found

    def _word_list(self, inputs: Tensors, name: str, batch: int) -> np.ndarray:
        if name not in inputs:
            return np.zeros((batch, 2, 0), dtype=np.int32)
        rows = self._words(inputs, name, batch)
        flat = [[i for _, ids in row for i in ids] for row in rows]
        width = max(1, *(len(ids) for ids in flat))  # clients over HTTP lose the type of empty tensors
        result = np.zeros((batch, 2, width), dtype=np.int32)
        check_tensors({TO_LLM[name]: result})
        result[:, 1] = -1
        for row, words in enumerate(rows):
            result[row, 0, : len(flat[row])] = flat[row]
            result[row, 1, : len(words)] = np.cumsum([len(ids) for _, ids in words])
        return result

    def _embedding_bias(self, inputs: Tensors, batch: int) -> np.ndarray:
        given = [name in inputs for name in ("EMBEDDING_BIAS_WORDS", "EMBEDDING_BIAS_WEIGHTS")]
        if not any(given):
            return np.zeros((batch, 0), dtype=np.float32)
        if not all(given):
            raise ValueError(
                "embedding_bias_words and embedding_bias_weights belong together: give both or none"
            )
        rows = self._words(inputs, "EMBEDDING_BIAS_WORDS", batch)
        weights = inputs["EMBEDDING_BIAS_WEIGHTS"]
        shape = inputs["EMBEDDING_BIAS_WORDS"].shape
        if weights.shape != shape:
            raise ValueError(
                f"EMBEDDING_BIAS_WEIGHTS has shape {list(weights.shape)}; it should be {list(shape)}, one "
                "weight for each of EMBEDDING_BIAS_WORDS"
            )
        if not np.isfinite(weights).all():
            raise ValueError("EMBEDDING_BIAS_WEIGHTS should be finite numbers")
        bias = np.zeros((batch, self._tokenizer.vocab_size), dtype=np.float32)
        with np.errstate(over="ignore"):
            for row, words in enumerate(rows):
                for position, ids in words:
                    np.add.at(bias[row], ids, weights[row, position])
        if not np.isfinite(bias).all():
            raise ValueError("EMBEDDING_BIAS_WEIGHTS of one token add up to more than a float32 holds")
        return bias


def _attempt(function: Any, *args: Any) -> Any:
    try:
        return function(*args)
    except ValueError as error:
        return error


def _prompts(inputs: Tensors, max_bytes: int) -> list[str]:
    for name, meaning in REFUSED.items():
        if name in inputs:
            raise ValueError(
                f"{known_as(name)} is not supported: this model takes no {meaning}; leave it out"
            )
    if "QUERY" not in inputs:
        raise MissingInput("QUERY (text_input) is missing; it should be BYTES [batch, 1]")
    query = inputs["QUERY"]
    if query.ndim != 2 or query.shape[1] != 1 or query.shape[0] < 1:
        raise ValueError(f"QUERY (text_input) has shape {list(query.shape)}; it should be [batch, 1]")
    check_tensors(inputs)
    check_prompts("QUERY (text_input)", query, max_bytes)
    return [row[0] for row in _strings(inputs, "QUERY", query.shape[0])]


def _strings(inputs: Tensors, name: str, batch: int) -> list[list[str]]:
    """Rows of a BYTES tensor [batch, N] as text."""
    values, shown = inputs[name], known_as(name)
    if values.ndim != 2 or values.shape[0] != batch:
        raise ValueError(f"{shown} has shape {list(values.shape)}; it should be [{batch}, number of words]")
    return [[_text(value, f"{shown} row {row}") for value in values[row]] for row in range(batch)]


def _text(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    try:
        return bytes(value).decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} is not UTF-8: {error.reason} at byte {error.start}; text should be sent as UTF-8"
        ) from None


def _column(inputs: Tensors, name: str, batch: int, default: int | None) -> Any:
    """int32 [batch, 1]: the input of that name, else the default in every row; None without either."""
    if name not in inputs:
        return None if default is None else np.full((batch, 1), default, dtype=np.int32)
    values = inputs[name]
    if values.shape != (batch, 1):
        raise ValueError(f"{name} has shape {list(values.shape)}; it should be [{batch}, 1]")
    return values.astype(np.int32)


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        import triton_python_backend_utils as pb_utils  # exists inside Triton's stub only

        self._pb = pb_utils
        bound_texts(pb_utils)
        parameters = read_parameters(args["model_config"], PRE)
        self._preprocessor = Preprocessor(
            read_tokenizer(parameters),
            knob_value(parameters, "add_special_tokens"),
            knob_value(parameters, "max_prompt_bytes"),
        )
        self._freeze_guard = FreezeGuard(processes_dir(owner_pid()))

    def execute(self, requests: list[Any]) -> list[Any]:
        pb_utils, responses = self._pb, []
        with self._freeze_guard.watched():
            inputs = [{tensor.name(): tensor.as_numpy() for tensor in each.inputs()} for each in requests]
            for request, result in zip(requests, self._preprocessor.run(inputs), strict=True):
                if isinstance(result, ValueError):
                    codes = pb_utils.TritonError
                    missing = isinstance(result, MissingInput)
                    error = codes(str(result), codes.INVALID_ARG if missing else codes.INTERNAL)
                    responses.append(pb_utils.InferenceResponse(output_tensors=[], error=error))
                    continue
                names = [name for name in request.requested_output_names() if name in result]
                tensors = [pb_utils.Tensor(name, result[name]) for name in names]
                responses.append(pb_utils.InferenceResponse(output_tensors=tensors))
        return responses

    def finalize(self) -> None:
        self._freeze_guard.close()
