# SPDX-License-Identifier: Apache-2.0
"""Triton kernels: argmax or Gumbel-max sampling in one pass over the logits, and the masks of grammars."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

from flashinfer_backend.ops.triton_prefetch import wait_and_launch

_BLOCK = 4096


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


# What is read per row is a part of the step's upload: its alignment depends on the number of rows.
@triton.jit(do_not_specialize_on_alignment=["temperature", "seed", "position", "suppressed"])
def _block_best(
    logits, temperature, seed, position, suppressed, best_score, best_id, vocab, stride,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BAN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    wait_and_launch(True)
    score = tl.load(logits + row * stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    heat = tl.load(temperature + row)
    if heat > 0:
        key = tl.load(seed + row)
        h = _mix((key & 0xFFFFFFFF).to(tl.uint32))
        h = _mix(h ^ ((key >> 32) & 0xFFFFFFFF).to(tl.uint32))
        h = _mix(h ^ tl.load(position + row).to(tl.uint32, bitcast=True))
        bits = _mix(h ^ token.to(tl.uint32))
        u = (bits >> 9).to(tl.float32) * (2.0**-23) + 2.0**-24
        # libdevice, not tl.log: the fast logarithm is wrong by more than 1 - u near u = 1.
        score = score / heat - libdevice.log(-libdevice.log(u))
        score = tl.where(inside, score, float("-inf"))
    if BAN:
        score = tl.where(token == tl.load(suppressed + row), float("-inf"), score)
    best = tl.max(score, axis=0)
    tl.store(best_score + row * BLOCKS + block, best)
    tl.store(best_id + row * BLOCKS + block, tl.min(tl.where(score == best, token, vocab - 1), axis=0))


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _row_best(
    best_score, best_id, out, last_token, slots,
    BLOCKS: tl.constexpr, PADDED: tl.constexpr, RECORD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, PADDED)
    wait_and_launch(True)
    score = tl.load(best_score + row * BLOCKS + block, mask=block < BLOCKS, other=float("-inf"))
    index = tl.argmax(score, axis=0, tie_break_left=True)
    token = tl.load(best_id + row * BLOCKS + index)
    tl.store(out + row, token)
    if RECORD:
        tl.store(last_token + tl.load(slots + row), token)


def sample(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    suppressed: Tensor | None = None,
    record: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """See ops.torch_ops.sample: the same choice, from the same noise bits. logits may be bfloat16."""
    rows, vocab = logits.shape
    last_token, slots = record or (None, None)
    blocks = triton.cdiv(vocab, _BLOCK)
    score = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    _block_best[(rows, blocks)](
        logits, temperature, seed, position, suppressed, score, ids, vocab, logits.stride(0),
        BLOCK=_BLOCK, BLOCKS=blocks, BAN=suppressed is not None, num_warps=8, launch_pdl=True,
    )  # fmt: skip
    padded = triton.next_power_of_2(blocks)
    _row_best[(rows,)](
        score, ids, out, last_token, slots,
        BLOCKS=blocks, PADDED=padded, RECORD=record is not None, num_warps=1, launch_pdl=True,
    )  # fmt: skip
    return out


# Masks and their rows are parts of an upload as well.
@triton.jit(do_not_specialize_on_alignment=["rows", "mask"])
def _forbid(logits, rows, mask, vocab, stride, words, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    word = tl.load(mask + index * words + (token >> 5), mask=inside, other=-1)
    forbidden = inside & (((word >> (token & 31)) & 1) == 0)
    tl.store(logits + tl.load(rows + index).to(tl.int64) * stride + token, float("-inf"), mask=forbidden)


def keep_allowed(logits: Tensor, rows: Tensor, mask: Tensor) -> None:
    """See ops.torch_ops.keep_allowed."""
    vocab = logits.shape[1]
    grid = (len(rows), triton.cdiv(vocab, _BLOCK))
    _forbid[grid](
        logits, rows, mask, vocab, logits.stride(0), mask.stride(0), BLOCK=_BLOCK, num_warps=8
    )  # fmt: skip
