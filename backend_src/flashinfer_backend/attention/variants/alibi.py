# SPDX-License-Identifier: Apache-2.0
"""Attention with linear biases: a score falls by the head's slope for each token between query and key, in
place of an embedding of positions: https://arxiv.org/abs/2108.12409."""

from __future__ import annotations

from torch import Tensor

from flashinfer_backend.attention.contract import Variant

DECLARATION = r"""
struct Alibi : AttentionVariantBase {
  static constexpr bool use_softmax = true;
  uint32_t qo_len, kv_len, window_left;
  float sm_scale_log2;

  template <typename Params>
  __device__ __host__ Alibi(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = kv_len;
    sm_scale_log2 = math::log2e;
  }

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    const int distance = int(kv_idx) - int(kv_len - qo_len + qo_idx);
    return logits * float(params.sm_scale) + params.by_head[qo_head_idx] * float(distance);
  })
};
"""


def biased(scores: Tensor, keys: Tensor, queries: Tensor, by_head: Tensor) -> Tensor:
    """See Variant. by_head: slopes."""
    return scores + by_head * (keys - queries)


ALIBI = Variant("Alibi", DECLARATION, biased)
