# SPDX-License-Identifier: Apache-2.0
"""Chooses tokens from logits: the plain sampler for every row, filters for rows that ask for them."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch

from flashinfer_backend.engine.config import EngineConfig
from flashinfer_backend.engine.staging import StagingRing
from flashinfer_backend.engine.step import StepPlan


@dataclass
class SamplingRows:
    """Per-row sampling state on the device, [s] each."""

    slots: torch.Tensor  # int32
    temperature: torch.Tensor  # float32
    seed: torch.Tensor  # int64
    position: torch.Tensor  # int32, position the sampled token will have
    banned: torch.Tensor  # int32, or -1

    @classmethod
    def upload(cls, plan: StepPlan, position: np.ndarray, staging: StagingRing) -> SamplingRows:
        rows = len(plan.sample_slots)
        data = staging.upload(
            [
                plan.seed.view(np.int32),
                plan.sample_slots,
                plan.temperature.view(np.int32),
                position.astype(np.int32),
                plan.banned,
            ]
        )
        slots, temperature, position_, banned = data[2 * rows :].view(4, rows)
        return cls(
            slots, temperature.view(torch.float32), data[: 2 * rows].view(torch.int64), position_, banned
        )


@dataclass
class StepExtras:
    """What rows asked for beside their tokens; `rows` index the step's sampling rows."""

    rows: list[int]
    log_probs: torch.Tensor | None = None  # float32 [len(rows)] on the host


class Sampler:
    """Samples a step's rows. `ops.sample` defines the choice; filters only narrow its logits."""

    def __init__(self, ops: ModuleType, vocab_size: int, config: EngineConfig, device: torch.device) -> None:
        self._ops = ops
        self._vocab_size = vocab_size
        self._device = device

    def sample(
        self, logits: torch.Tensor, rows: SamplingRows, plan: StepPlan
    ) -> tuple[torch.Tensor, StepExtras | None]:
        """Tokens int32 [s] from logits [s, V] (overwritten), and what rows asked for beside."""
        self.ban(logits, rows.banned)
        if plan.extras:
            self._filter(logits, rows, plan)
        return self._ops.sample(logits, rows.temperature, rows.seed, rows.position), None

    def ban(self, logits: torch.Tensor, banned: torch.Tensor) -> None:
        """Make `banned[r]` (int32 [R], -1 for none) impossible in row r, in place."""
        index = banned.clamp(min=0).long().unsqueeze(1)
        kept = logits.gather(1, index)
        logits.scatter_(1, index, kept.masked_fill(banned.unsqueeze(1) >= 0, float("-inf")))

    def _filter(self, logits: torch.Tensor, rows: SamplingRows, plan: StepPlan) -> None:
        """Apply top-k, then top-p on what is left, to the rows that ask."""
        wanted = [(row, p) for row, p in plan.extras if p.temperature > 0 and (p.top_k > 0 or p.top_p < 1.0)]
        if not wanted:
            return
        vocab = self._vocab_size
        index = torch.tensor([row for row, _ in wanted], device=self._device)
        top_k = torch.tensor([min(p.top_k or vocab, vocab) for _, p in wanted], device=self._device)
        top_p = torch.tensor([p.top_p for _, p in wanted], dtype=torch.float32, device=self._device)
        scaled = logits[index].float() / rows.temperature[index].unsqueeze(1)
        kept = top_k_top_p_mask(scaled, top_k, top_p)
        logits[index] = logits[index].masked_fill(~kept, float("-inf"))


def top_k_top_p_mask(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """bool [R, V]: the tokens that survive top-k (int64 [R]), then top-p (float32 [R]).

    Top-p keeps the smallest set of most likely tokens whose probability, after top-k, reaches p;
    the most likely token always survives. logits: float32 [R, V], already divided by temperature.
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    ordered = ordered.masked_fill(rank >= top_k.unsqueeze(1), float("-inf"))
    probs = ordered.softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    kept = (rank < top_k.unsqueeze(1)) & ((before < top_p.unsqueeze(1)) | (rank == 0))
    return torch.zeros_like(kept).scatter_(1, order, kept)
