# SPDX-License-Identifier: Apache-2.0
"""Decode rows of gated delta net layers in one Hopper kernel, which reads their states as fast as it can, or
in another one where they can have drafts.

cuda/delta_rows_kernel.cuh and cuda/drafted_rows_kernel.cuh have the kernels; FlashInfer's build tools compile
both once per machine. They are for Qwen3-Next's and Qwen3.5's sizes (`SIZES`). For others, without a
compiler, and on another GPU, triton_delta has a kernel of its own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from flashinfer_backend.ops import cuda_module
from flashinfer_backend.ops.torch_delta import DeltaRows, DeltaStates, DeltaWeights

SIZES = 128, 128, 4  # of a head's keys and values; inputs of a convolution
PENDING = 8  # tokens
MOST = 8  # tokens of a row with drafts


def spec() -> Any:
    """FlashInfer's description of how the module is built; its name changes with the source."""
    return cuda_module.spec("delta_rows", "16_bits", [])


def takes(weights: DeltaWeights, states: DeltaStates) -> bool:
    """Whether the kernel is for rows of these, and could be built."""
    recurrent, inputs, pending = states
    fits = _most(states) <= MOST if pending is None else pending.decays.shape[-1] == PENDING
    fits = fits and (*recurrent.shape[2:], weights.conv.shape[1]) == SIZES
    fits = fits and weights.a_log.dtype == weights.dt_bias.dtype == torch.float32
    fits = fits and weights.conv.dtype == weights.norm.dtype == inputs.dtype != torch.float32
    return fits and module(recurrent.device) is not None


def delta_rows(
    parts: tuple[Tensor, Tensor, Tensor, Tensor],
    weights: DeltaWeights,
    states: DeltaStates,
    rows: DeltaRows,
    out: Tensor,
) -> None:
    """ops.torch_delta.delta_net of the first `rows.decodes` rows, whose outputs are written to out[T, Hv Dv].
    parts: qkv, z, a, b. `takes` must be true. Padded: the rows without tokens come last of them."""
    own, short = module(out.device), out.dtype == torch.bfloat16
    given = (*weights[:4], weights.eps, *states[:2])
    if states.pending is None:
        drafted = own.drafted_rows_bf16 if short else own.drafted_rows_f16
        drafted(out, *parts, *given, *rows[:4], rows.decodes, _most(states))
        return
    call = own.delta_rows_bf16 if short else own.delta_rows_f16
    starts = rows.starts if rows.padded else None
    call(out, *parts, *given, *states.pending, rows.slots, starts, rows.first, rows.decodes)


def _most(states: DeltaStates) -> int:
    """Tokens that a row with drafts has at most, as torch_delta.inputs_kept counts inputs."""
    return (states.inputs.shape[1] - SIZES[2] + 1) // 2


@functools.cache
def module(place: torch.device) -> Any:
    """The compiled module, or None where there is none."""
    return cuda_module.load(
        lambda: spec().build_and_load(), place, "decode rows of delta nets use a Triton kernel"
    )
