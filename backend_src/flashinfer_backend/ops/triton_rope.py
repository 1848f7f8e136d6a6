# SPDX-License-Identifier: Apache-2.0
"""Triton kernel: optional per-head norm, rotary embedding, and K and V stored in the cache, as they are or as
e4m3."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashinfer_backend.ops.fp8 import E4M3
from flashinfer_backend.ops.triton_fp8 import to_e4m3


@triton.jit
def _norm_scale(first, second, eps, HEAD_DIM: tl.constexpr):
    square = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    return tl.rsqrt(square / HEAD_DIM + eps)[:, None]


@triton.jit
def _normed(values, scale, weight, offsets, mask, dtype):
    # The normalised value is rounded before the weight, and after it, as in ops.torch_ops.rms_norm.
    own = tl.load(weight + offsets, mask=mask, other=0.0)[None, :]
    return ((values * scale).to(dtype) * own).to(tl.float32)


@triton.jit
def _turned(
    values, heads, weight, scale, angles, offsets, mask, dtype, ROTATED: tl.constexpr, NORM: tl.constexpr
):
    # Values of heads at `offsets`, of which the first ROTATED are turned with those half as many behind or
    # before them. heads: where each begins.
    PAIR: tl.constexpr = ROTATED // 2
    leads, turns = offsets < PAIR, mask & (offsets < ROTATED)
    partner = tl.where(leads, offsets + PAIR, offsets - PAIR)
    column = tl.where(leads, offsets, offsets - PAIR)
    other = tl.load(heads + partner[None, :], mask=turns[None, :], other=0.0).to(tl.float32)
    if NORM:
        other = _normed(other, scale, weight, partner, turns, dtype)
    cos = tl.load(angles + column, mask=turns, other=1.0)[None, :]
    sin = tl.load(angles + PAIR + column, mask=turns, other=0.0)[None, :]
    return values * cos + tl.where(leads[None, :], -other, other) * sin


@triton.jit
def _store(target, first, second, scale, mask, HALF: tl.constexpr):
    if scale is not None:
        first = to_e4m3(first.to(tl.float32), scale, True)
        second = to_e4m3(second.to(tl.float32), scale, True)
    tl.store(target, first, mask=mask)
    tl.store(target + HALF, second, mask=mask)


# Positions are a part of the step's upload: their alignment depends on what comes before them.
@triton.jit(do_not_specialize_on_alignment=["positions", "cache_locations"])
def _rope_and_store(
    qkv, positions, cos_sin, k_cache, v_cache, cache_locations, q_norm, k_norm, q_out, k_scale, v_scale, eps,
    row_stride,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTATED: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, NORM_ROTATED: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = HEAD_DIM // 2
    EARLY: tl.constexpr = NORM and not NORM_ROTATED
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS
    offsets = tl.arange(0, BLOCK)
    mask = offsets < HALF
    heads = tl.arange(0, HEADS)
    position = tl.load(positions + token).to(tl.int64)
    location = tl.load(cache_locations + token).to(tl.int64)
    angles = cos_sin + position * ROTATED
    if ROTATED == HEAD_DIM:
        cos = tl.load(angles + offsets, mask=mask, other=0.0)[None, :]
        sin = tl.load(angles + HALF + offsets, mask=mask, other=0.0)[None, :]
    gdc_launch_dependents()
    gdc_wait()
    begin = qkv + token * row_stride + (head + heads)[:, None] * HEAD_DIM
    source = begin + offsets[None, :]
    first = tl.load(source, mask=mask[None, :], other=0.0)
    second = tl.load(source + HALF, mask=mask[None, :], other=0.0)
    # HEADS divides both head counts, so a program is all Q, all K or all V.
    if head < Q_HEADS + KV_HEADS:
        dtype = first.dtype
        wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
        weight, scale = q_norm, None
        if NORM:
            weight = q_norm if head < Q_HEADS else k_norm
        if EARLY:
            scale = _norm_scale(wide_first, wide_second, eps, HEAD_DIM)
            wide_first = _normed(wide_first, scale, weight, offsets, mask, dtype)
            wide_second = _normed(wide_second, scale, weight, HALF + offsets, mask, dtype)
        if ROTATED == HEAD_DIM:
            first = (wide_first * cos - wide_second * sin).to(dtype)
            second = (wide_second * cos + wide_first * sin).to(dtype)
        else:
            if ROTATED > 0:
                wide_first = _turned(
                    wide_first, begin, weight, scale, angles, offsets, mask, dtype, ROTATED, EARLY
                )
            if ROTATED > HALF:
                wide_second = _turned(
                    wide_second, begin, weight, scale, angles, HALF + offsets, mask, dtype, ROTATED, EARLY
                )
            first, second = wide_first.to(dtype), wide_second.to(dtype)
        if NORM and NORM_ROTATED:
            wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
            scale = _norm_scale(wide_first, wide_second, eps, HEAD_DIM)
            first = _normed(wide_first, scale, weight, offsets, mask, dtype).to(dtype)
            second = _normed(wide_second, scale, weight, HALF + offsets, mask, dtype).to(dtype)
    place = (head + heads)[:, None] * HEAD_DIM + offsets[None, :]
    q_place = token * (Q_HEADS * HEAD_DIM) + place
    k_place = location * (KV_HEADS * HEAD_DIM) + place - Q_HEADS * HEAD_DIM
    if head < Q_HEADS:
        _store(q_out + q_place, first, second, None, mask[None, :], HALF)
    elif head < Q_HEADS + KV_HEADS:
        _store(k_cache + k_place, first, second, k_scale, mask[None, :], HALF)
    else:
        _store(v_cache + k_place - KV_HEADS * HEAD_DIM, first, second, v_scale, mask[None, :], HALF)


def rope_and_store(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_locations: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    out: Tensor | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
    norm_rotated: bool = False,
) -> Tensor:
    """See ops.torch_ops.rope_and_store. One launch; q_norm and k_norm are both given or both None. Rows of
    qkv are contiguous. Caches are of qkv's dtype or of e4m3."""
    tokens, head_dim = qkv.shape[0], k_cache.shape[-1]
    k_scale, v_scale = kv_scales if k_cache.dtype == E4M3 else (None, None)
    q_out = (
        torch.empty(tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device) if out is None else out
    )
    heads = math.gcd(math.gcd(num_heads, num_kv_heads), 8)
    _rope_and_store[(tokens, (num_heads + 2 * num_kv_heads) // heads)](
        qkv, positions, cos_sin, k_cache, v_cache, cache_locations, q_norm, k_norm, q_out, k_scale, v_scale,
        eps, qkv.stride(0),
        Q_HEADS=num_heads, KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, ROTATED=cos_sin.shape[1], HEADS=heads,
        BLOCK=triton.next_power_of_2(head_dim // 2), NORM=q_norm is not None, NORM_ROTATED=norm_rotated,
        num_warps=2, launch_pdl=True,
    )  # fmt: skip
    return q_out
