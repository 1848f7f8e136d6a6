# SPDX-License-Identifier: Apache-2.0
"""What a response of the llm model holds."""

from array import array
from collections.abc import Container

import numpy as np

from flashinfer_backend.serving.generation import FINISH_REASONS, Chunk
from flashinfer_backend.text.chunk import LAST, WHOLE, pack_chunk
from flashinfer_backend.transport import protocol
from flashinfer_backend.triton_server.requests import Row
from flashinfer_backend.triton_server.sequence import Sequence


def refuse_unmapped(rows: list[Row], wanted: Container[str]) -> None:
    """Raises ValueError if a row asks for an output that the ensemble has not: build.py can leave it out.

    An ensemble asks for all that it has, and it alone for `chunk`. Direct clients choose for themselves.
    """
    if "chunk" not in wanted:
        return
    for row in rows:
        asked = {
            "return_log_probs": (row.params.log_probs, "output_log_probs"),
            "return_context_logits": (row.params.context_logits, "context_logits"),
            "return_generation_logits": (row.params.generation_logits, "generation_logits"),
            "return_perf_metrics": (row.params.perf_metrics, "arrival_time_ns"),
        }
        for name, (flag, output) in asked.items():
            if flag and output not in wanted:
                raise ValueError(
                    f"{name} is true, but this ensemble has no output {output}; leave it out, or build the"
                    " model repository with ensemble_report_outputs true"
                )


def chunk_outputs(
    sequence: Sequence, chunk: Chunk, now: int, wanted: Container[str]
) -> dict[str, np.ndarray]:
    """Tensors of a sequence's next chunk by output name, each with a leading batch dimension of 1; only those
    which are `wanted`. What the chunk reports is added to `reported` of the sequence.

    A row that does not stream is answered with one chunk, in which the prompt comes first unless the
    row excludes it. `now`: time.monotonic_ns().
    """
    row, indices = sequence.row, sequence.indices
    ids, flags, max_chars = chunk.ids, LAST if chunk.last else 0, chunk.max_chars
    if not row.streaming:
        flags |= WHOLE
        if not row.exclude_input:
            ids = array("i", row.prompt.tolist()) + ids
    outputs = {}
    # Benchmarks of the model alone count the ids of the first output.
    if "output_ids" in wanted:
        outputs["output_ids"] = np.array([[ids]], dtype=np.int32)
    if "sequence_length" in wanted:
        outputs["sequence_length"] = np.array([[len(ids)]], dtype=np.int32)
    # What the ensemble takes in place of the two above.
    if "chunk" in wanted:
        outputs["chunk"] = pack_chunk(sequence.handle, now, flags, max_chars, sequence.context_ids, ids)
    if chunk.last:
        outputs["finish_reason"] = np.array([[FINISH_REASONS[chunk.code].encode()]], dtype=np.object_)
    for name, index in (("batch_index", indices.batch_index), ("sequence_index", indices.sequence_index)):
        if index is not None:
            outputs[name] = _integer(index)
    if row.return_num_input_tokens:
        outputs["num_input_tokens"] = _integer(len(row.prompt))
    if row.return_num_output_tokens:
        outputs["num_output_tokens"] = _integer(len(chunk.ids))
    _add_reports(outputs, sequence, chunk)
    return {name: value for name, value in outputs.items() if name in wanted}


def _add_reports(outputs: dict[str, np.ndarray], sequence: Sequence, chunk: Chunk) -> None:
    row, reported, reports = sequence.row, sequence.reported, chunk.reports
    params = row.params
    if params.log_probs:
        log_probs = chunk.log_probs.tolist()
        if row.log_probs_so_far:
            reported.log_probs += log_probs
            log_probs = reported.log_probs
        outputs["output_log_probs"] = np.array([[log_probs]], dtype=np.float32)
        outputs["cum_log_probs"] = np.array([[sequence.cum_log_prob]], dtype=np.float32)
    if params.generation_logits:
        rows = [_logits(e.generation_logits, 1)[0] for e in reports if e.generation_logits is not None]
        # The last chunk may have no token. Clients read the output in every chunk.
        stacked = np.stack(rows)[: len(chunk.ids)] if rows else np.empty((0, row.vocab_size), np.float32)
        outputs["generation_logits"] = stacked[None, None]
    for report in reports:
        reported.perf = report.perf or reported.perf
        if report.context_logits is not None:
            reported.context_logits = report.context_logits
    if params.context_logits and reported.context_logits is not None:
        first = any(report.context_logits is not None for report in reports)
        if first or chunk.last:
            outputs["context_logits"] = _logits(reported.context_logits, len(row.prompt))[None]
        if chunk.last:
            reported.context_logits = None  # other sequences of the request may go on for long
    if params.perf_metrics and reported.perf is not None:
        outputs.update(perf_outputs(reported.perf))


def perf_outputs(perf: protocol.Perf) -> dict[str, np.ndarray]:
    """Times, KV block counts and drafts of a sequence: until its first token, or all of it. The counts are
    those that TensorRT-LLM's backend means: what a sequence is given when it is admitted, added up where that
    happens again; reused blocks are not among the total."""
    return {
        "kv_cache_alloc_new_blocks": _integer(perf.new_blocks),
        "kv_cache_reused_blocks": _integer(perf.reused_blocks),
        "kv_cache_alloc_total_blocks": _integer(perf.allocated_blocks),
        "arrival_time_ns": np.array([[perf.arrival_ns]], dtype=np.int64),
        "first_scheduled_time_ns": np.array([[perf.first_scheduled_ns]], dtype=np.int64),
        "first_token_time_ns": np.array([[perf.first_token_ns]], dtype=np.int64),
        "last_token_time_ns": np.array([[perf.last_token_ns]], dtype=np.int64),
        "acceptance_rate": np.array([[perf.accepted_tokens / max(1, perf.drafted_tokens)]], dtype=np.float32),
        "total_accepted_draft_tokens": _integer(perf.accepted_tokens),
        "total_draft_tokens": _integer(perf.drafted_tokens),
    }


def _integer(value: int) -> np.ndarray:
    return np.array([[value]], dtype=np.int32)


def _logits(data: bytes | memoryview, rows: int) -> np.ndarray:
    return np.frombuffer(data, dtype="<f4").reshape(rows, -1)
