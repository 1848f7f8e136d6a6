# SPDX-License-Identifier: Apache-2.0
"""Products with weights of 4 bits on Hopper, x in bfloat16 or float16.

Few tokens take the CUDA kernel of int4_linear.py, which reads 4 bits an element. For many, and on other GPUs
than Hopper's, the weight is written out in 16 bits first, and cuBLAS or gated_linear multiplies: reading
weights then no longer takes most of the time. From how many tokens on, and which tiles, core/tuned says, or
for shapes that it does not have the rule in tilings.py.
"""

from __future__ import annotations

import flashinfer
import torch.nn.functional as F
from torch import Tensor

from flashinfer_backend.ops import cublas, gated_linear, int4_linear, triton_int4
from flashinfer_backend.ops.tilings import choose_int4
from flashinfer_backend.ops.triton_fp8 import Norm
from flashinfer_backend.ops.weight import Weight


def product(
    x: Tensor,
    weight: Weight,
    norm: Norm | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """x @ weight.T, with what is given: x normed first; bias[N], residual[T, N] added;
    gated: silu of the first half of the columns times the second, [T, N / 2]. x[T, K] is contiguous, T > 0.
    May overwrite residual. See the format's product.
    """
    stored = weight.data, weight.scale, weight.zero
    if norm is not None:
        x = flashinfer.rmsnorm(x, *norm, enable_pdl=True)
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    tile = choose_int4(weight.role, x.shape[0], *weight.shape)
    if tile is not None and int4_linear.takes(*stored, tile):
        return int4_linear.linear(x, *stored, tile, bias, residual, gated)
    matrix = triton_int4.dequantise(*stored, x.dtype)
    if gated and gated_linear.pays(x.shape[0]) and gated_linear.takes(matrix):
        return gated_linear.gated_linear(x, matrix)
    with cublas.library(matrix, x.shape[0]):
        if gated:
            return flashinfer.silu_and_mul(F.linear(x, matrix), enable_pdl=True)
        if residual is None:
            return F.linear(x, matrix, bias)
        return cublas.add_product(residual, x, matrix, bias)
