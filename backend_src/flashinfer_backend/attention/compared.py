# SPDX-License-Identifier: Apache-2.0
"""Any attention next to plain torch's, for finding faults (the knob compare_attention)."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from flashinfer_backend.attention.batch import AttentionBatch
from flashinfer_backend.attention.contract import Mixer, Prepared, StepShape

log = logging.getLogger(__name__)

TOKENS = 64  # of each prompt


class ComparedAttention:
    """A Mixer that runs `mixer`, and for the first tokens of each prompt also `reference`, over the same
    cache of `layers` layers; a line of the log has the largest error of each layer. Waits for the device, and
    cannot be captured."""

    def __init__(self, mixer: Mixer, reference: Mixer, layers: int) -> None:
        self._mixer, self._reference, self._layers = mixer, reference, layers

    def step(self, batch: AttentionBatch) -> Prepared:
        prepared = self._mixer.step(batch)
        starts = np.cumsum(batch.q_lens) - batch.q_lens
        begin = np.flatnonzero((batch.q_lens == batch.kv_lens) & (batch.q_lens > 1))
        if not len(begin):
            return prepared
        lens = np.minimum(batch.q_lens[begin], TOKENS)
        first = replace(batch, q_lens=lens, kv_lens=lens, slots=batch.slots[begin], lengths=None)
        rows = [np.arange(start, start + n) for start, n in zip(starts[begin], lens, strict=True)]
        return _Compared(prepared, self._reference.step(first), np.concatenate(rows), self._layers)

    def graph_words(self, shape: StepShape) -> int:
        """None: steps are not captured."""
        return 0

    def captured(
        self, shape: StepShape, block_table: Tensor, words: Tensor, lengths: Tensor | None = None
    ) -> None:
        """None: what is compared differs from step to step."""
        return None


class _Compared:
    def __init__(self, prepared: Prepared, reference: Prepared, rows: np.ndarray, layers: int) -> None:
        self._prepared, self._reference, self._rows, self._layers = prepared, reference, rows, layers
        self._errors: list[float] = []

    def run(self, layer: int, q: Tensor, out: Tensor) -> None:
        """Attend as the mixer does; the last layer's call writes the log's line."""
        self._prepared.run(layer, q, out)
        rows = torch.from_numpy(self._rows).to(q.device)
        expected = torch.empty_like(q[rows])
        self._reference.run(layer, q[rows], expected)
        error = (out[rows].float() - expected.float()).abs().max() / expected.float().abs().max()
        self._errors.append(float(error))
        if layer == self._layers - 1:
            shown = " ".join(f"{each:.1e}" for each in self._errors)
            log.info(
                "largest error of %d tokens, relative to plain torch's attention, by layer: %s",
                len(rows),
                shown,
            )
