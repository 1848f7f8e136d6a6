# SPDX-License-Identifier: Apache-2.0
"""Top-k, top-p and min-p. All are thresholds: tokens as likely as the last one kept are kept too."""

from __future__ import annotations

import torch
from torch import Tensor


def top_k_top_p_mask(logits: Tensor, top_k: Tensor, top_p: Tensor, limited: bool = True) -> Tensor:
    """bool [R, V]: the tokens that survive top-k (int32 [R], 1..V), then top-p (float32 [R], (0, 1]).

    Top-p keeps the smallest set of most likely tokens whose probability, after top-k, reaches p; 1
    keeps all. Ties at either threshold survive together, so the order of the vocabulary plays no role.
    logits: float32 [R, V], already divided by the temperature; -inf is allowed. limited: whether any top_k is
    less than V.
    """
    if logits.is_cuda:
        return _cuda_mask(logits, top_k if limited else None, top_p)
    return sorted_mask(logits, top_k, top_p)


def sorted_mask(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The definition of top_k_top_p_mask, for any device."""
    ordered = logits.sort(dim=-1, descending=True).values
    kth = ordered.gather(1, top_k.long().unsqueeze(1) - 1)
    probs = ordered.masked_fill(ordered < kth, float("-inf")).softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs  # of all likelier tokens; grows along the row, from 0
    p = top_p.unsqueeze(1)
    count = (before < p).sum(dim=-1, keepdim=True).clamp(min=1)  # 0 where nothing can be chosen: NaN
    lowest = torch.where(p >= 1.0, kth, ordered.gather(1, count - 1).maximum(kth))
    return logits >= lowest


def _cuda_mask(logits: Tensor, top_k: Tensor | None, top_p: Tensor) -> Tensor:
    """Radix selection (https://flashinfer.ai/2025/03/10/sampling.html) instead of a sort."""
    from flashinfer.sampling import top_k_mask_logits, top_p_renorm_probs

    if top_k is not None:
        logits = top_k_mask_logits(logits.contiguous(), top_k)
    kept = logits > float("-inf")
    # Without is_deterministic the threshold depends on the order of additions, and a seed with it.
    probs = top_p_renorm_probs(logits.softmax(dim=-1), top_p.clamp(max=1 - 2**-20), is_deterministic=True)
    return torch.where(top_p.unsqueeze(1) >= 1.0, kept, probs > 0)


def min_p_mask(logits: Tensor, min_p: Tensor) -> Tensor:
    """bool [R, V]: tokens at least min_p (float32 [R], 0..1) times as likely as the likeliest
    (https://arxiv.org/abs/2407.01082). logits: float32 [R, V], divided by the temperature."""
    return logits >= logits.amax(dim=-1, keepdim=True) + min_p.log().unsqueeze(1)
