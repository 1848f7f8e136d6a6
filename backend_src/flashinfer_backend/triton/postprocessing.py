# SPDX-License-Identifier: Apache-2.0
"""The postprocessing model: token ids to text."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from flashinfer_backend.paths import resolve_model_dir, run_dir
from flashinfer_backend.text.chunk import NO_LIMIT, ChunkContext, unpack_chunk_context
from flashinfer_backend.text.delta import DeltaDecoder
from flashinfer_backend.text.tokenizer import TextTokenizer
from flashinfer_backend.transport.seen import SeenMarker
from flashinfer_backend.triton.parameters import flag_parameter, read_parameters, required_parameter

Tensors = dict[str, np.ndarray]
DEFAULT_LLM_MODEL = "llm"


def chunk_contexts(inputs: Tensors) -> list[ChunkContext] | None:
    """CHUNK_CONTEXT, int64 [B, 4 + n], row by row; None where the input is absent.

    Raises ValueError for a malformed one.
    """
    values = inputs.get("CHUNK_CONTEXT")
    if values is None:
        return None
    if values.ndim != 2:
        raise ValueError(f"CHUNK_CONTEXT has shape {list(values.shape)}; it should be [batch, 4 + ids]")
    return [unpack_chunk_context(row) for row in values]


def texts(decoder: DeltaDecoder, inputs: Tensors, contexts: list[ChunkContext] | None) -> np.ndarray:
    """OUTPUT: one UTF-8 text (bytes objects [B * beams]) for each sequence of a request.

    TOKENS_BATCH int32 [B, beams, n], SEQUENCE_LENGTH int32 [B, beams]: so many ids of each count. A
    row with a context adds to the text before it, one without is decoded on its own. Raises
    ValueError saying what is wrong.
    """
    for name in ("TOKENS_BATCH", "SEQUENCE_LENGTH"):
        if name not in inputs:
            raise ValueError(f"{name} is missing")
    tokens, lengths = inputs["TOKENS_BATCH"], inputs["SEQUENCE_LENGTH"]
    if tokens.ndim != 3 or lengths.shape != tokens.shape[:2]:
        raise ValueError(
            f"TOKENS_BATCH has shape {list(tokens.shape)} and SEQUENCE_LENGTH {list(lengths.shape)}; they "
            "should be [batch, beams, ids] and [batch, beams]"
        )
    batch, beams, width = tokens.shape
    if contexts is not None and len(contexts) != batch:
        raise ValueError(f"CHUNK_CONTEXT has {len(contexts)} rows; it should have {batch}, as TOKENS_BATCH")
    output = []
    for row, row_lengths in enumerate(lengths.tolist()):
        context = contexts[row] if contexts is not None else None
        if beams > 1 and context is not None and not context.whole:
            raise ValueError(f"a chunk with context has one sequence a row, but TOKENS_BATCH has {beams}")
        for beam, length in enumerate(row_lengths):
            if not 0 <= length <= width:
                raise ValueError(f"SEQUENCE_LENGTH is {length}; it should lie in 0..{width}, the ids given")
            output.append(_text(decoder, tokens[row, beam, :length].tolist(), context).encode())
    return np.array(output, dtype=np.object_)


def _text(decoder: DeltaDecoder, ids: list[int], context: ChunkContext | None) -> str:
    if context is None:
        return decoder.decode(ids)
    if context.max_chars == NO_LIMIT:
        if context.whole:
            return decoder.decode(ids)
        return decoder.delta(context.context_ids, ids, context.last)
    # The limit counts the characters of deltas, which whoever matched the stop word went by.
    text = decoder.delta(context.context_ids, ids, context.whole or context.last)
    return text[: context.max_chars]


class TritonPythonModel:
    """Triton's interface: tensors in, tensors out."""

    def initialize(self, args: dict[str, str]) -> None:
        parameters = read_parameters(args["model_config"])
        folder = required_parameter(parameters, "tokenizer_dir", "the folder of the tokenizer, or 'bundled'")
        self._decoder = DeltaDecoder(
            TextTokenizer(resolve_model_dir(folder)).backend,
            flag_parameter(parameters, "skip_special_tokens", default=True),
        )
        # The parent of a stub is the server.
        self._seen = SeenMarker(run_dir(os.getppid(), parameters.get("llm_model_name", DEFAULT_LLM_MODEL)))

    def execute(self, requests: list[Any]) -> list[Any]:
        import triton_python_backend_utils as pb_utils  # exists inside Triton's stub only

        responses = []
        for request in requests:
            inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            tensors, error = [], None
            try:
                contexts = chunk_contexts(inputs)
                # The llm step learns from what is missing here that a client has left (departed.py).
                for context in contexts or ():
                    self._seen.mark(context.handle)
                tensors = [pb_utils.Tensor("OUTPUT", texts(self._decoder, inputs, contexts))]
            except ValueError as problem:
                error = pb_utils.TritonError(str(problem), pb_utils.TritonError.INTERNAL)
            responses.append(pb_utils.InferenceResponse(output_tensors=tensors, error=error))
        return responses
