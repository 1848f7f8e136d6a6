# SPDX-License-Identifier: Apache-2.0
"""The model's operations on CUDA (bfloat16 or float16): names and signatures of ops.torch_ops.

Large batches use cuBLAS through torch and FlashInfer's norm and activation; see torch_ops for shapes.
"""

from __future__ import annotations

import flashinfer
import torch
import torch.nn.functional as F
from torch import Tensor

from flashinfer_backend.ops.triton_inputs import decode_inputs
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
    return F.linear(rms_norm(x, norm_weight, eps), weight, bias)


def linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """residual + x @ weight.T: x[T, K], weight[H, K], residual[T, H] -> [T, H]. Use the returned tensor."""
    return torch.addmm(residual, x, weight.t())


def norm_gate_up_silu(x: Tensor, norm_weight: Tensor, eps: float, gate_up: Tensor) -> Tensor:
    """silu(n @ gate.T) * (n @ up.T) with n = rms_norm(x): x[T, H], gate_up[2I, H] -> [T, I]."""
    return flashinfer.silu_and_mul(F.linear(rms_norm(x, norm_weight, eps), gate_up), enable_pdl=True)
