# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding: frequencies and tables."""

import math

import torch
from torch import Tensor

from flashinfer_backend.models.spec import LinearScaling, Llama3Scaling, LongScaling, Rope, YarnScaling

AHEAD = 15  # positions behind the last one of a sequence, which drafts by a head can have


def inv_freq(rope: Rope, max_positions: int = 0) -> Tensor:
    """Rotary frequencies in radians per position, [dim/2] float32, with the checkpoint's scaling applied.
    max_positions: of the longest sequence, by which LongScaling chooses its factors."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
    frequencies = 1.0 / (rope.theta**exponents)
    scaling = rope.scaling
    if scaling is None:
        return frequencies
    if isinstance(scaling, LongScaling):
        factors = scaling.long if max_positions > scaling.original else scaling.short
        return 1.0 / (torch.tensor(factors) * rope.theta**exponents)
    stretched = frequencies / scaling.factor
    if isinstance(scaling, LinearScaling):
        return stretched
    if isinstance(scaling, YarnScaling):
        kept = 1 - _ramp(rope, scaling)
        return stretched * (1 - kept) + frequencies * kept
    return _llama3(frequencies, stretched, scaling)


def _llama3(frequencies: Tensor, stretched: Tensor, scaling: Llama3Scaling) -> Tensor:
    # Source: rope scaling of Llama 3.1, https://github.com/meta-llama/llama-models (models/llama3/model.py).
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / frequencies
    smooth = (scaling.original / wavelength - low) / (high - low)
    blended = (1 - smooth) * stretched + smooth * frequencies
    # Long takes precedence, as in transformers: with low above high a wavelength can be both.
    kept = torch.where(wavelength < scaling.original / high, frequencies, blended)
    return torch.where(wavelength > scaling.original / low, stretched, kept)


def _ramp(rope: Rope, scaling: YarnScaling) -> Tensor:
    """From 0 for frequencies that are kept to 1 for those that are stretched."""

    def dimension(turns: float) -> float:
        return rope.dim * math.log(scaling.original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(scaling.fast), dimension(scaling.slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    return ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)


def cos_sin(rope: Rope | None, max_positions: int) -> Tensor:
    """[max_positions + AHEAD, rope.dim] float32: cosines in the first half of the columns, sines in the last;
    without a rope no columns."""
    rows = max_positions + AHEAD
    if rope is None:
        return torch.empty(rows, 0)
    angles = torch.outer(torch.arange(rows, dtype=torch.float32), inv_freq(rope, max_positions))
    magnitude = getattr(rope.scaling, "magnitude", 1.0)
    return torch.cat((angles.cos() * magnitude, angles.sin() * magnitude), dim=-1)


def query_scales(beta: float, every: int, ahead: int, max_positions: int) -> Tensor:
    """[max_positions] float32: what rotated queries are multiplied by, 1 + beta * log(1 + n) at the positions
    from n * every - ahead on. As in Llama 4, https://github.com/meta-llama/llama-models
    (models/llama4/model.py)."""
    positions = torch.arange(ahead, ahead + max_positions, dtype=torch.float32)
    return 1 + beta * (1 + positions.div(every).floor()).log()
