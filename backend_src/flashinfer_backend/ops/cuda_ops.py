# SPDX-License-Identifier: Apache-2.0
"""The model's operations on CUDA (bfloat16 or float16): names and signatures of ops.torch_ops.

Few tokens take the Triton products of triton_linear where tilings.py has an entry; beyond, the gate and up
products have a kernel of their own on Hopper. The rest is cuBLAS through torch (cublas.py chooses how) with
FlashInfer's norm and activation. Weights in FP8 are multiplied by cuda_fp8, those of 4 bits by cuda_int4,
experts by cuda_experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import flashinfer
import torch
import torch.nn.functional as F
from torch import Tensor

from flashinfer_backend.ops import cublas, cuda_fp8, cuda_int4, gated_linear, triton_fp8, triton_linear
from flashinfer_backend.ops.cuda_experts import experts_add, router_logits
from flashinfer_backend.ops.tilings import choose, choose_adapted
from flashinfer_backend.ops.torch_delta import count_held
from flashinfer_backend.ops.torch_ops import activate as activate_in_torch
from flashinfer_backend.ops.torch_ops import embedded_down
from flashinfer_backend.ops.triton_adapters import expand, group_adapters, shrink
from flashinfer_backend.ops.triton_delta import MOST_PENDING, delta_net
from flashinfer_backend.ops.triton_drafts import (
    accept,
    draft_inputs,
    likeliest,
    ngram_drafts,
    norms_side_by_side,
    note_tokens,
    noted_inputs,
    places_ahead,
    record_tokens,
)
from flashinfer_backend.ops.triton_fp8 import Norm, Quantised
from flashinfer_backend.ops.triton_gate import gated_by
from flashinfer_backend.ops.triton_inputs import step_inputs
from flashinfer_backend.ops.triton_logits import copy_rows, penalise
from flashinfer_backend.ops.triton_rope import rope_and_store
from flashinfer_backend.ops.triton_sample import keep_allowed, sample
from flashinfer_backend.ops.weight import DENSE, Added, Chosen, Fp8Block, Fp8Static, Int4, LowRank, Weight


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension: x[T, H], weight[H] -> [T, H]."""
    # Where no prompt ends in a step, no row is wanted: FlashInfer would launch nothing, which CUDA refuses.
    return flashinfer.rmsnorm(x, weight, eps, enable_pdl=True) if len(x) else torch.empty_like(x)


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Weight,
    bias: Tensor | None,
    out: Tensor | None = None,
    chosen: Chosen | None = None,
) -> Tensor:
    """linear() of rms_norm(x), in `out` when given. x is unchanged."""
    return _product(x, weight, Norm(norm_weight, eps), bias, chosen=chosen, out=out)


def norm_linears(
    x: Tensor, norm_weight: Tensor, eps: float, weights: Sequence[Weight], chosen: Chosen | None = None
) -> list[Tensor]:
    """linear() of rms_norm(x) with each of the weights."""
    if all(_begins_with_norm(weight, len(x)) for weight in weights):
        return [norm_linear(x, norm_weight, eps, weight, None, chosen=chosen) for weight in weights]
    normed, quantised = norm_quantised(x, norm_weight, eps, weights)
    return [_product(normed, weight, chosen=chosen, quantised=quantised) for weight in weights]


def norm_quantised(
    x: Tensor, norm_weight: Tensor, eps: float, weights: Sequence[Weight]
) -> tuple[Tensor, Quantised | None]:
    """rms_norm(x) of contiguous x; where one of the weights is of FP8 blocks, also that quantised for it."""
    if not len(x) or not any(isinstance(weight.format, Fp8Block) for weight in weights):
        return rms_norm(x, norm_weight, eps), None
    normed = torch.empty_like(x)
    return normed, triton_fp8.quantise_groups(x, Norm(norm_weight, eps), normed)


def for_drafts(weight: Weight) -> Weight | None:
    """A copy for products that only guess, which reads half as much: of a weight in bfloat16 in e4m3, with a
    scale for each row. None where it would not."""
    rows, inner = weight.data.shape
    if weight.format is not DENSE or weight.data.dtype != torch.bfloat16 or rows % 16 or inner % 16:
        return None
    copy = Weight.empty(weight.role, (rows, inner), "fp8_token", weight.data.dtype, weight.data.device)
    copy.bias = weight.bias
    copy.format.fill(copy, weight.data)
    return copy


def _begins_with_norm(weight: Weight, tokens: int) -> bool:
    """Whether a norm of x is part of the product's kernel."""
    if isinstance(weight.format, Int4 | Fp8Static):
        return False
    tiling = choose(weight.role, tokens, weight.data, isinstance(weight.format, Fp8Block))
    return tiling is not None and (tiling.fuse_norm if weight.format is DENSE else tiling.quantise)


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None, chosen: Chosen | None = None) -> Tensor:
    """x @ weight.T + bias: x[T, K], weight[N, K], bias[N] or None -> [T, N]; with what the tokens' adapters
    add, where the weight has some."""
    return _product(x, weight, bias=bias, chosen=chosen)


def linear_add(
    x: Tensor,
    weight: Weight,
    residual: Tensor | None,
    chosen: Chosen | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """residual (None: 0) + linear(x): x[T, K], weight[H, K], residual[T, H], bias[H] -> [T, H]. Use the
    returned tensor.

    May overwrite residual.
    """
    return _product(x, weight, bias=bias, residual=residual, chosen=chosen)


def norm_gate_up_silu(
    x: Tensor, norm_weight: Tensor, eps: float, gate_up: Weight, chosen: Chosen | None = None
) -> Tensor:
    """silu(gate) * up of norm_linear(x), whose columns are both: x[T, H], gate_up[2I, H] -> [T, I]."""
    return _product(x, gate_up, Norm(norm_weight, eps), gated=True, chosen=chosen)


def mlp_add(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    gate_up: Weight,
    down: Weight,
    residual: Tensor | None,
    chosen: Chosen | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """linear_add() of norm_gate_up_silu(x): gate_up[2I, H], down[H, I], x, residual and result [T, H]."""
    adapted = chosen is not None and (gate_up.adapters is not None or down.adapters is not None)
    if len(x) and not adapted:
        added = cuda_fp8.mlp(x, gate_up, down, Norm(norm_weight, eps), bias, residual)
        if added is not None:
            return added
    inner = norm_gate_up_silu(x, norm_weight, eps, gate_up, chosen)
    return linear_add(inner, down, residual, chosen, bias)


def _product(
    x: Tensor,
    weight: Weight,
    norm: Norm | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    chosen: Chosen | None = None,
    out: Tensor | None = None,
    quantised: Quantised | None = None,
) -> Tensor:
    """x @ weight.T, with what is given: x normed first; a bias, a residual, which may be overwritten, and
    what the tokens' adapters add; gated: silu of the first half of the columns times the second. quantised:
    x, of norm_quantised; weights of FP8 blocks alone use it."""
    low = None if chosen is None else weight.adapters
    if low is not None and chosen is not None and not _part_of_product(weight, len(x), low):
        x = x if norm is None else rms_norm(x, *norm)
        added = shrink(x, low, chosen)
        product = expand(_product(x, weight, bias=bias, residual=residual, quantised=quantised), added)
        product = activate(product, "silu") if gated else product
    elif isinstance(weight.format, Int4):
        product = cuda_int4.product(x, weight, norm, bias, residual, gated)
    elif weight.format is not DENSE:
        product = cuda_fp8.product(x, weight, bias, residual, gated, norm, quantised)
    else:
        adapters = None if low is None or chosen is None else (low, chosen)
        return _dense(x, weight, norm, bias, residual, gated, adapters, out)
    return product if out is None else out.copy_(product)


def _part_of_product(weight: Weight, tokens: int, low: LowRank) -> bool:
    """Whether the kernel of the product adds what adapters do."""
    if weight.format is not DENSE:
        return False
    tiling = choose_adapted(weight.role, tokens, weight.data)
    return tiling is not None and triton_linear.takes_adapters(tiling, low)


def _dense(
    x: Tensor,
    weight: Weight,
    norm: Norm | None,
    bias: Tensor | None,
    residual: Tensor | None,
    gated: bool,
    adapters: tuple[LowRank, Chosen] | None,
    out: Tensor | None,
) -> Tensor:
    """_product with a weight in 16 bits; adapters that it has are part of the kernel."""
    data = weight.data
    tiling = (choose if adapters is None else choose_adapted)(weight.role, len(x), data)
    fused = norm if tiling is not None and tiling.fuse_norm else None
    if norm is not None and fused is None:
        x = rms_norm(x, *norm)
        if gated and adapters is None and gated_linear.pays(len(x)) and gated_linear.takes(data):
            return gated_linear.gated_linear(x, data)
    if tiling is not None:
        norm_weight, eps = (None, 0.0) if fused is None else fused
        around = norm_weight, eps, bias, residual, gated, out
        return triton_linear.linear(x, data, tiling, *around, adapters=adapters)
    if gated:
        return flashinfer.silu_and_mul(F.linear(x, data), enable_pdl=True)
    with cublas.library(data, len(x)):
        if residual is not None:
            return cublas.add_product(residual, x, data, bias)
        if out is None:
            return F.linear(x, data, bias)
        return torch.mm(x, data.t(), out=out) if bias is None else out.copy_(F.linear(x, data, bias))


def add_embedded(hidden: Tensor, ids: Tensor, low: LowRank, chosen: Chosen) -> Tensor:
    """See ops.torch_ops.add_embedded."""
    inner = embedded_down(ids, low, chosen).float()
    return expand(hidden, Added(inner.view(1, len(ids), 1, -1), low, chosen))


def activate(x: Tensor, activation: str, numbers: Tensor | None = None) -> Tensor:
    """See ops.torch_ops.activate, which computes those without a gate."""
    if activation not in ("silu", "gelu_tanh"):
        return activate_in_torch(x, activation, numbers)
    product = flashinfer.silu_and_mul if activation == "silu" else flashinfer.gelu_tanh_and_mul
    return product(x, enable_pdl=True)


def overwrites_residual(weight: Weight, tokens: int) -> bool:
    """See ops.torch_ops.overwrites_residual."""
    if isinstance(weight.format, Int4):
        return True  # where it is written out in 16 bits
    return weight.format is DENSE and choose(weight.role, tokens, weight.data) is None
