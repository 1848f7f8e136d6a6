# SPDX-License-Identifier: Apache-2.0
"""The model's operations on CUDA (bfloat16 or float16): names and signatures of ops.torch_ops.

Few tokens take the Triton products of triton_linear where tilings.py has an entry; beyond, the gate and up
products have a kernel of their own on Hopper. The rest is cuBLAS through torch (cublas.py chooses how) with
FlashInfer's norm and activation. Weights in FP8 are multiplied by cuda_fp8, those of 4 bits by cuda_int4,
experts by cuda_experts.
"""

from __future__ import annotations

import flashinfer
import torch
import torch.nn.functional as F
from torch import Tensor

from flashinfer_backend.ops import cublas, cuda_experts, cuda_fp8, cuda_int4, gated_linear, triton_linear
from flashinfer_backend.ops.tilings import choose
from flashinfer_backend.ops.triton_adapters import add_adapters
from flashinfer_backend.ops.triton_delta import causal_conv, delta_gates, gated_delta_rule, gated_norm
from flashinfer_backend.ops.triton_drafts import accept, draft_inputs, ngram_drafts, record_tokens
from flashinfer_backend.ops.triton_fp8 import Norm
from flashinfer_backend.ops.triton_inputs import step_inputs
from flashinfer_backend.ops.triton_rope import rope_and_store
from flashinfer_backend.ops.triton_sample import keep_allowed, sample
from flashinfer_backend.ops.weight import DENSE, Int4, Weight

__all__ = [
    "accept",
    "activate",
    "add_adapters",
    "causal_conv",
    "delta_gates",
    "draft_inputs",
    "experts_add",
    "gated_delta_rule",
    "gated_norm",
    "keep_allowed",
    "linear",
    "linear_add",
    "ngram_drafts",
    "norm_gate_up_silu",
    "norm_linear",
    "record_tokens",
    "rms_norm",
    "rope_and_store",
    "sample",
    "step_inputs",
]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension: x[T, H], weight[H] -> [T, H]."""
    return flashinfer.rmsnorm(x, weight, eps, enable_pdl=True)


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Weight,
    bias: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:
    """rms_norm(x) @ weight.T + bias: x[T, H], weight[N, H], bias[N] or None -> [T, N], in `out` when given.
    x is unchanged."""
    if weight.format is not DENSE:
        if isinstance(weight.format, Int4):
            product = cuda_int4.product(x, weight, norm_weight, eps, bias)
        else:
            product = cuda_fp8.product(x, weight, bias, norm=Norm(norm_weight, eps))
        return product if out is None else out.copy_(product)
    data = weight.data
    tiling = choose(weight.role, x.shape[0], data)
    if tiling is None:
        normed = rms_norm(x, norm_weight, eps)
        with cublas.library(data, x.shape[0]):
            if out is None:
                return F.linear(normed, data, bias)
            return (
                torch.mm(normed, data.t(), out=out)
                if bias is None
                else out.copy_(F.linear(normed, data, bias))
            )
    if tiling.fuse_norm:
        return triton_linear.linear(x, data, tiling, norm_weight, eps, bias, out=out)
    return triton_linear.linear(rms_norm(x, norm_weight, eps), data, tiling, bias=bias, out=out)


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias: x[T, K], weight[N, K], bias[N] or None -> [T, N]."""
    if isinstance(weight.format, Int4):
        return cuda_int4.product(x, weight, bias=bias)
    if weight.format is not DENSE:
        return cuda_fp8.product(x, weight, bias)
    data = weight.data
    tiling = choose(weight.role, x.shape[0], data)
    if tiling is not None:
        return triton_linear.linear(x, data, tiling, bias=bias)
    with cublas.library(data, x.shape[0]):
        return F.linear(x, data, bias)


def activate(x: Tensor, activation: str) -> Tensor:
    """x[T, 2I] -> activation(gate) * rest [T, I] with "silu" or "gelu_tanh"; with "relu2" x[T, I] ->
    max(x, 0) ** 2. See ops.torch_ops."""
    if activation == "relu2":
        return F.relu(x).square_()
    product = flashinfer.silu_and_mul if activation == "silu" else flashinfer.gelu_tanh_and_mul
    return product(x, enable_pdl=True)


def linear_add(x: Tensor, weight: Weight, residual: Tensor | None) -> Tensor:
    """residual (None: 0) + x @ weight.T: x[T, K], weight[H, K], residual[T, H] -> [T, H]. Use the returned
    tensor.

    May overwrite residual.
    """
    if isinstance(weight.format, Int4):
        return cuda_int4.product(x, weight, residual=residual)
    if weight.format is not DENSE:
        return cuda_fp8.product(x, weight, residual=residual)
    data = weight.data
    tiling = choose(weight.role, x.shape[0], data)
    if tiling is None:
        with cublas.library(data, x.shape[0]):
            return F.linear(x, data) if residual is None else residual.addmm_(x, data.t())
    return triton_linear.linear(x, data, tiling, residual=residual)


def norm_gate_up_silu(x: Tensor, norm_weight: Tensor, eps: float, gate_up: Weight) -> Tensor:
    """silu(n @ gate.T) * (n @ up.T) with n = rms_norm(x): x[T, H], gate_up[2I, H] -> [T, I]."""
    if isinstance(gate_up.format, Int4):
        return cuda_int4.product(x, gate_up, norm_weight, eps, gated=True)
    if gate_up.format is not DENSE:
        return cuda_fp8.product(x, gate_up, gated=True, norm=Norm(norm_weight, eps))
    data = gate_up.data
    tiling = choose(gate_up.role, x.shape[0], data)
    if tiling is not None and tiling.fuse_norm:
        return triton_linear.linear(x, data, tiling, norm_weight, eps, gated=True)
    normed = rms_norm(x, norm_weight, eps)
    if gated_linear.pays(x.shape[0]) and gated_linear.takes(data):
        return gated_linear.gated_linear(normed, data)
    if tiling is not None:
        return triton_linear.linear(normed, data, tiling, gated=True)
    return flashinfer.silu_and_mul(F.linear(normed, data), enable_pdl=True)


def experts_add(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    router: Weight,
    gate_up: Weight,
    down: Weight,
    experts_per_token: int,
    renormalise: bool,
    residual: Tensor | None,
    clip: tuple[float, float] | None = None,
) -> Tensor:
    """residual (None: 0) plus each token's experts of n = rms_norm(x), chosen and weighted by n @ router.T:
    x[T, H], router[E, H], gate_up[E 2I, H], down[E H, I], residual[T, H] -> [T, H]. See ops.torch_ops."""
    normed = rms_norm(x, norm_weight, eps)
    logits = cuda_experts.router_logits(normed, router)
    weights, routing = (gate_up, down), (experts_per_token, renormalise)
    return cuda_experts.weighted_sum(normed, logits, *weights, *routing, residual, clip)
