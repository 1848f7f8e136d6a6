# SPDX-License-Identifier: Apache-2.0
"""Triton kernel: optional per-head norm, rotary embedding, and K and V stored in the cache."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _head_norm(first, second, weight, offsets, mask, eps, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, dtype):
    # The normalised value is rounded before the weight, and after it, as in ops.torch_ops.rms_norm.
    square = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    scale = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
    w_first = tl.load(weight + offsets, mask=mask, other=0.0)[None, :]
    w_second = tl.load(weight + HALF + offsets, mask=mask, other=0.0)[None, :]
    first = ((first * scale).to(dtype) * w_first).to(tl.float32)
    second = ((second * scale).to(dtype) * w_second).to(tl.float32)
    return first, second


# Positions are a part of the step's upload: their alignment depends on what comes before them.
@triton.jit(do_not_specialize_on_alignment=["positions", "cache_locations"])
def _rope_and_store(
    qkv,
    positions,
    cos_sin,
    k_cache,
    v_cache,
    cache_locations,
    q_norm,
    k_norm,
    q_out,
    eps,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS
    offsets = tl.arange(0, BLOCK)
    mask = offsets < HALF
    heads = tl.arange(0, HEADS)
    position = tl.load(positions + token).to(tl.int64)
    location = tl.load(cache_locations + token).to(tl.int64)
    cos = tl.load(cos_sin + position * HEAD_DIM + offsets, mask=mask, other=0.0)[None, :]
    sin = tl.load(cos_sin + position * HEAD_DIM + HALF + offsets, mask=mask, other=0.0)[None, :]
    gdc_launch_dependents()
    gdc_wait()
    row = qkv + token * ((Q_HEADS + 2 * KV_HEADS) * HEAD_DIM)
    source = row + (head + heads)[:, None] * HEAD_DIM + offsets[None, :]
    first = tl.load(source, mask=mask[None, :], other=0.0)
    second = tl.load(source + HALF, mask=mask[None, :], other=0.0)
    # HEADS divides both head counts, so a program is all Q, all K or all V.
    if head >= Q_HEADS + KV_HEADS:
        target = v_cache + location * (KV_HEADS * HEAD_DIM) + (head - Q_HEADS - KV_HEADS) * HEAD_DIM
    else:
        dtype = first.dtype
        if head < Q_HEADS:
            target = q_out + token * (Q_HEADS * HEAD_DIM) + head * HEAD_DIM
        else:
            target = k_cache + location * (KV_HEADS * HEAD_DIM) + (head - Q_HEADS) * HEAD_DIM
        wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
        if NORM:
            weight = q_norm if head < Q_HEADS else k_norm
            wide_first, wide_second = _head_norm(
                wide_first, wide_second, weight, offsets, mask, eps, HEAD_DIM, HALF, dtype
            )
        first = (wide_first * cos - wide_second * sin).to(dtype)
        second = (wide_second * cos + wide_first * sin).to(dtype)
    target += heads[:, None] * HEAD_DIM + offsets[None, :]
    tl.store(target, first, mask=mask[None, :])
    tl.store(target + HALF, second, mask=mask[None, :])


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
) -> Tensor:
    """See ops.torch_ops.rope_and_store. One launch; q_norm and k_norm are both given or both None. Caches are
    of qkv's dtype, so that kv_scales do not count."""
    tokens, head_dim = qkv.shape[0], k_cache.shape[-1]
    if k_cache.dtype.itemsize == 1:
        raise ValueError(f"this kernel stores 16-bit keys and values, not {k_cache.dtype}")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm must both be given or both be None")
    q_out = (
        torch.empty(tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device) if out is None else out
    )
    heads = math.gcd(math.gcd(num_heads, num_kv_heads), 8)
    _rope_and_store[(tokens, (num_heads + 2 * num_kv_heads) // heads)](
        qkv,
        positions,
        cos_sin,
        k_cache,
        v_cache,
        cache_locations,
        q_norm,
        k_norm,
        q_out,
        eps,
        Q_HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HEADS=heads,
        BLOCK=triton.next_power_of_2(head_dim // 2),
        NORM=q_norm is not None,
        num_warps=2,
        launch_pdl=True,
    )
    return q_out
