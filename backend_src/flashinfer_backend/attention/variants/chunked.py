# SPDX-License-Identifier: Apache-2.0
"""Attention in chunks: a token sees the tokens before it that lie in its own chunk of positions, as in
Llama 4: https://github.com/meta-llama/llama-models (models/llama4/model.py)."""

from __future__ import annotations

from torch import Tensor

from flashinfer_backend.attention.contract import Variant

# What FlashInfer gives a score that a mask leaves out is -math::inf, a finite number.
TRANSFORMS = r"""
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    const uint32_t chunk = uint32_t(params.by_head[qo_head_idx]);
    const bool seen = kv_idx / chunk == (kv_len - qo_len + qo_idx) / chunk;
    return seen ? logits * float(params.sm_scale) : -math::inf;
  })
"""


def within_chunks(scores: Tensor, keys: Tensor, queries: Tensor, by_head: Tensor) -> Tensor:
    """See Variant. by_head: how long chunks are."""
    chunk = by_head.long()
    return scores.masked_fill(keys // chunk != queries // chunk, float("-inf"))


CHUNKED = Variant("Chunked", TRANSFORMS, within_chunks)
