# SPDX-License-Identifier: Apache-2.0
"""Reports of the model's logits: log probabilities and the logits themselves, of sampled tokens and of
prompts.

Both are of the model's own logits, before penalties, biases, suppressed tokens, temperature and filters
(as vLLM by default, and as a forward pass of transformers).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.core.step import TOP_LOGPROBS, StepOutput
from flashinfer_backend.models.transformer import Transformer
from flashinfer_backend.ops.staging import StagingRing
from flashinfer_backend.ops.weight import Chosen
from flashinfer_backend.sampling.rows import upload
from flashinfer_backend.sampling.state import StatefulRow

CONTEXT_ROWS = 256  # rows of a prompt's logits on the device at a time
# What one request's context logits may take in a message; msgpack ends at 4 GiB.
MAX_CONTEXT_LOGITS_BYTES = 2 << 30


class ReportedRows:
    """Rows that want log probabilities or logits; the lists index the step's sampled tokens."""

    def __init__(self, rows: list[StatefulRow], staging: StagingRing) -> None:
        self.log_prob_rows = [r.at for r in rows if r.state.params.log_probs]
        self.logits_rows = [r.at for r in rows if r.state.params.generation_logits or r.state.params.pooled]
        self.top_counts = [r.state.params.top_logprobs for r in rows if r.state.params.log_probs]
        self._log_prob_index, self._logits_index = upload(
            staging, [np.array(self.log_prob_rows, np.int64), np.array(self.logits_rows, np.int64)]
        )

    def take(self, logits: Tensor, tokens: Tensor) -> tuple[Tensor, Report]:
        """logits [n or more, V] of the model and tokens int32 [n]: what to read back in place of the tokens,
        int32 [n + m], and the report that then reads it."""
        readback, host, top = tokens, None, None
        if self.log_prob_rows:
            wide = logits[self._log_prob_index].float()
            total = wide.logsumexp(dim=1)
            chosen = log_probs(wide, tokens[self._log_prob_index], total)
            readback = torch.cat([tokens, chosen.view(torch.int32)])
            if most := max(self.top_counts):
                values, ids = wide.topk(min(most, wide.shape[1]), dim=1)
                top = _to_host(values - total.unsqueeze(1)), _to_host(ids)
        if self.logits_rows:
            host = _to_host(logits[self._logits_index].float())
        return readback, Report(self, host, top)


def _to_host(source: Tensor) -> Tensor:
    """A copy that has arrived when the step's tokens have: they are read later."""
    host = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
    return host.copy_(source, non_blocking=True)


@dataclass
class Report:
    """What one step reports; read it when the step's tokens are on the host."""

    rows: ReportedRows
    logits: Tensor | None  # float32 [len(logits_rows), V]
    top: tuple[Tensor, Tensor] | None  # log probabilities float32 and ids int64, [len(log_prob_rows), most]

    def read(self, values: np.ndarray, output: StepOutput) -> None:
        """Enter the reported values into `output`; values: the step's readback."""
        rows, count = self.rows, len(self.rows.log_prob_rows)
        chosen = values[len(values) - count :].view(np.float32).tolist()
        output.log_probs += zip(rows.log_prob_rows, chosen, strict=True)
        if self.top is not None:
            log_probs, ids = self.top
            packed = np.empty(ids.shape, TOP_LOGPROBS)
            packed["token"], packed["log_prob"] = ids.numpy(), log_probs.numpy()
            for row, most, found in zip(rows.log_prob_rows, rows.top_counts, packed, strict=True):
                if most:
                    output.top_logprobs.append((row, found[:most].tobytes()))
        for i, row in enumerate(rows.logits_rows):
            assert self.logits is not None
            output.generation_logits.append((row, self.logits[i].numpy().tobytes()))


def log_probs(logits: Tensor, tokens: Tensor, total: Tensor | None = None) -> Tensor:
    """log softmax of logits [n, V] at tokens int32 [n]: float32 [n]. total: logsumexp of each row."""
    logits = logits.float()
    total = logits.logsumexp(dim=1) if total is None else total
    return logits.gather(1, tokens.long().unsqueeze(1)).squeeze(1) - total


def _in_parts(model: Transformer, hidden: Tensor, chosen: Chosen | None) -> Iterator[tuple[slice, Tensor]]:
    """Logits of hidden [n, H], a chunk of a prompt, for CONTEXT_ROWS rows at a time. chosen: its adapters."""
    for first in range(0, len(hidden), CONTEXT_ROWS):
        rows = slice(first, first + CONTEXT_ROWS)
        yield rows, model.logits(hidden[rows], chosen=None if chosen is None else chosen.of(rows))


def prompt_log_probs(
    following: Tensor, most: int, model: Transformer, hidden: Tensor, chosen: Chosen | None = None
) -> np.ndarray | None:
    """int32 [n, 1 + most, 2], filled once the step has ended; None on ranks other than 0. Of each token
    of `following` [n], which follow those of hidden [n, H], its rank, from 1 on, and its log probability;
    then the `most` likeliest in its place (fewer where the vocabulary has fewer), as in TOP_LOGPROBS."""
    found = []
    for rows, logits in _in_parts(model, hidden, chosen):
        if model.collectives.shard.rank:
            continue  # rank 0 has the logits
        # Only sums need 32 bits: searching takes half as long in 16.
        total = logits.float().logsumexp(dim=1, keepdim=True)
        own = logits.gather(1, following[rows].long().unsqueeze(1))
        values, ids = logits.topk(min(most, logits.shape[1]), dim=1)
        ranks = (logits >= own).sum(dim=1, keepdim=True)
        log_probs = torch.cat([own, values], dim=1) - total
        found.append(torch.stack([torch.cat([ranks, ids], dim=1).int(), log_probs.view(torch.int32)], dim=2))
    return _to_host(torch.cat(found)).numpy() if found else None


def context_logits(model: Transformer, hidden: Tensor, chosen: Chosen | None = None) -> np.ndarray:
    """float32 [n, V] on the host: logits of hidden [n, H], a chunk of a prompt. chosen: its adapters.

    The copies are waited for, so that the device holds few rows at a time; steps with such a chunk do
    not overlap with others.
    """
    result: Tensor | None = None
    for rows, logits in _in_parts(model, hidden, chosen):
        if result is None:  # ranks other than 0 have fewer columns
            result = torch.empty(len(hidden), logits.shape[1], dtype=torch.float32)
        result[rows] = logits
    assert result is not None, "a chunk has tokens"
    return result.numpy()


def logits_problem(
    params: SamplingParams, prompt_len: int, max_new: int, vocab_size: int, room: int
) -> str | None:
    """Why a sequence's logits cannot be sent, if so. max_new: tokens that it may generate. room: bytes that
    there is for the logits of all sequences."""
    size = prompt_len * vocab_size * 4
    if params.context_logits and size > MAX_CONTEXT_LOGITS_BYTES:
        return (
            f"return_context_logits of {prompt_len} prompt tokens would be {size >> 20} MiB; at most "
            f"{MAX_CONTEXT_LOGITS_BYTES >> 20} MiB can be sent, a prompt of "
            f"{MAX_CONTEXT_LOGITS_BYTES // (4 * vocab_size)} tokens"
        )
    rows = params.logits_rows(prompt_len, max_new)
    if rows * vocab_size * 4 <= room:
        return None
    asked = [f"of {prompt_len} prompt tokens"] * params.context_logits
    asked += [f"of up to {max_new} generated tokens"] * params.generation_logits
    return (
        f"the logits that are asked for, {' and '.join(asked)}, could be {rows * vocab_size * 4 >> 20} MiB; "
        f"there is room for {room >> 20} MiB, those of {room // (4 * vocab_size)} tokens. Ask for fewer, or "
        "raise max_logits_mib when building the model repository"
    )
