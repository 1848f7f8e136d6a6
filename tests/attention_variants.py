# SPDX-License-Identifier: Apache-2.0
"""A variant of attention that no family here has: weights are sigmoids of scores plus the head's number
(https://arxiv.org/abs/2409.04431)."""

from __future__ import annotations

import torch
from torch import Tensor

from flashinfer_backend.attention.contract import Variant

DECLARATION = r"""
struct Sigmoid : AttentionVariantBase {
  static constexpr bool use_softmax = false;
  uint32_t qo_len, kv_len, window_left;

  template <typename Params>
  __device__ __host__ Sigmoid(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = kv_len;
  }

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    const float score = logits * float(params.sm_scale) + params.by_head[qo_head_idx];
    return math::ptx_rcp(1.f + math::ptx_exp2(-score * math::log2e));
  })

  REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale, { return output; })
};
"""


def sigmoids(scores: Tensor, keys: Tensor, queries: Tensor, by_head: Tensor) -> Tensor:
    return torch.sigmoid(scores + by_head)


SIGMOID = Variant("Sigmoid", DECLARATION, sigmoids, softmax=False)
