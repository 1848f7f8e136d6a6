# SPDX-License-Identifier: Apache-2.0
"""The postprocessing model: token ids to text."""

from typing import Any

import numpy as np

from flashinfer_backend.config_tools.knobs import LLM, POST
from flashinfer_backend.core.bounds import FIELDS, check
from flashinfer_backend.core.paths import owner_pid, processes_dir, run_dir
from flashinfer_backend.text.chunk import NO_LIMIT, PackedChunk, unpack_chunk
from flashinfer_backend.text.delta import DeltaDecoder
from flashinfer_backend.transport.delivery_marks import DeliveryMarker
from flashinfer_backend.triton_server.bounds import check_tensors
from flashinfer_backend.triton_server.freeze_guard import FreezeGuard
from flashinfer_backend.triton_server.parameters import knob_value, read_parameters, read_tokenizer

Tensors = dict[str, np.ndarray]


def chunks(inputs: Tensors) -> list[PackedChunk]:
    """CHUNK, int64 [B, 6 + n], row by row; none where the input is absent.

    Raises ValueError for a malformed one, or one with other ids.
    """
    values = inputs.get("CHUNK")
    if values is None:
        return []
    if len(inputs) > 1:
        others = " and ".join(sorted(name for name in inputs if name != "CHUNK"))
        raise ValueError(f"CHUNK has ids of its own, so {others} should be left out")
    if values.ndim != 2:
        raise ValueError(f"CHUNK has shape {list(values.shape)}; it should be [batch, 6 + ids]")
    check_tensors(inputs)
    return [unpack_chunk(row) for row in values]


def whole_texts(decoder: DeltaDecoder, inputs: Tensors) -> list[str]:
    """A text for each sequence of a request, each decoded on its own: [B * beams].

    TOKENS_BATCH int32 [B, beams, n], SEQUENCE_LENGTH int32 [B, beams]: how many ids of each count.
    Raises ValueError saying what is wrong.
    """
    for name in ("TOKENS_BATCH", "SEQUENCE_LENGTH"):
        if name not in inputs:
            raise ValueError(f"{name} is missing")
    check_tensors(inputs)
    tokens, lengths = inputs["TOKENS_BATCH"], inputs["SEQUENCE_LENGTH"]
    if tokens.ndim != 3 or lengths.shape != tokens.shape[:2]:
        raise ValueError(
            f"TOKENS_BATCH has shape {list(tokens.shape)} and SEQUENCE_LENGTH {list(lengths.shape)}; they "
            "should be [batch, beams, ids] and [batch, beams]"
        )
    count = int(np.clip(lengths, 0, None).sum(dtype=np.int64))
    check("TOKENS_BATCH", count, FIELDS["TOKENS_BATCH"].sequences, "ids", " in all sequences")
    width = tokens.shape[2]
    output = []
    for row, row_lengths in zip(tokens, lengths.tolist(), strict=True):
        for ids, length in zip(row, row_lengths, strict=True):
            if not 0 <= length <= width:
                raise ValueError(f"SEQUENCE_LENGTH is {length}; it should lie in 0..{width}, the ids given")
            output.append(decoder.decode(ids[:length].tolist()))
    return output


def chunk_text(decoder: DeltaDecoder, chunk: PackedChunk) -> str:
    """What a chunk adds to the text of the ids before it."""
    if chunk.max_chars == NO_LIMIT:
        if chunk.whole:
            return decoder.decode(chunk.ids)
        return decoder.delta(chunk.context_ids, chunk.ids, chunk.last)
    # The limit counts the characters of deltas, as the stop words' matcher does.
    text = decoder.delta(chunk.context_ids, chunk.ids, chunk.whole or chunk.last)
    return text[: chunk.max_chars]


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        parameters = read_parameters(args["model_config"], POST)
        skip_special_tokens = knob_value(parameters, "skip_special_tokens")
        self._decoder = DeltaDecoder(read_tokenizer(parameters).backend, skip_special_tokens)
        owner = owner_pid()
        self._marker = DeliveryMarker(run_dir(owner, parameters.get("llm_model_name", LLM)))
        self._freeze_guard = FreezeGuard(processes_dir(owner))

    def execute(self, requests: list[Any]) -> list[Any]:
        with self._freeze_guard.watched():
            return [self._answer(request) for request in requests]

    def finalize(self) -> None:
        self._freeze_guard.close()

    def _answer(self, request: Any) -> Any:
        import triton_python_backend_utils as pb_utils  # exists inside Triton's stub only

        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        tensors, error = [], None
        try:
            arrived = chunks(inputs)
            # The llm step learns from what is missing here that a client has left (client_watch.py).
            for chunk in arrived:
                self._marker.mark(chunk.handle, chunk.sent_ns)
            texts = [chunk_text(self._decoder, chunk) for chunk in arrived]
            texts = texts or whole_texts(self._decoder, inputs)
            output = np.array([text.encode() for text in texts], dtype=np.object_)
            tensors = [pb_utils.Tensor("OUTPUT", output)]
        except ValueError as problem:
            error = pb_utils.TritonError(str(problem), pb_utils.TritonError.INTERNAL)
        return pb_utils.InferenceResponse(output_tensors=tensors, error=error)
