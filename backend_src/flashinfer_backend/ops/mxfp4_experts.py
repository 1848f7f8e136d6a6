# SPDX-License-Identifier: Apache-2.0
"""Products of a mixture of experts in MXFP4 in Hopper kernels: one for few tokens an expert, one for many.

cuda/mxfp4_experts_kernel.cuh and cuda/mxfp4_tiles_kernel.cuh have the kernels; FlashInfer's build tools
compile both once per machine. Without a compiler, on another GPU, or with rows for which shared memory has no
room, `takes` says no and the caller uses ops.triton_experts. For how many tokens each is the fastest one, the
device's file says (core/tuned).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashinfer_backend.ops import cuda_module
from flashinfer_backend.ops.weight import Mxfp4, Weight

if TYPE_CHECKING:
    from flashinfer_backend.ops.triton_experts import Tiles

WIDEST = 3072  # columns of a weight: rows of x have room next to two stages of weights at least


def spec() -> Any:
    """FlashInfer's description of how the module is built; its name changes with the source."""
    return cuda_module.spec("mxfp4_experts", "bf16", [])


def takes(weight: Weight) -> bool:
    """Whether `product` takes this weight: in MXFP4, not wider than WIDEST, on a Hopper GPU, if the kernels
    could be built."""
    if not isinstance(weight.format, Mxfp4) or weight.shape[1] > WIDEST:
        return False
    return module(weight.data.device) is not None


def product(
    x: Tensor,
    weight: Weight,
    tiles: Tiles,
    teams: int,
    gated: bool,
    pairs_a_row: int,
    clip: tuple[float, float] | None = None,
) -> Tensor:
    """ops.triton_experts.product of x[R, K] in bfloat16 and a weight that `takes` is true for; tiles have
    as many tokens as core.tuned.TEAMS names. teams: of a block of threads, as there; of 8 warps each with
    tiles of 16."""
    tokens, chosen = tiles.weights.shape
    rows = len(weight.data) // tiles.of_experts // (2 if gated else 1)
    out = torch.empty(tokens * chosen, rows, dtype=torch.bfloat16, device=x.device)
    alpha, limit = clip or (1.0, 0.0)
    module(x.device).mxfp4_experts(
        out, x, weight.data, weight.scale, weight.bias, None if gated else tiles.weights, tiles.experts,
        tiles.filled, tiles.order, gated, pairs_a_row, alpha, limit, teams,
    )  # fmt: skip
    return out


@functools.cache
def module(place: torch.device) -> Any:
    """The compiled module, or None where there is none."""
    return cuda_module.load(
        lambda: spec().build_and_load(), place, "products of experts in MXFP4 use Triton's kernels"
    )
