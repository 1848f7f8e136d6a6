# SPDX-License-Identifier: Apache-2.0
"""Triton kernels: top-k of a small k, with top-p and min-p behind it, in three passes over the logits.

The k-th largest of the peaks of blocks of tokens is no larger than the k-th largest logit, and fewer than k
blocks have a logit above it. Those logits are collected: all else is decided among them. How many logits
equal that bound is counted, as it may be the k-th largest itself.

Weights are whole numbers, so that sums do not depend on the order of additions, nor a seed's tokens on it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_GROUP = 64  # tokens of a block that has a peak
_BLOCK = 4096  # tokens of a program
_ONE = tl.constexpr(1 << 40)  # the largest weight


@triton.jit
def _scaled(score, heat):
    # As plain torch divides; of two zeros one is left.
    return tl.div_rn(score, heat) + 0.0


@triton.jit
def _ordered(x):
    # Numbers of 32 bits in the order of floats.
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def _float(ordered):
    bits = ordered.to(tl.int32, bitcast=True)
    return (bits ^ ((~bits >> 31) | -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def _reaching(ordered, weight, target):
    # The largest number that all with it and above have `target` of the weight; 0: there is none.
    found = tl.zeros_like(tl.max(ordered, axis=0))
    for step in tl.static_range(32):
        tried = found | (1 << (31 - step))
        found = tl.where(tl.sum(tl.where(ordered >= tried, weight, 0), axis=0) >= target, tried, found)
    return found


# What is read per row is a part of an upload, whose alignment depends on the number of rows.
@triton.jit(do_not_specialize_on_alignment=["rows"])
def _peaks(logits, rows, peaks, vocab, groups, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    row = logits + tl.load(rows + index) * vocab
    score = tl.load(row + token, mask=token < vocab, other=float("-inf"))
    peak = tl.max(score.reshape(BLOCK // GROUP, GROUP), axis=1)
    group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    tl.store(peaks + index * groups + group, peak, mask=group < groups)


@triton.jit(do_not_specialize_on_alignment=["rows", "heat", "top_k"])
def _bound(peaks, rows, heat, top_k, bounds, counts, groups, PADDED: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, PADDED)
    peak = tl.load(peaks + index * groups + group, mask=group < groups, other=float("-inf"))
    ordered = _ordered(_scaled(peak, tl.load(heat + tl.load(rows + index))))
    # Of fewer blocks than k the lowest number is taken, which no logit is below.
    kth = _reaching(ordered, tl.full([PADDED], 1, tl.int32), tl.load(top_k + index))
    tl.store(bounds + index, tl.where(kth == 0, float("-inf"), _float(kth)))
    tl.store(counts + index * 2, 0)
    tl.store(counts + index * 2 + 1, 0)


@triton.jit(do_not_specialize_on_alignment=["rows", "heat"])
def _collect(
    logits, rows, heat, bounds, counts, above, vocab, BLOCK: tl.constexpr, ROOM: tl.constexpr
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + index)
    score = tl.load(logits + row * vocab + token, mask=token < vocab, other=float("nan"))
    score = _scaled(score, tl.load(heat + row))
    bound = tl.load(bounds + index)
    equal = tl.sum((score == bound).to(tl.int32), axis=0)
    tl.atomic_add(counts + index * 2 + 1, equal, sem="relaxed")
    larger = score > bound
    place = tl.atomic_add(counts + index * 2 + tl.zeros_like(token), 1, mask=larger, sem="relaxed")
    tl.store(above + index * ROOM + place, score, mask=larger & (place < ROOM))


@triton.jit(do_not_specialize_on_alignment=["top_k", "top_p", "min_p"])
def _lowest(above, bounds, counts, top_k, top_p, min_p, lowest, ROOM: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    count, equal = tl.load(counts + index * 2), tl.load(counts + index * 2 + 1)
    bound, k = tl.load(bounds + index), tl.load(top_k + index)
    place = tl.arange(0, ROOM)
    own = place < count
    score = tl.load(above + index * ROOM + place, mask=own, other=float("-inf"))
    ordered = _ordered(score)
    kth = _float(_reaching(ordered, own.to(tl.int32), tl.minimum(k, count)))
    kth = tl.where(count >= k, kth, bound)
    peak = tl.where(count > 0, tl.max(score, axis=0), bound)
    weight = _weight(score, peak)
    weight = tl.where(own & (score >= kth), weight, 0)
    ties = tl.where(count >= k, 0, equal * _weight(bound, peak))
    share = tl.load(top_p + index)
    target = (tl.sum(weight, axis=0) + ties).to(tl.float64) * share
    reached = _reaching(ordered, weight, tl.maximum(tl.ceil(target).to(tl.int64), 1))
    cut = tl.where((share < 1) & (reached > 0), _float(reached), kth)
    tl.store(lowest + index, tl.maximum(cut, peak + tl.log(tl.load(min_p + index))))


@triton.jit
def _weight(score, peak):
    away = tl.where(score == peak, 0.0, score - peak)
    return (tl.exp2(away * 1.4426950408889634) * _ONE).to(tl.int64)


@triton.jit(do_not_specialize_on_alignment=["rows", "heat"])
def _cut(logits, rows, heat, lowest, vocab, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + index)
    place = logits + row * vocab + token
    score = _scaled(tl.load(place, mask=token < vocab, other=0.0), tl.load(heat + row))
    kept = score >= tl.load(lowest + index)
    tl.store(place, float("-inf"), mask=(token < vocab) & (kept == 0))


def keep_likeliest(
    logits: Tensor,
    rows: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    most: int,
) -> None:
    """Set to -inf, in place, what the filters take away: logits float32 [R, V], temperature float32 [R] above
    0 in `rows` (int64 [n], none twice), top_k int32 [n] of 1..most, top_p and min_p float32 [n]."""
    count, vocab = len(rows), logits.shape[1]
    groups, blocks = triton.cdiv(vocab, _GROUP), triton.cdiv(vocab, _BLOCK)
    room = most * _GROUP

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=logits.device)

    peaks, bounds, above, lowest = floats(count, groups), floats(count), floats(count, room), floats(count)
    counts = torch.empty(count, 2, dtype=torch.int32, device=logits.device)
    grid = (count, blocks)
    _peaks[grid](logits, rows, peaks, vocab, groups, BLOCK=_BLOCK, GROUP=_GROUP, num_warps=8)
    padded = triton.next_power_of_2(groups)
    _bound[(count,)](peaks, rows, temperature, top_k, bounds, counts, groups, PADDED=padded, num_warps=4)
    _collect[grid](
        logits, rows, temperature, bounds, counts, above, vocab, BLOCK=_BLOCK, ROOM=room, num_warps=8
    )
    _lowest[(count,)](above, bounds, counts, top_k, top_p, min_p, lowest, ROOM=room, num_warps=8)
    _cut[grid](logits, rows, temperature, lowest, vocab, BLOCK=_BLOCK, num_warps=8)
