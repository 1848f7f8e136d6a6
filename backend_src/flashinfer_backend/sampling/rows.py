# SPDX-License-Identifier: Apache-2.0
"""The rows of a step that ask for more than the plain sampler gives, as tensors. A row is a token that is
sampled.

Most steps have the rows of the step before, so data that does not change from token to token is sent to
the device once for a composition of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.core.step import StepPlan
from flashinfer_backend.ops.staging import StagingRing
from flashinfer_backend.ops.torch_ops import Penalties
from flashinfer_backend.sampling.processors import Allowed, BadWords
from flashinfer_backend.sampling.state import SequenceState, StatefulRow

T = TypeVar("T")
FEW = 64  # what top-k keeps, for which there is a kernel (ops/triton_filters.py)
PADDING = np.zeros(4, np.int32)


def upload(staging: StagingRing, arrays: Sequence[np.ndarray]) -> list[Tensor]:
    """Arrays of 4-byte or 8-byte elements as tensors, sent in one copy. Unsigned ones become signed. Each
    begins at a multiple of 16 bytes: PyTorch has other kernels for those that do not."""
    parts = [np.ascontiguousarray(array).reshape(-1).view(np.int32) for array in arrays]
    data = staging.upload([piece for part in parts for piece in (part, PADDING[: -len(part) % len(PADDING)])])
    result, begin = [], 0
    for array, words in zip(arrays, parts, strict=True):
        dtype = torch.float32 if array.dtype == np.float32 else torch.int64 if array.itemsize == 8 else None
        part = data[begin : begin + len(words)]
        result.append((part.view(dtype) if dtype else part).view(array.shape))
        begin += -(-len(words) // len(PADDING)) * len(PADDING)
    return result


@dataclass
class Filtered:
    """Rows with top-k, top-p or min-p: index int64 [n], top_k int32 [n], top_p and min_p float32 [n]."""

    index: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


class ProcessedRows:
    """Rows sampled from logits of their own, R of them; `index` in the parts below is into these."""

    def __init__(self, rows: list[StatefulRow], plan: StepPlan, vocab: int, staging: StagingRing) -> None:
        params = [row.state.params for row in rows]
        of = [row.row for row in rows]  # sampling rows
        slots = np.array([row.slot for row in rows], np.int64)
        suppressed = [-1 if row.state.grammar else row.suppressed for row in rows]
        own = (
            np.array([row.at for row in rows], np.int64),
            slots.astype(np.int32),
            plan.temperature[of],
            plan.seed[of],
            np.array(suppressed, np.int32),
            np.array([row.behind for row in rows], np.int32),
        )
        parts = _Parts(staging)
        parts.add("own", own)
        parts.add("few", _filtered(params, vocab, few=True))
        parts.add("filtered", _filtered(params, vocab, few=False))
        parts.add("penalties", _penalties(rows, slots))
        parts.add("guided", _chosen(bool(p.grammar_type) for p in params))
        parts.add("recorded", _chosen((p.needs_history for p in params), slots))
        checks = np.array([row.checks for row in rows], np.int64)
        parts.add(
            "checked", _chosen((r.checks >= 0 and r.state.params.needs_history for r in rows), slots, checks)
        )
        parts.send()
        self.suppresses = any(token >= 0 for token in suppressed)
        # `rows` are places among the step's sampled tokens.
        self.rows, self.slots, self.temperature, self.seed, self.suppressed, self.behind = parts.sent["own"]
        self.few = parts.make("few", Filtered)  # those whose top-k is at most FEW
        self.filtered = parts.make("filtered", Filtered)
        self.limited = any(p.filters and p.top_k > FEW for p in params)  # any of those by top-k
        self.min_p = any(p.filters and p.min_p > 0 for p in params)
        self.penalties = parts.make("penalties", Penalties)
        self.guided = parts.sent.get("guided")  # [index]
        # What masks the rows of `guided`, and what min_tokens forbids them (or -1).
        last = [row for row in rows if row.state.grammar is not None and not row.behind]
        self.grammars = [(row.state.grammar, row.suppressed) for row in last if row.state.grammar]
        self.masks = plan.samples[[row.row for row in last]].tolist()  # of each of them
        self.recorded = parts.sent.get("recorded")  # [index, slots]: rows whose tokens the history keeps
        self.checked = parts.sent.get("checked")  # [index, slots, drafts]: those of them with a draft
        self.allowed = _allowed(rows, vocab, staging)
        self.words = _bad_words(rows, slots, staging)
        self.bias = _bias(rows, vocab, staging)


class _Parts:
    """Named groups of arrays that reach the device in one copy."""

    def __init__(self, staging: StagingRing) -> None:
        self._staging = staging
        self._names: list[str] = []
        self._arrays: list[np.ndarray] = []
        self.sent: dict[str, list[Tensor]] = {}

    def add(self, name: str, arrays: Sequence[np.ndarray] | None) -> None:
        for array in arrays or ():
            self._names.append(name)
            self._arrays.append(array)

    def send(self) -> None:
        for name, tensor in zip(self._names, upload(self._staging, self._arrays), strict=True):
            self.sent.setdefault(name, []).append(tensor)

    def make(self, name: str, kind: Callable[..., T]) -> T | None:
        return kind(*self.sent[name]) if name in self.sent else None


def _where(asked: Iterable[bool]) -> np.ndarray:
    return np.flatnonzero(np.fromiter(asked, bool))


def _chosen(asked: Iterable[bool], *columns: np.ndarray) -> Sequence[np.ndarray] | None:
    """Indices of the rows that ask, and the columns there; None without any."""
    index = _where(asked)
    return (index, *(column[index] for column in columns)) if len(index) else None


def _filtered(params: list[SamplingParams], vocab: int, few: bool) -> Sequence[np.ndarray] | None:
    top_k = np.array([min(p.top_k or vocab, vocab) for p in params], np.int32)
    top_p = np.array([p.top_p for p in params], np.float32)
    min_p = np.array([p.min_p for p in params], np.float32)
    return _chosen((p.filters and (0 < p.top_k <= FEW) == few for p in params), top_k, top_p, min_p)


def _penalties(rows: list[StatefulRow], slots: np.ndarray) -> Sequence[np.ndarray] | None:
    params = [row.state.params for row in rows]
    repetition = np.array([p.repetition_penalty for p in params], np.float32)
    prompt_len = np.array([row.state.prompt_len for row in rows], np.int32)
    presence = np.array([p.presence_penalty for p in params], np.float32)
    frequency = np.array([p.frequency_penalty for p in params], np.float32)
    return _chosen((p.penalised for p in params), slots, prompt_len, repetition, presence, frequency)


def _allowed(rows: list[StatefulRow], vocab: int, staging: StagingRing) -> Allowed | None:
    """A sequence's mask is sent once: it has V bits."""
    own = [(i, row.state) for i, row in enumerate(rows) if row.state.params.allowed_ids]
    if not own:
        return None
    masks, markers = zip(*(_mask(state, vocab, staging) for _, state in own), strict=True)
    (index,) = upload(staging, [np.array([i for i, _ in own], np.int64)])
    return Allowed(index, torch.stack(masks), torch.cat(markers))


def _mask(state: SequenceState, vocab: int, staging: StagingRing) -> list[Tensor]:
    """Mask int32 [ceil(V / 32)] and marker int64 [1] of a sequence's allowed ids."""
    if state.allowed is None:
        bits = np.zeros(-(-vocab // 32) * 32, np.bool_)
        bits[state.params.allowed_ids] = True
        state.marker = int(np.argmin(bits))
        mask = np.packbits(bits, bitorder="little").view(np.int32)
        state.allowed = upload(staging, [mask, np.array([state.marker], np.int64)])
    return state.allowed


def _bad_words(stateful: list[StatefulRow], slots: np.ndarray, staging: StagingRing) -> BadWords | None:
    """Bad words, and among them the late ids of rows that have not come to their min_tokens. A sequence's own
    are sent once: there may be thousands, or few very long ones."""
    own = [(i, row.state) for i, row in enumerate(stateful) if row.state.params.bad_words]
    late = [(i, token) for i, row in enumerate(stateful) if row.early for token in row.state.params.late_ids]
    if not own and not late:
        return None
    for _, state in own:
        if state.words is None:
            state.words = upload(staging, _word_arrays(state.params.bad_words))
    words = [state.words for _, state in own if state.words is not None]
    counts = [len(last) for last, _, _, _ in words]
    rows = np.concatenate([np.repeat([i for i, _ in own], counts), [i for i, _ in late]]).astype(np.int64)
    rows_, slots_, late_ = upload(
        staging, [rows, slots[rows], np.array([token for _, token in late], np.int64)]
    )
    begins = np.cumsum(counts) - counts
    return BadWords(
        rows=rows_,
        slots=slots_,
        last=_joined([*(last for last, _, _, _ in words), late_], late_),
        word=_joined(
            [word + begin for (_, word, _, _), begin in zip(words, begins.tolist(), strict=True)], late_
        ),
        token=_joined([token for _, _, token, _ in words], late_),
        back=_joined([back for _, _, _, back in words], late_),
    )


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    """Without empty ones: next to one of them PyTorch takes another kernel, which no step loaded at start."""
    return torch.cat([part for part in parts if len(part)] or parts) if parts else like[:0]


def _word_arrays(words: list[list[int]]) -> list[np.ndarray]:
    """BadWords' last, word, token and back of one sequence's words."""
    words = [word for word in words if word]
    before = np.array([len(word) - 1 for word in words], np.int64)
    ends = np.cumsum(before)
    of = np.repeat(np.arange(len(words)), before)
    return [
        np.array([word[-1] for word in words], np.int64),
        of,
        np.array([token for word in words for token in word[:-1]], np.int32),
        (ends[of] - np.arange(len(of))).astype(np.int32),
    ]


def _bias(rows: list[StatefulRow], vocab: int, staging: StagingRing) -> tuple[Tensor, Tensor] | None:
    """(row * V + token, bias) of all rows. A sequence's own part is sent once: it may be of V tokens."""
    parts = []
    for i, state in enumerate(row.state for row in rows):
        if state.params.bias_ids:
            if state.bias is None:
                ids = np.array(state.params.bias_ids, np.int64)
                values = np.array(state.params.bias_values, np.float32)
                state.bias = upload(staging, [ids, values])
            parts.append((state.bias[0] + i * vocab, state.bias[1]))
    if not parts:
        return None
    return torch.cat([where for where, _ in parts]), torch.cat([values for _, values in parts])
