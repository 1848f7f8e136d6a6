# SPDX-License-Identifier: Apache-2.0
"""Attention with linear biases: a score falls by the head's slope for each token between query and key, in
place of an embedding of positions: https://arxiv.org/abs/2108.12409."""

from __future__ import annotations

from torch import Tensor

from flashinfer_backend.attention.contract import Variant

TRANSFORMS = r"""
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    const int distance = int(kv_idx) - int(kv_len - qo_len + qo_idx);
    return logits * float(params.sm_scale) + params.by_head[qo_head_idx] * float(distance);
  })
"""


def biased(scores: Tensor, keys: Tensor, queries: Tensor, by_head: Tensor) -> Tensor:
    """See Variant. by_head: slopes."""
    return scores + by_head * (keys - queries)


ALIBI = Variant("Alibi", TRANSFORMS, biased)
