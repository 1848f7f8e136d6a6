# SPDX-License-Identifier: Apache-2.0
"""Weights in MXFP4: numbers of 4 bits (e2m1), of which 32 neighbours of a row share a power of two (e8m0), in
plain torch. https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf

Packed here: a matrix [N, K] is uint8 [N, K / 2], with K rounded up to a multiple of 64, of each 64 columns 16
words of 16 bits. Word j holds the columns j, j + 16, j + 32 and j + 48. So a kernel gets neighbouring columns
from neighbouring words, and reads x in runs of 32 bytes, the least that L2 gives. The bits of the first
column lie where bfloat16 has its sign and the lowest bits of its exponent; those of the second and third get
there by one shift left, and those of the fourth by three shifts. A kernel unpacks the first three columns
with five instructions. It would need 17 if each code's four bits lay side by side.

    bit      15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
    column    0  3  3  1  3  3  2  0  0  0  1  1  1  2  2  2    of the four of a word
    code's    3  3  2  3  1  0  3  2  1  0  2  1  0  2  1  0    bit, 3 is the sign

Scales are uint8 [N, K / 32], of 2 ** (scale - 127).
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32
PACKED = 64  # columns that are packed together
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the lowest 3 bits; the fourth is the sign
_BOUNDS = tuple((low + high) / 2 for low, high in itertools.pairwise(VALUES))
_EXPONENT = 2  # the exponent of 6.0 and 4.0
BIAS = 127
LARGEST = 128  # scale, of 2: times 2 ** 126, by which kernels multiply, it is bfloat16's largest power of two
ALIGNED = 16  # bytes, at which a row's scales begin in memory, so that kernels can copy them ahead


def pack(codes: Tensor) -> Tensor:
    """uint8 [N, K] of 0..15 -> uint8 [N, K / 2], K rounded up to a multiple of PACKED, with zeros."""
    codes = F.pad(codes, (0, -codes.shape[1] % PACKED))
    first, second, third, fourth = codes.unflatten(1, (-1, 4, PACKED // 4)).to(torch.int16).unbind(2)
    words = (fourth & 8) << 11 | (fourth & 4) << 11 | (fourth & 3) << 10
    for code, shift in ((first, 0), (second, 3), (third, 6)):
        words |= (code & 8) << (12 - shift) | (code & 7) << (6 - shift)
    return words.flatten(1).view(torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """pack's inverse, of K rounded up."""
    words = packed.contiguous().view(torch.int16).unflatten(1, (-1, PACKED // 4))
    codes = [words >> (12 - shift) & 8 | words >> (6 - shift) & 7 for shift in (0, 3, 6)]
    codes.append(words >> 11 & 12 | words >> 10 & 3)
    return torch.stack(codes, dim=2).flatten(1).to(torch.uint8)


def neighbours(blocks: Tensor) -> Tensor:
    """Checkpoints' bytes [N, G, 16], of columns 2j and 2j + 1 -> codes [N, 32 G]."""
    return torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1)


def dequantise(packed: Tensor, scale: Tensor) -> Tensor:
    """float32 [N, K] of packed uint8 [N, K / 2], as pack makes it, and scale uint8 [N, K / 32]."""
    values = torch.tensor([*VALUES, *(-value for value in VALUES)], device=packed.device)
    exponents = scale.int() - BIAS
    codes = unpack(packed)[:, : GROUP * scale.shape[1]].int()
    return torch.ldexp(values[codes].unflatten(1, (-1, GROUP)), exponents[..., None]).flatten(1)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x[N, K] -> packed uint8 [N, K / 2] as pack makes it, scale uint8 [N, K / 32], by each group's largest
    magnitude."""
    groups = x.float().unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(-1).clamp(min=2.0**-100)
    exponents = largest.log2().floor() - _EXPONENT
    scaled = torch.ldexp(groups, -exponents[..., None])
    codes = torch.bucketize(scaled.abs(), torch.tensor(_BOUNDS, device=x.device)) | (scaled < 0).int() << 3
    return pack(codes.to(torch.uint8).flatten(1)), (exponents + BIAS).to(torch.uint8)
