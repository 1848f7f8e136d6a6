# SPDX-License-Identifier: Apache-2.0
"""The model's operations on CUDA (bfloat16 or float16): names and signatures of ops.torch_ops.

Few tokens take the Triton products of triton_linear where tilings.py has an entry; beyond, the gate and up
products have a kernel of their own on Hopper. The rest is cuBLAS through torch (cublas.py chooses how) with
FlashInfer's norm and activation.
"""

from __future__ import annotations

import flashinfer
import torch.nn.functional as F
from torch import Tensor

from flashinfer_backend.ops import cublas, gated_linear
from flashinfer_backend.ops.tilings import Product, choose
from flashinfer_backend.ops.triton_inputs import decode_inputs
from flashinfer_backend.ops.triton_linear import linear
from flashinfer_backend.ops.triton_rope import rope_and_store
from flashinfer_backend.ops.triton_sample import sample

__all__ = [
    "decode_inputs",
    "linear_add",
    "norm_gate_up_silu",
    "norm_linear",
    "rms_norm",
    "rope_and_store",
    "sample",
]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension: x[T, H], weight[H] -> [T, H]."""
    return flashinfer.rmsnorm(x, weight, eps, enable_pdl=True)


def norm_linear(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """rms_norm(x) @ weight.T + bias: x[T, H], weight[N, H], bias[N] or None -> [T, N]. x is unchanged."""
    product: Product = "wide" if weight.shape[0] < 32768 else "output"
    tiling = choose(product, x.shape[0], weight)
    if tiling is None:
        normed = rms_norm(x, norm_weight, eps)
        with cublas.library(weight, x.shape[0]):
            return F.linear(normed, weight, bias)
    if tiling.fuse_norm:
        return linear(x, weight, tiling, norm_weight, eps, bias)
    return linear(rms_norm(x, norm_weight, eps), weight, tiling, bias=bias)


def linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """residual + x @ weight.T: x[T, K], weight[H, K], residual[T, H] -> [T, H]. Use the returned tensor.

    May overwrite residual.
    """
    tiling = choose("long" if weight.shape[1] >= 2 * weight.shape[0] else "square", x.shape[0], weight)
    if tiling is None:
        with cublas.library(weight, x.shape[0]):
            return residual.addmm_(x, weight.t())
    return linear(x, weight, tiling, residual=residual)


def norm_gate_up_silu(x: Tensor, norm_weight: Tensor, eps: float, gate_up: Tensor) -> Tensor:
    """silu(n @ gate.T) * (n @ up.T) with n = rms_norm(x): x[T, H], gate_up[2I, H] -> [T, I]."""
    tiling = choose("gate_up", x.shape[0], gate_up)
    if tiling is not None and tiling.fuse_norm:
        return linear(x, gate_up, tiling, norm_weight, eps, gated=True)
    normed = rms_norm(x, norm_weight, eps)
    if x.shape[0] >= gated_linear.FEWEST_TOKENS and gated_linear.takes(gate_up):
        return gated_linear.gated_linear(normed, gate_up)
    if tiling is not None:
        return linear(normed, gate_up, tiling, gated=True)
    return flashinfer.silu_and_mul(F.linear(normed, gate_up), enable_pdl=True)
