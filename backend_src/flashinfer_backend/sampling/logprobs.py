# SPDX-License-Identifier: Apache-2.0
"""What rows are told about the model's logits: log probabilities and the logits themselves.

Both are of the model's own logits, before penalties, biases, suppresses, temperature and filters (vLLM's
default, and what a forward pass of transformers gives).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flashinfer_backend.core.request import Request
from flashinfer_backend.core.step import ExtraRow
from flashinfer_backend.models.transformer import Transformer
from flashinfer_backend.ops.staging import StagingRing
from flashinfer_backend.sampling.rows import upload

CONTEXT_ROWS = 256  # rows of context logits on the device at a time
# What one request's context logits may take in a message; msgpack ends at 4 GiB.
MAX_CONTEXT_LOGITS_BYTES = 2 << 30


class ReportedRows:
    """Rows that want log probabilities or logits; both lists index the step's sampling rows."""

    def __init__(self, rows: list[ExtraRow], staging: StagingRing) -> None:
        self.log_prob_rows = [row.row for row in rows if row.request.params.log_probs]
        self.logits_rows = [row.row for row in rows if row.request.params.generation_logits]
        self._log_prob_index, self._logits_index = upload(
            staging, [np.array(self.log_prob_rows, np.int64), np.array(self.logits_rows, np.int64)]
        )

    def __len__(self) -> int:
        return len(self.log_prob_rows) + len(self.logits_rows)

    def take(self, logits: Tensor, tokens: Tensor) -> tuple[Tensor, Report]:
        """logits [s or more, V] of the model and tokens int32 [s]: what to read back in place of the tokens,
        int32 [s + n], and the report that then reads it."""
        readback, host = tokens, None
        if self.log_prob_rows:
            index = self._log_prob_index
            chosen = log_probs(logits[index], tokens[index])
            readback = torch.cat([tokens, chosen.view(torch.int32)])
        if self.logits_rows:
            wanted = logits[self._logits_index].float()
            host = torch.empty(wanted.shape, pin_memory=logits.is_cuda)
            host.copy_(wanted, non_blocking=True)  # has arrived when the tokens have: they are read later
        return readback, Report(self.log_prob_rows, self.logits_rows, host)


@dataclass
class Report:
    """Of one step; read it when the step's tokens are on the host."""

    log_prob_rows: list[int]
    logits_rows: list[int]
    logits: Tensor | None  # float32 [len(logits_rows), V] on the host

    def log_probs(self, values: np.ndarray) -> Iterator[tuple[int, float]]:
        """(sampling row, log probability of its token); values: the step's readback."""
        count = len(self.log_prob_rows)
        yield from zip(
            self.log_prob_rows, values[len(values) - count :].view(np.float32).tolist(), strict=True
        )

    def generation_logits(self) -> Iterator[tuple[int, bytes]]:
        """(sampling row, its logits as float32 [V])."""
        for i, row in enumerate(self.logits_rows):
            assert self.logits is not None
            yield row, self.logits[i].numpy().tobytes()


def log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """log softmax of logits [n, V] at tokens int32 [n]: float32 [n]."""
    logits = logits.float()
    return logits.gather(1, tokens.long().unsqueeze(1)).squeeze(1) - logits.logsumexp(dim=1)


def keep_context_logits(request: Request, model: Transformer, hidden: Tensor, start: int) -> None:
    """Take the logits of a prompt's chunk (hidden [n, H], positions start..start + n) to the host.

    The copies are waited for, so that the device holds few rows at a time; steps with such a chunk do
    not overlap with others.
    """
    if request.context_logits is None:
        request.context_logits = np.empty((len(request.prompt), model.config.vocab_size), np.float32)
    for part in hidden.split(CONTEXT_ROWS):
        request.context_logits[start : start + len(part)] = model.logits(part).cpu().float().numpy()
        start += len(part)


def context_logits_problem(prompt_len: int, vocab_size: int) -> str | None:
    """Why a prompt's context logits cannot be sent, if so."""
    size = prompt_len * vocab_size * 4
    if size <= MAX_CONTEXT_LOGITS_BYTES:
        return None
    return (
        f"return_context_logits of {prompt_len} prompt tokens would be {size >> 20} MiB; at most "
        f"{MAX_CONTEXT_LOGITS_BYTES >> 20} MiB can be sent, a prompt of "
        f"{MAX_CONTEXT_LOGITS_BYTES // (4 * vocab_size)} tokens"
    )
