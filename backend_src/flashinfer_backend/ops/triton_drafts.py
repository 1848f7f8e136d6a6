# SPDX-License-Identifier: Apache-2.0
"""Triton kernels: what rows with drafts feed, which drafts are accepted, and the tokens of every slot.

Launched without programmatic dependence, as what they write is read by kernels that do not wait for it:
lengths by attention (ops.triton_inputs)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashinfer_backend.ops.torch_ops import BySlot

_ROWS = 16  # of a program
_TOKENS = 128
_SPAN = 4096  # tokens that a program looks through
_TILE = 1024
_LOGITS = 2048  # of a program


# What is a part of an upload is aligned as the number of rows is.
@triton.jit(do_not_specialize=["rows", "padding"], do_not_specialize_on_alignment=["slots", "fed"])
def _draft_inputs(
    slots, fed, last_token, drafts, lengths, block_table, input_ids, owners, positions, cache_locations, rows,
    padding, drafts_stride, table_stride,
    FEEDS: tl.constexpr, PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, PADDED)[None, :]
    valid = row < rows
    slot = tl.load(slots + row, mask=valid, other=padding)
    count = tl.load(fed + row, mask=valid, other=0)
    length = tl.load(lengths + slot, mask=valid, other=0)
    last = tl.load(last_token + slot, mask=valid, other=0)
    inside = place < count[:, None]
    behind = slot.to(tl.int64)[:, None] * drafts_stride + place - 1
    token = tl.load(drafts + behind, mask=inside & (place > 0), other=0)
    token = tl.where(inside & (place == 0), last[:, None], token)
    owner = tl.where(inside, slot[:, None], padding)
    position = tl.where(inside, length[:, None] + place, 0)
    stored = valid[:, None] & (place < FEEDS)
    entry = block_table + owner.to(tl.int64) * table_stride + position // BLOCK_SIZE
    block = tl.load(entry, mask=stored, other=0)
    target = row[:, None] * FEEDS + place
    tl.store(input_ids + target, token, mask=stored)
    tl.store(owners + target, owner, mask=stored)
    tl.store(positions + target, position, mask=stored)
    tl.store(cache_locations + target, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=stored)
    tl.debug_barrier()  # all threads have the lengths that are replaced now
    tl.store(lengths + slot, length + count, mask=valid & (slot != padding))


def draft_inputs(
    slots: Tensor, fed: Tensor, feeds: int, state: BySlot
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See ops.torch_ops.draft_inputs."""
    rows, (last_token, lengths, drafts, block_table, block_size) = slots.shape[0], state
    input_ids, owners, positions, cache_locations = (
        torch.empty(rows * feeds, dtype=torch.int32, device=slots.device) for _ in range(4)
    )
    _draft_inputs[(triton.cdiv(rows, _ROWS),)](
        slots, fed, last_token, drafts, lengths, block_table, input_ids, owners, positions, cache_locations,
        rows, lengths.shape[0] - 1, drafts.stride(0), block_table.stride(0),
        FEEDS=feeds, PADDED=triton.next_power_of_2(feeds), BLOCK_SIZE=block_size, ROWS=_ROWS, num_warps=1,
    )  # fmt: skip
    return input_ids, owners, positions, cache_locations


@triton.jit(
    do_not_specialize=["rows", "padding"], do_not_specialize_on_alignment=["sampled", "first", "fed", "slots"]
)
def _accept(
    sampled, first, fed, slots, drafts, lengths, last_token, counts, ends, rows, padding, drafts_stride,
    DRAFTS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, PADDED)[None, :]
    valid = row < rows
    slot = tl.load(slots + row, mask=valid, other=padding)
    begin = tl.load(first + row, mask=valid, other=0)
    count = tl.load(fed + row, mask=valid, other=1)
    checked = (place + 1 < count[:, None]) & (place < DRAFTS)
    draft = tl.load(drafts + slot.to(tl.int64)[:, None] * drafts_stride + place, mask=checked, other=0)
    token = tl.load(sampled + begin[:, None] + place, mask=checked, other=-1)
    accepted = tl.min(tl.where(checked & (draft == token), PADDED, place), axis=1)
    end = begin + accepted
    tl.store(counts + row, accepted + 1, mask=valid)
    tl.store(ends + row, end, mask=valid)
    length = tl.load(lengths + slot, mask=valid, other=0)
    tl.store(lengths + slot, length + accepted + 1 - count, mask=valid & (slot != padding))
    tl.store(last_token + slot, tl.load(sampled + end, mask=valid, other=0), mask=valid)


def accept(
    sampled: Tensor, first: Tensor, fed: Tensor, slots: Tensor, state: BySlot
) -> tuple[Tensor, Tensor]:
    """See ops.torch_ops.accept."""
    last_token, lengths, drafts, *_ = state
    rows, most = slots.shape[0], drafts.shape[1]
    counts, ends = (torch.empty(rows, dtype=torch.int32, device=slots.device) for _ in range(2))
    _accept[(triton.cdiv(rows, _ROWS),)](
        sampled, first, fed, slots, drafts, lengths, last_token, counts, ends, rows, lengths.shape[0] - 1,
        drafts.stride(0),
        DRAFTS=most, PADDED=triton.next_power_of_2(most + 1), ROWS=_ROWS, num_warps=1,
    )  # fmt: skip
    return counts, ends


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["positions", "ends", "slots"])
def _places_ahead(
    positions, ends, slots, fed_lengths, block_table, found, locations, rows, table_stride,
    COUNT: tl.constexpr, PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[None, :]
    turn = tl.arange(0, PADDED)[:, None]
    valid = row < rows
    slot = tl.load(slots + row, mask=valid, other=0).to(tl.int64)
    last = tl.load(positions + tl.load(ends + row, mask=valid, other=0), mask=valid, other=0)
    fed = tl.load(fed_lengths + slot, mask=valid, other=0)
    position = last + 1 + turn
    column = position // BLOCK_SIZE
    inside = valid & (turn < COUNT)
    known = inside & (column * BLOCK_SIZE < fed)
    block = tl.load(block_table + slot * table_stride + column, mask=known, other=0)
    location = tl.where(known, block * BLOCK_SIZE + position % BLOCK_SIZE, 0)
    tl.store(found + turn * rows + row, position, mask=inside)
    tl.store(locations + turn * rows + row, location, mask=inside)


def places_ahead(
    positions: Tensor, ends: Tensor, slots: Tensor, fed_lengths: Tensor, state: BySlot, count: int
) -> tuple[Tensor, Tensor]:
    """See ops.torch_ops.places_ahead."""
    rows, (*_, block_table, block_size) = slots.shape[0], state
    found, locations = (torch.empty((count, rows), dtype=torch.int32, device=slots.device) for _ in range(2))
    if count:
        _places_ahead[(triton.cdiv(rows, _ROWS),)](
            positions, ends, slots, fed_lengths, block_table, found, locations, rows, block_table.stride(0),
            COUNT=count, PADDED=triton.next_power_of_2(count), BLOCK_SIZE=block_size, ROWS=_ROWS, num_warps=1,
        )  # fmt: skip
    return found, locations


@triton.jit
def _norm(x, weight, out, eps, SIZE: tl.constexpr, PADDED: tl.constexpr):
    place = tl.arange(0, PADDED)
    inside = place < SIZE
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps)
    normed = value * scale * tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norms_side_by_side(
    left, right, left_weight, right_weight, out, eps, SIZE: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        _norm(left + token * SIZE, left_weight, out + token * 2 * SIZE, eps, SIZE, PADDED)
    else:
        _norm(right + token * SIZE, right_weight, out + (token * 2 + 1) * SIZE, eps, SIZE, PADDED)


def norms_side_by_side(
    left: Tensor, right: Tensor, left_weight: Tensor, right_weight: Tensor, eps: float
) -> Tensor:
    """See ops.torch_ops.norms_side_by_side. left and right are contiguous."""
    tokens, size = left.shape
    out = torch.empty((tokens, 2 * size), dtype=left.dtype, device=left.device)
    if tokens:
        _norms_side_by_side[(tokens, 2)](
            left, right, left_weight, right_weight, out, eps,
            SIZE=size, PADDED=triton.next_power_of_2(size), num_warps=8,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["vocab"])
def _best_of_block(logits, scores, places, vocab, stride, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits + row * stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    best = tl.max(score, axis=0)
    tl.store(scores + row * BLOCKS + block, best)
    tl.store(places + row * BLOCKS + block, tl.min(tl.where(score == best, token, vocab - 1), axis=0))


@triton.jit
def _best_of_row(scores, places, ids, out, BLOCKS: tl.constexpr, PADDED: tl.constexpr):
    row = tl.program_id(0)
    block = tl.arange(0, PADDED)
    score = tl.load(scores + row * BLOCKS + block, mask=block < BLOCKS, other=float("-inf"))
    token = tl.load(places + row * BLOCKS + tl.argmax(score, axis=0, tie_break_left=True))
    if ids is not None:
        token = tl.load(ids + token)
    tl.store(out + row, token)


def likeliest(logits: Tensor, ids: Tensor | None = None) -> Tensor:
    """See ops.torch_ops.likeliest."""
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, _LOGITS)
    scores = torch.empty((rows, blocks), dtype=torch.float32, device=logits.device)
    places, out = (torch.empty(n, dtype=torch.int32, device=logits.device) for n in (rows * blocks, rows))
    if rows:
        _best_of_block[(rows, blocks)](
            logits, scores, places, vocab, logits.stride(0), BLOCKS=blocks, BLOCK=_LOGITS, num_warps=8
        )
        padded = triton.next_power_of_2(blocks)
        _best_of_row[(rows,)](scores, places, ids, out, BLOCKS=blocks, PADDED=padded, num_warps=1)
    return out


@triton.jit(do_not_specialize=["count", "columns"], do_not_specialize_on_alignment=["slots"])
def _note_tokens(noted, tokens, slots, positions, places, count, columns, TOKENS: tl.constexpr):
    index = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = index < count
    slot = tl.load(slots + index, mask=inside, other=0).to(tl.int64)
    place = slot * columns + tl.load(positions + index, mask=inside, other=0) % columns
    tl.store(noted + place, tl.load(tokens + index, mask=inside, other=0), mask=inside)
    tl.store(places + index, place, mask=inside)


def note_tokens(noted: Tensor, tokens: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
    """See ops.torch_ops.note_tokens."""
    count = tokens.shape[0]
    places = torch.empty(count, dtype=torch.int64, device=tokens.device)
    _note_tokens[(triton.cdiv(count, _TOKENS),)](
        noted, tokens, slots, positions, places, count, noted.shape[1], TOKENS=_TOKENS, num_warps=4
    )
    return places


@triton.jit(
    do_not_specialize=["count", "turns", "columns"], do_not_specialize_on_alignment=["slots", "behind"]
)
def _noted_inputs(
    noted, slots, behind, lengths, last_token, block_table, positions, locations, follow, rows,
    count, turns, columns, table_stride, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = index < count
    turn = index % turns
    slot = tl.load(slots + index // turns, mask=inside, other=0).to(tl.int64)
    taken = tl.load(behind + index // turns, mask=inside, other=0)
    position = tl.load(lengths + slot, mask=inside, other=0) - taken + turn
    valid = (turn < taken) & (position >= 0)
    position = tl.where(valid, position, 0)
    row = slot * columns + position % columns
    last = tl.load(last_token + slot, mask=inside, other=0)
    next_token = tl.load(noted + slot * columns + (position + 1) % columns, mask=inside, other=0)
    block = tl.load(block_table + slot * table_stride + position // BLOCK_SIZE, mask=inside, other=0)
    location = tl.where(valid, block * BLOCK_SIZE + position % BLOCK_SIZE, 0)
    tl.store(positions + index, position, mask=inside)
    tl.store(locations + index, location, mask=inside)
    tl.store(follow + index, tl.where(turn == taken - 1, last, next_token), mask=inside)
    tl.store(rows + index, row, mask=inside)


def noted_inputs(
    noted: Tensor, slots: Tensor, behind: Tensor, turns: int, state: BySlot
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See ops.torch_ops.noted_inputs."""
    count, (last_token, lengths, _, block_table, block_size) = slots.shape[0] * turns, state
    positions, locations, follow = (
        torch.empty(count, dtype=torch.int32, device=slots.device) for _ in range(3)
    )
    rows = torch.empty(count, dtype=torch.int64, device=slots.device)
    _noted_inputs[(triton.cdiv(count, _TOKENS),)](
        noted, slots, behind, lengths, last_token, block_table, positions, locations, follow, rows,
        count, turns, noted.shape[1], block_table.stride(0),
        BLOCK_SIZE=block_size, TOKENS=_TOKENS, num_warps=4,
    )  # fmt: skip
    return positions, locations, follow, rows


@triton.jit(
    do_not_specialize=["count", "rows", "first_rows"],
    do_not_specialize_on_alignment=["tokens", "owners", "positions", "slots"],
)
def _record_tokens(
    history, tokens, owners, positions, slots, lengths, last_token, count, rows, first_rows, stride,
    TOKENS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    index = program * TOKENS + tl.arange(0, TOKENS)
    if program < first_rows:
        inside = index < count
        owner = tl.load(owners + index, mask=inside, other=0)
        position = tl.load(positions + index, mask=inside, other=0)
        kept = inside & (position < tl.load(lengths + owner, mask=inside, other=0))
        token = tl.load(tokens + index, mask=kept, other=0)
        tl.store(history + owner.to(tl.int64) * stride + position, token, mask=kept)
    else:
        row = index - first_rows * TOKENS
        inside = row < rows
        slot = tl.load(slots + row, mask=inside, other=0)
        length = tl.load(lengths + slot, mask=inside, other=0)
        token = tl.load(last_token + slot, mask=inside, other=0)
        tl.store(history + slot.to(tl.int64) * stride + length, token, mask=inside)


def record_tokens(history: Tensor, fed: tuple[Tensor, Tensor, Tensor], slots: Tensor, state: BySlot) -> None:
    """See ops.torch_ops.record_tokens."""
    last_token, lengths = state.last_token, state.lengths
    count, rows = fed[0].shape[0], slots.shape[0]
    first_rows = triton.cdiv(count, _TOKENS)
    _record_tokens[(first_rows + triton.cdiv(rows, _TOKENS),)](
        history, *fed, slots, lengths, last_token, count, rows, first_rows, history.stride(0),
        TOKENS=_TOKENS, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _longest_match(
    history, slots, lengths, best, stride, SPANS, MOST: tl.constexpr, LEAST: tl.constexpr, SPAN: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    # best[row, span]: tokens that match << 32 | the place of the last of them; -1 for none.
    row, span = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    last = tl.load(lengths + slot)
    own = history + slot * stride
    found = tl.full([TILE], -1, tl.int64)
    for base in tl.range(span * SPAN, tl.minimum(last, (span + 1) * SPAN), TILE):
        place = base + tl.arange(0, TILE)
        runs = place < last
        matched = tl.zeros([TILE], tl.int64)
        for back in tl.static_range(MOST):
            wanted = tl.load(own + tl.maximum(last - back, 0))
            # The earlier place decides: it is below the other one, so that both exist or it does not.
            token = tl.load(own + place - back, mask=runs & (place >= back), other=-1)
            runs = runs & (token == wanted)
            matched += runs.to(tl.int64)
        found = tl.maximum(found, tl.where(matched >= LEAST, (matched << 32) | place.to(tl.int64), -1))
    tl.store(best + row * SPANS + span, tl.max(found, axis=0))


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _continue_match(
    history, slots, lengths, best, drafts, stride, SPANS, COUNT: tl.constexpr, PADDED: tl.constexpr,
    PADDED_SPANS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    last = tl.load(lengths + slot)
    span = tl.arange(0, PADDED_SPANS)
    found = tl.max(tl.load(best + row * SPANS + span, mask=span < SPANS, other=-1), axis=0)
    end = tl.where(found >= 0, (found & 0xFFFFFFFF).to(tl.int32), last - 1)
    step = tl.arange(0, PADDED)
    token = tl.load(history + slot * stride + end + 1 + step % (last - end), mask=step < COUNT, other=0)
    tl.store(drafts + row * COUNT + step, token, mask=step < COUNT)


def ngram_drafts(
    history: Tensor, slots: Tensor, lengths: Tensor, count: int, most: int, least: int
) -> Tensor:
    """See ops.torch_ops.ngram_drafts."""
    rows, spans = slots.shape[0], triton.cdiv(history.shape[1], _SPAN)
    drafts = torch.empty(rows, count, dtype=torch.int32, device=slots.device)
    if not rows:
        return drafts
    best = torch.empty(rows, spans, dtype=torch.int64, device=slots.device)
    stride = history.stride(0)
    _longest_match[(rows, spans)](
        history, slots, lengths, best, stride, spans, MOST=most, LEAST=least, SPAN=_SPAN, TILE=_TILE
    )  # fmt: skip
    _continue_match[(rows,)](
        history, slots, lengths, best, drafts, stride, spans,
        COUNT=count, PADDED=triton.next_power_of_2(count), PADDED_SPANS=triton.next_power_of_2(spans),
        num_warps=1,
    )  # fmt: skip
    return drafts
