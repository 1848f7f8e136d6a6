# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that change logits before a token is chosen: operations of torch_ops, bit for bit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashinfer_backend.ops.torch_ops import LARGEST_LOGIT, Penalties

_BLOCK = 4096
_ROWS = 128  # at a time, so that their counts are little memory
_LARGEST = tl.constexpr(LARGEST_LOGIT)
_IN_PROMPT = tl.constexpr(1 << 30)  # of a token's count: it is in the prompt


@triton.jit
def _bounded(score):
    score = tl.where(score == score, score, float("-inf"))
    return tl.minimum(score, _LARGEST)


# What is read per row is a part of an upload, whose alignment depends on the number of rows.
@triton.jit(do_not_specialize_on_alignment=["rows"])
def _copy_rows(logits, rows, out, vocab, stride, BOUNDED: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    row = tl.load(rows + index).to(tl.int64)
    score = tl.load(logits + row * stride + token, mask=inside).to(tl.float32)
    tl.store(out + index * vocab + token, _bounded(score) if BOUNDED else score, mask=inside)


def copy_rows(logits: Tensor, rows: Tensor, bounded: bool) -> Tensor:
    vocab = logits.shape[1]
    out = torch.empty(len(rows), vocab, dtype=torch.float32, device=logits.device)
    grid = (len(rows), triton.cdiv(vocab, _BLOCK))
    _copy_rows[grid](logits, rows, out, vocab, logits.stride(0), BOUNDED=bounded, BLOCK=_BLOCK, num_warps=8)
    return out


@triton.jit(
    do_not_specialize_on_alignment=[
        "rows", "slots", "position", "prompt_len", "repetition", "presence", "frequency",
    ]
)  # fmt: skip
def _penalise(
    logits, counts, history, rows, slots, position, prompt_len, repetition, presence, frequency,
    vocab, length, BLOCK: tl.constexpr,
):  # fmt: skip
    # A program has a row. It counts the row's tokens in `counts`, then takes each count out: who finds one
    # changes the token's logit, so each is changed once, and all counts are 0 again.
    own = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + own)
    counts += own * vocab
    logits += row * vocab
    history += tl.load(slots + own) * length
    end = tl.load(position + row)
    generated = tl.load(prompt_len + own)
    for base in tl.range(0, end, BLOCK):
        place = base + tl.arange(0, BLOCK)
        token = tl.load(history + place, mask=place < end, other=0)
        tl.atomic_or(counts + token, _IN_PROMPT, mask=(place < end) & (place < generated), sem="relaxed")
        tl.atomic_add(counts + token, 1, mask=(place < end) & (place >= generated), sem="relaxed")
    tl.debug_barrier()
    factor, once, each = tl.load(repetition + own), tl.load(presence + own), tl.load(frequency + own)
    for base in tl.range(0, end, BLOCK):
        place = base + tl.arange(0, BLOCK)
        token = tl.load(history + place, mask=place < end, other=0)
        found = tl.atomic_xchg(counts + token, 0, mask=place < end, sem="relaxed")
        first = (place < end) & (found != 0)
        score = tl.load(logits + token, mask=first, other=0.0)
        score = tl.where(score < 0, score * factor, tl.div_rn(score, factor))
        times = (found & (_IN_PROMPT - 1)).to(tl.float32)
        score -= each * times + tl.where(times > 0, once, 0.0)
        tl.store(logits + token, _bounded(score), mask=first)


def penalise(logits: Tensor, of: Penalties, history: Tensor, position: Tensor) -> None:
    vocab = logits.shape[1]
    for part in zip(*(column.split(_ROWS) for column in of), strict=True):
        rows, slots, *numbers = part
        counts = torch.zeros(len(rows), vocab, dtype=torch.int32, device=logits.device)
        # Rounded after each operation, as plain torch does.
        _penalise[(len(rows),)](
            logits, counts, history, rows, slots, position, *numbers, vocab, history.shape[1],
            BLOCK=2048, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
