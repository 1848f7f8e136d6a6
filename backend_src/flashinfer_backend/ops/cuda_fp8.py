# SPDX-License-Identifier: Apache-2.0
"""Products with weights in FP8 on Hopper: x in bfloat16 is quantised as the weight's format says, then
multiplied by cuBLAS (torch._scaled_mm, a scale for each token and each row) or the Triton kernel for blocks.

No call waits for the device or depends on values there, so all of it can be captured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashinfer_backend.ops import triton_fp8
from flashinfer_backend.ops.weight import Fp8Block, Fp8Static, Weight

# The tensor cores add up without float32's last bits, as in vLLM and TensorRT-LLM.
FAST_ACCUMULATION = True


def product(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias: x[T, K] bfloat16, contiguous, T > 0 -> [T, N]. See the format's own product."""
    format = weight.format
    if isinstance(format, Fp8Block):
        result = triton_fp8.block_product(*triton_fp8.quantise_groups(x), weight.data, weight.scale)
    elif isinstance(format, Fp8Static):
        parts = [_scaled(x, weight, rows, scale) for rows, scale in format.parts(weight)]
        result = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    else:
        result = _scaled(x, weight, slice(None))
    return result if bias is None else result.add_(bias)


def _scaled(x: Tensor, weight: Weight, rows: slice, static: float | None = None) -> Tensor:
    elements, scales = triton_fp8.quantise_rows(x, static)
    return torch._scaled_mm(
        elements,
        weight.data[rows].t(),
        scale_a=scales,
        scale_b=weight.scale[rows].unsqueeze(0),
        out_dtype=torch.bfloat16,
        use_fast_accum=FAST_ACCUMULATION,
    )
