# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding: frequencies and tables."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashinfer_backend.models.spec import LinearScaling, Rope


def inv_freq(rope: Rope) -> Tensor:
    """Rotary frequencies in radians per position, [D/2] float32, with the checkpoint's scaling applied."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
    frequencies = 1.0 / (rope.theta**exponents)
    scaling = rope.scaling
    if scaling is None:
        return frequencies
    stretched = frequencies / scaling.factor
    if isinstance(scaling, LinearScaling):
        return stretched
    # Source: rope scaling of Llama 3.1, https://github.com/meta-llama/llama-models (models/llama3/model.py).
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / frequencies
    smooth = (scaling.original / wavelength - low) / (high - low)
    blended = (1 - smooth) * stretched + smooth * frequencies
    # Long goes first, as in transformers: with low above high a wavelength can be both.
    kept = torch.where(wavelength < scaling.original / high, frequencies, blended)
    return torch.where(wavelength > scaling.original / low, stretched, kept)


def cos_sin(rope: Rope, max_positions: int) -> Tensor:
    """[max_positions, D] float32: cosines in the first D/2 columns, sines in the last."""
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inv_freq(rope))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)
