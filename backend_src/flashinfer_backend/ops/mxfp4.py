# SPDX-License-Identifier: Apache-2.0
"""Weights in MXFP4: numbers of 4 bits (e2m1), of which 32 neighbours of a row share a power of two (e8m0), in
plain torch. https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf

Packed here: a matrix [N, K] is uint8 [N, K / 2], of each group of 32 columns 8 words of 16 bits. Word j holds
the columns j, j + 8, j + 16 and j + 24, the first in its lowest 4 bits. So a kernel gets neighbouring columns
from neighbouring words, by one shift. Scales are uint8 [N, K / 32], of 2 ** (scale - 127).
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

GROUP = 32
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the lowest 3 bits; the fourth is the sign
_BOUNDS = tuple((low + high) / 2 for low, high in itertools.pairwise(VALUES))
_EXPONENT = 2  # the exponent of 6.0 and 4.0
BIAS = 127
LARGEST = 128  # scale, of 2: times 2 ** 126, by which kernels multiply, it is bfloat16's largest power of two
ALIGNED = 16  # bytes, at which a row's scales begin in memory, so that kernels can copy them ahead


def pack(codes: Tensor) -> Tensor:
    """uint8 [N, K] of 0..15 -> uint8 [N, K / 2]."""
    first, second, third, fourth = codes.unflatten(1, (-1, 4, GROUP // 4)).unbind(2)
    return torch.stack((first | second << 4, third | fourth << 4), dim=-1).flatten(1)


def unpack(packed: Tensor) -> Tensor:
    """pack's inverse."""
    low, high = packed.unflatten(1, (-1, GROUP // 4, 2)).unbind(-1)
    return torch.stack((low & 15, low >> 4, high & 15, high >> 4), dim=2).flatten(1)


def neighbours(blocks: Tensor) -> Tensor:
    """Checkpoints' bytes [N, G, 16], of columns 2j and 2j + 1 -> codes [N, 32 G]."""
    return torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1)


def dequantise(packed: Tensor, scale: Tensor) -> Tensor:
    """float32 [N, K] of packed uint8 [N, K / 2] and scale uint8 [N, K / 32]."""
    values = torch.tensor([*VALUES, *(-value for value in VALUES)], device=packed.device)
    exponents = scale.int() - BIAS
    return torch.ldexp(values[unpack(packed).int()].unflatten(1, (-1, GROUP)), exponents[..., None]).flatten(
        1
    )


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x[N, K] -> packed uint8 [N, K / 2], scale uint8 [N, K / 32], by each group's largest magnitude."""
    groups = x.float().unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(-1).clamp(min=2.0**-100)
    exponents = largest.log2().floor() - _EXPONENT
    scaled = torch.ldexp(groups, -exponents[..., None])
    codes = torch.bucketize(scaled.abs(), torch.tensor(_BOUNDS, device=x.device)) | (scaled < 0).int() << 3
    return pack(codes.to(torch.uint8).flatten(1)), (exponents + BIAS).to(torch.uint8)
