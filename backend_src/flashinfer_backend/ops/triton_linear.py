# SPDX-License-Identifier: Apache-2.0
"""Triton matrix products for few tokens, where a step is bound by reading the weights once.

One kernel serves all four products of a decoder layer. What makes it faster than a library call is around
the product: the norm of the input (with weights of e4m3: quantising it, or its scales), the activation and
the residual are part of it, the inner dimension is split so that every SM reads weights, and the launch
overlaps the previous kernel (programmatic dependent launch): weights do not depend on that kernel, so a
program pulls its first ones into L2 before it waits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from flashinfer_backend.core.tuned import PARTIAL_SUMS, SPLIT_BLOCKS, Tiling
from flashinfer_backend.ops import device
from flashinfer_backend.ops.fp8 import E4M3, LARGEST, SMALLEST_PEAK
from flashinfer_backend.ops.triton_adapters import (
    MOST_TOKENS,
    add_expanded,
    await_shrink,
    chunk,
    count_arrival,
    inner_sums,
    listed_places,
    prefetch_up,
    share,
    shrink,
    shrink_beside,
    side_by_side,
)
from flashinfer_backend.ops.triton_prefetch import prefetch_rows
from flashinfer_backend.ops.weight import Chosen, LowRank

SPLITS = 4  # programs that share the columns of x to shrink
MOST_TURNS = 16  # of a program that shrinks, one after the other
FEWEST = 4  # programs that shrink, also where the product itself has one for each SM
_SHORT = tl.constexpr(32)  # turns with adapters, up to which the next kernel starts before the loop's end
_SOON = tl.constexpr(4)  # turns before the end at which adapters' rows are brought to L2

_LARGEST, _SMALLEST_PEAK = tl.constexpr(LARGEST), tl.constexpr(SMALLEST_PEAK)


@triton.jit
def _quantise(x):
    # x[TOKENS, INNER] float32 -> e4m3, each row by the scale of its largest magnitude; the scales [TOKENS].
    scale = tl.maximum(tl.max(tl.abs(x), axis=1), _SMALLEST_PEAK) * (1 / _LARGEST)
    return (x * (1.0 / scale)[:, None]).to(tl.float8e4nv), scale  # the largest number is where it saturates


@triton.jit
def _add_product(acc, x, block, x_scale, SWAP: tl.constexpr, SCALED: tl.constexpr):
    # acc plus x[TOKENS, INNER] times block[ROWS, INNER]. With a scale for each row of x, which the next chunk
    # has others of, the sums of a chunk are apart.
    if SCALED:
        if SWAP:
            acc += tl.dot(block, x.T) * x_scale[None, :]
        else:
            acc += tl.dot(x, block.T) * x_scale[:, None]
    elif SWAP:
        acc = tl.dot(block, x.T, acc)
    else:
        acc = tl.dot(x, block.T, acc)
    return acc


@triton.jit
def _prefetch_up(
    up, distinct, row, rows,
    GATED: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    # Of a product of `rows` rows, those from `row` on; of a gated one also those that it multiplies.
    height = 2 * rows if GATED else rows
    prefetch_up(up, distinct, row, height, ROWS, RANK, WIDTH, THREADS)
    if GATED:
        prefetch_up(up, distinct, rows + row, height, ROWS, RANK, WIDTH, THREADS)


@triton.jit(
    do_not_specialize=["tokens", "x_rows", "shrinkers", "last"],
    do_not_specialize_on_alignment=["places", "distinct"],
)
def _linear(
    x, x_blocks, weight, weight_blocks, norm_weight, x_scales, scales, bias, residual, out, partial, counters,
    inner, down_adapters, up_adapters, places, distinct, arrived, shrinkers, last, first_end, second_end,
    tokens, rows, x_rows, eps,
    K: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr, SPLIT: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, SWAP: tl.constexpr, PREFETCH: tl.constexpr, EARLY: tl.constexpr,
    STAGES: tl.constexpr, THREADS: tl.constexpr, QUANTISE: tl.constexpr, APART: tl.constexpr,
    NATIVE: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, STEP: tl.constexpr,
    CHUNK: tl.constexpr, DOWN_SHARE: tl.constexpr, DOWN_COLUMNS: tl.constexpr,
    DOWN_TOKENS: tl.constexpr, DOWN_PREFETCH: tl.constexpr,
):  # fmt: skip
    if inner is None:
        _product(
            x, x_blocks, weight, weight_blocks, norm_weight, x_scales, scales, bias, residual, out, partial,
            counters, inner, up_adapters, places, distinct, arrived, shrinkers, last, first_end, second_end,
            tokens, rows, x_rows, eps, tl.program_id(0), tl.program_id(1), K, TOKENS, ROWS, INNER, SPLIT,
            NORM, GATED, SWAP, PREFETCH, EARLY, STAGES, THREADS, QUANTISE, APART, NATIVE, PARTS, RANK, SPLITS,
            STEP, CHUNK,
        )  # fmt: skip
    # The programs that others wait for come first, and wait for none. Where all programs fit a GPU at once,
    # as in most launches for few tokens, they run in any case. In longer launches they do if a GPU starts
    # programs by their number: every one so far does, but CUDA does not promise it.
    elif tl.program_id(0) < shrinkers:
        shrink_beside(
            x, norm_weight, down_adapters, places, distinct, inner, arrived, tokens, tl.program_id(0),
            shrinkers, last, K, DOWN_SHARE, PARTS, RANK, SPLITS, DOWN_TOKENS, DOWN_COLUMNS, THREADS,
            DOWN_PREFETCH, NATIVE,
        )  # fmt: skip
    else:
        number, blocks = tl.program_id(0) - shrinkers, rows // ROWS * tl.cdiv(tokens, TOKENS)
        _product(
            x, x_blocks, weight, weight_blocks, norm_weight, x_scales, scales, bias, residual, out, partial,
            counters, inner, up_adapters, places, distinct, arrived, shrinkers, last, first_end, second_end,
            tokens, rows, x_rows, eps, number % blocks, number // blocks, K, TOKENS, ROWS, INNER, SPLIT,
            NORM, GATED, SWAP, PREFETCH, EARLY, STAGES, THREADS, QUANTISE, APART, NATIVE, PARTS, RANK, SPLITS,
            STEP, CHUNK,
        )  # fmt: skip


@triton.jit
def _product(
    x, x_blocks, weight, weight_blocks, norm_weight, x_scales, scales, bias, residual, out, partial, counters,
    inner, up_adapters, places, distinct, arrived, shrinkers, last_arrival, first_end, second_end, tokens,
    rows, x_rows, eps, number, split,
    K: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr, SPLIT: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, SWAP: tl.constexpr, PREFETCH: tl.constexpr, EARLY: tl.constexpr,
    STAGES: tl.constexpr, THREADS: tl.constexpr, QUANTISE: tl.constexpr, APART: tl.constexpr,
    NATIVE: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, STEP: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    # Token blocks of the same weights are neighbours, so that the weights come from L2 the second time.
    token_blocks = tl.cdiv(tokens, TOKENS)
    row = number // token_blocks * ROWS
    token = number % token_blocks * TOKENS
    SHARE: tl.constexpr = K // SPLIT
    column = split * SHARE
    if PREFETCH > 0:
        WHOLE: tl.constexpr = SHARE * (weight.dtype.element_ty.primitive_bitwidth // 8)
        ROW_BYTES: tl.constexpr = PREFETCH // ROWS if PREFETCH // ROWS < WHOLE else WHOLE
        prefetch_rows(weight, row, column, K, ROWS, ROW_BYTES, THREADS)
        if GATED:
            prefetch_rows(weight, rows + row, column, K, ROWS, ROW_BYTES, THREADS)
    SCALED: tl.constexpr = QUANTISE or APART > 0
    # One token alone is multiplied as COLUMNS equal ones: tensor cores take no fewer.
    COLUMNS: tl.constexpr = TOKENS if TOKENS > 1 else 16
    t = token + tl.arange(0, TOKENS)
    n = row + tl.arange(0, ROWS)
    k = tl.arange(0, INNER)
    inside = (t < tokens)[:, None]
    row_scale, up_scale = n, n
    if scales is not None and not APART:  # also the weights: they need no wait
        row_scale = tl.load(scales + n)
        if GATED:
            up_scale = tl.load(scales + rows + n)
    # What adapters add is before the norm's scale, which is also a factor of that. Of their rows the first
    # CHUNK columns are loaded before the loop where registers are left, of a gated product the gate's. Where
    # none are, they are brought to L2 shortly before the loop ends: earlier, the weights push them out again.
    height = 2 * rows if GATED else rows
    TURNS: tl.constexpr = SHARE // INNER
    AHEAD: tl.constexpr = (GATED and TOKENS <= 32) or not NORM
    if inner is not None:
        count = tl.where(split == 0, tl.load(distinct), 0)
        listed = listed_places(distinct, 0, count, STEP, CHUNK)
        if NATIVE and AHEAD and split == 0:
            _prefetch_up(up_adapters, distinct, row, rows, GATED, ROWS, RANK, CHUNK // STEP, THREADS)
    if NATIVE:
        gdc_wait()
        if EARLY:  # behind the wait: see wait_and_launch
            gdc_launch_dependents()
    if inner is not None:
        mine = tl.load(places + t, mask=t < tokens, other=-1)
        if AHEAD:
            matrix = side_by_side(up_adapters, listed, n, height, height, 0, RANK, STEP)
    if QUANTISE and residual is not None:
        # Here its way is covered by the product, and such products have registers left.
        added = tl.load(residual + t[:, None].to(tl.int64) * rows + n[None, :], mask=inside, other=0.0)
    x_cells = x + t[:, None] * K + column + k[None, :]
    if SWAP:
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        up = tl.zeros([ROWS, COLUMNS], tl.float32)
    else:
        acc = tl.zeros([COLUMNS, ROWS], tl.float32)
        up = tl.zeros([COLUMNS, ROWS], tl.float32)
    square = tl.zeros([TOKENS, INNER], tl.float32)
    for i in tl.range(0, TURNS, num_stages=STAGES):
        if x_blocks is None:
            x_block = tl.load(x_cells + i * INNER, mask=inside, other=0.0)
        else:
            x_block = x_blocks.load([token, column + i * INNER])
        if not QUANTISE:
            block = weight_blocks.load([row, column + i * INNER])
        if NORM:
            # The norm's scale is a factor of each output row: only its weight enters the product.
            wide = x_block.to(tl.float32)
            square += wide * wide
            scale = tl.load(norm_weight + column + i * INNER + k).to(tl.float32)
            x_block = wide * scale[None, :]
            if not QUANTISE:
                x_block = x_block.to(x.dtype.element_ty)
        x_scale = None
        if QUANTISE:
            x_block, x_scale = _quantise(x_block.to(tl.float32))
            # Only here, so that the scales are there when the weights come.
            block = weight_blocks.load([row, column + i * INNER])
        elif APART:
            group = split * TURNS + i
            x_scale = tl.load(x_scales + group * x_rows.to(tl.int64) + t, mask=t < tokens, other=0.0)
        if COLUMNS > TOKENS:
            x_block = tl.broadcast_to(x_block, [COLUMNS, INNER])
            if SCALED:
                x_scale = tl.broadcast_to(x_scale, [COLUMNS])
        up_x_scale = x_scale
        if APART:
            # INNER is the columns of a block, and ROWS divides its rows.
            of_block = scales + split * TURNS + i
            x_scale = x_scale * tl.load(of_block + row // INNER * APART)
            if GATED:
                up_x_scale = up_x_scale * tl.load(of_block + (rows + row) // INNER * APART)
        acc = _add_product(acc, x_block, block, x_scale, SWAP, SCALED)
        if GATED:
            up_block = weight_blocks.load([rows + row, column + i * INNER])
            up = _add_product(up, x_block, up_block, up_x_scale, SWAP, SCALED)
        if NATIVE and inner is not None:
            if not AHEAD:  # noqa: SIM102 - known when the kernel is compiled
                if (i == max(TURNS - _SOON, 0)) & (split == 0):
                    _prefetch_up(up_adapters, distinct, row, rows, GATED, ROWS, RANK, CHUNK // STEP, THREADS)
            # Measured: o and the queries, keys and values gain by it. Down, which has more turns, loses.
            if not EARLY and TURNS <= _SHORT:  # noqa: SIM102 - the same
                if i == TURNS * 3 // 4:
                    gdc_launch_dependents()
    if NATIVE and not EARLY and (inner is None or TURNS > _SHORT):
        gdc_launch_dependents()
    if inner is not None and split == 0:
        # Rows of padding, which have zeros, are of the last part.
        part = tl.minimum((row >= first_end).to(tl.int32) + (row >= second_end).to(tl.int32), PARTS - 1)
        if not AHEAD:
            matrix = side_by_side(up_adapters, listed, n, height, height, 0, RANK, STEP)
        up_matrix = matrix
        if GATED:
            up_matrix = side_by_side(up_adapters, listed, rows + n, height, height, 0, RANK, STEP)
        if NATIVE:
            await_shrink(arrived, shrinkers, THREADS)
        sums = inner_sums(inner, t, mine >= 0, 0, part, tokens, PARTS, RANK, SPLITS, STEP)
        up_sums = sums
        if GATED:
            up_sums = inner_sums(inner, t, mine >= 0, 0, PARTS - 1, tokens, PARTS, RANK, SPLITS, STEP)
        acc = add_expanded(
            acc, matrix, sums, listed, mine, count, inner, up_adapters, distinct, t, n, part, tokens, height,
            height, PARTS, RANK, SPLITS, STEP, SWAP,
        )  # fmt: skip
        if GATED:
            up = add_expanded(
                up, up_matrix, up_sums, listed, mine, count, inner, up_adapters, distinct, t, rows + n,
                PARTS - 1, tokens, height, height, PARTS, RANK, SPLITS, STEP, SWAP,
            )  # fmt: skip
        if NATIVE:  # here, where nothing of the program waits for it
            count_arrival(arrived, last_arrival, "relaxed", THREADS)
    if SWAP:
        acc = acc.T
        up = up.T
    if COLUMNS > TOKENS:  # of equal ones
        acc = tl.max(acc, axis=0, keep_dims=True)
        up = tl.max(up, axis=0, keep_dims=True)
    cells = t[:, None].to(tl.int64) * rows + n[None, :]
    squares = tl.sum(square, axis=1)
    last = True
    if SPLIT > 1:
        # The program that arrives last adds the parts in index order: the sum never depends on timing.
        plane = tokens.to(tl.int64) * rows
        tl.store(partial + split * plane + cells, acc, mask=inside)
        square_cells = partial + SPLIT * plane + number * (SPLIT * TOKENS) + tl.arange(0, TOKENS)
        if NORM:
            tl.store(square_cells + split * TOKENS, squares)
        tl.debug_barrier()
        last = tl.atomic_add(counters + number, 1, sem="acq_rel") == SPLIT - 1
        if last:
            tl.store(counters + number, 0)
            acc = tl.zeros([TOKENS, ROWS], tl.float32)
            for part in tl.static_range(SPLIT):
                acc += tl.load(partial + part * plane + cells, mask=inside, other=0.0, cache_modifier=".cg")
            if NORM:
                squares = tl.zeros([TOKENS], tl.float32)
                for part in tl.static_range(SPLIT):
                    squares += tl.load(square_cells + part * TOKENS, cache_modifier=".cg")
    if last:
        if NORM:
            scale = tl.rsqrt(squares / K + eps)[:, None]
            acc = acc * scale
            up = up * scale
        if x_scales is not None and not APART:
            scale = tl.load(x_scales + t, mask=t < tokens, other=0.0)[:, None]
            acc = acc * scale
            up = up * scale
        if scales is not None and not APART:
            acc = acc * row_scale[None, :]
            if GATED:
                up = up * up_scale[None, :]
        if GATED:
            acc = acc * tl.sigmoid(acc) * up
        if QUANTISE and residual is not None:
            acc += added.to(tl.float32)
        elif residual is not None:
            acc += tl.load(residual + cells, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            acc += tl.load(bias + n).to(tl.float32)[None, :]
        tl.store(out + cells, acc.to(out.dtype.element_ty), mask=inside)


class _Workspace:
    """Partial sums of split products on one device. Kernels of one stream take turns with it."""

    def __init__(self, device: torch.device) -> None:
        self.partial = torch.empty(PARTIAL_SUMS, dtype=torch.float32, device=device)
        # The kernel leaves the counters at zero.
        self.counters = torch.zeros(SPLIT_BLOCKS, dtype=torch.int32, device=device)
        self.arrived = torch.zeros((), dtype=torch.int32, device=device)


_workspaces: dict[torch.device, _Workspace] = {}


def workspace(device: torch.device) -> _Workspace:
    if device not in _workspaces:
        _workspaces[device] = _Workspace(device)
    return _workspaces[device]


def takes_adapters(tiling: Tiling, low: LowRank) -> bool:
    """Whether what adapters add to a weight in 16 bits can be part of its product: each block of rows is of
    one module, and of as many tokens as tensor cores take."""
    return tiling.tokens >= 16 and not any(end % tiling.rows for end in low.ends)


class _Beside(NamedTuple):
    """What the kernel does for adapters next to a product: its operands, numbers and constants."""

    shrinkers: int
    operands: tuple[Tensor | int | None, ...]
    constants: dict[str, int | bool]


def _beside(
    x: Tensor,
    tiling: Tiling,
    rows: int,
    norm_weight: Tensor | None,
    adapters: tuple[LowRank, Chosen] | None,
    native: bool,
) -> _Beside:
    """rows: of the product's blocks."""
    if adapters is None:
        down = {"DOWN_SHARE": 0, "DOWN_COLUMNS": 0, "DOWN_TOKENS": 0, "DOWN_PREFETCH": False}
        constants = {"PARTS": 1, "RANK": 1, "SPLITS": 1, "STEP": 1, "CHUNK": 1} | down
        return _Beside(0, (None,) * 8 + (rows, rows), constants)
    (low, chosen), tokens = adapters, len(x)
    _, parts, rank, columns = low.down.shape
    blocks, tile = rows // tiling.rows * triton.cdiv(tokens, tiling.tokens), min(tiling.tokens, MOST_TOKENS)
    tasks = triton.cdiv(tokens, tile) * (len(chosen.distinct) - 1) * parts * SPLITS
    # On SMs that the last wave of the product's programs leaves free.
    shrinkers = min(tasks, max(FEWEST, -blocks * tiling.split % device.sms()))
    # Few of them have few turns: there the product has a share of its own for each SM, and is done sooner.
    if tasks <= min(shrinkers, MOST_TURNS) * shrinkers:
        inner = torch.empty(SPLITS, tokens, parts, rank, dtype=torch.float32, device=x.device)
    else:
        shrinkers, inner = 0, shrink(x, low, chosen, norm_weight, SPLITS, native).inner
    constants = {"PARTS": parts, "RANK": rank, "SPLITS": SPLITS, "DOWN_TOKENS": tile} | chunk(low, chosen)
    constants |= {f"DOWN_{name}": value for name, value in share(columns, rank, SPLITS).items()}
    ends = (*low.ends, rows, rows)[:2]
    arrived = workspace(x.device).arrived
    return _Beside(
        shrinkers,
        (inner, low.down, low.up, *chosen, arrived, shrinkers, shrinkers + blocks - 1, *ends),
        constants,
    )


def linear(
    x: Tensor,
    weight: Tensor,
    tiling: Tiling,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    out: Tensor | None = None,
    scales: tuple[Tensor | None, Tensor] | None = None,
    adapters: tuple[LowRank, Chosen] | None = None,
    native: bool = True,
) -> Tensor:
    """x[T, K] times weight[N, K] transposed, with what is given applied -> [T, N], in `out` when given.

    norm_weight[K]: x is RMS-normed first. bias[N], residual[T, N]: added. gated: weight holds gate and up
    rows, the result is silu(gate) * up [T, N / 2] (not with split > 1). All operands are contiguous and of
    one 16-bit dtype. tiling.fits says which weights it can take.

    scales, float32, of x's rows [T, 1] and of weight's [N]: weight is of e4m3. So is x, no norm is part of
    it, and the rest is bfloat16. With None for those of x, x is of 16 bits and quantised here: tiling.inner
    columns of a row at a time by their largest magnitude, after the norm's weight and before its factor of
    the row. That is never coarser than a scale for the row, but not the same bits. Those of a weight of
    blocks are [N / 128, K / 128], rounded up, those of x then [R, K / 128], R >= T, column after column;
    tiling.inner is 128 then, and tiling.rows divides 128.

    adapters: of the weight, and the tokens'; what they add is added, where takes_adapters.

    native: with what a GPU alone has, and Triton's interpreter does not know.
    """
    tokens, inner = x.shape
    rows = weight.shape[0] // 2 if gated else weight.shape[0]
    if out is None:
        dtype = torch.bfloat16 if x.dtype == E4M3 else x.dtype
        out = torch.empty(tokens, rows, dtype=dtype, device=x.device)
    space = workspace(x.device) if tiling.split > 1 else None
    x_scales, weight_scales = scales or (None, None)
    quantise = weight_scales is not None and x_scales is None
    apart = weight_scales.stride(0) if weight_scales is not None and weight_scales.dim() == 2 else 0
    x_rows = x_scales.stride(1) if apart and x_scales is not None else 0
    x_blocks = norm_weight is None and not quantise  # else x passes through registers on its way
    beside = _beside(x, tiling, rows, norm_weight, adapters, native)
    blocks = rows // tiling.rows * triton.cdiv(tokens, tiling.tokens)
    grid = (blocks, tiling.split) if adapters is None else (beside.shrinkers + blocks * tiling.split,)
    _linear[grid](
        x,
        TensorDescriptor(x, [tokens, inner], [inner, 1], [tiling.tokens, tiling.inner]) if x_blocks else None,
        weight, TensorDescriptor(weight, list(weight.shape), [inner, 1], [tiling.rows, tiling.inner]),
        norm_weight, x_scales, weight_scales, bias, residual, out, space.partial if space else None,
        space.counters if space else None, *beside.operands, tokens, rows, x_rows, eps,
        K=inner, TOKENS=tiling.tokens, ROWS=tiling.rows, INNER=tiling.inner, SPLIT=tiling.split,
        NORM=norm_weight is not None, GATED=gated, SWAP=tiling.swap,
        PREFETCH=tiling.prefetch if native else 0, EARLY=tiling.early, STAGES=tiling.stages,
        THREADS=32 * tiling.warps, QUANTISE=quantise, APART=apart, NATIVE=native,
        **beside.constants, num_warps=tiling.warps, launch_pdl=native,
    )  # fmt: skip
    return out
