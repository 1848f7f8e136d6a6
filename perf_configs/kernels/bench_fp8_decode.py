# SPDX-License-Identifier: Apache-2.0
"""Decode attention over a KV cache of e4m3: which form of the Triton kernel is the fastest.

    python perf_configs/kernels/bench_fp8_decode.py [--rows 1,16,...] [--contexts 1152,256,4096] [--heads 32]
        [--kv-heads 8] [--lengths mixed,equal] [--limit 200]

Per number of rows, context, and whether the rows' lengths differ ("mixed": uniform from half of a context to
one and a half) or are equal: microseconds of a call in a CUDA graph over a cache of 16 bits, over one of
e4m3 with the tile that this device takes today, and with the fastest one; and how long reading the e4m3 takes
at 4.2 TB/s. The calls of a graph read other blocks than the calls before them, more than L2 holds. What is
compared takes turns. The first case of a number of rows tries all tiles; the others try those that were
near the best. Per number of rows, the tile with the smallest product of its times over the cases wins.

The table comes last, with "fp8_decode_attention" for the device's file in core/tuned. After `--limit`
seconds, what is left is not measured; numbers of rows without a time take the next larger one's tile.
Cases that do not fit the device's memory are left out, and named. Blocks have 16 tokens, heads 128 numbers.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from flashinfer_backend.core import tuned
from flashinfer_backend.core.arguments import require_cuda, some_seconds, whole
from flashinfer_backend.core.tuned import DecodeAttention, Tuned
from flashinfer_backend.ops.fp8 import E4M3

ROWS = "1,8,16,32,48,64,128,256,1024"
CONTEXTS = "1152,256,4096"
LENGTHS = "mixed", "equal"
BLOCK_SIZE, DIM = 16, 128
BYTES = 160 << 20  # of e4m3 that a graph goes through, at least: three times an H200's L2
BANDWIDTH = 4.2e12
NEAR = 1.2  # of the best time at the first context: what is slower is not tried at the others
FASTER = 0.99  # of today's time: less of a gain is within what repeats differ by
SCALES = (0.5, 0.25)  # of keys and values
LARGEST_ERROR = 1e-2  # of a row, against today's tile
Times = dict[DecodeAttention, float]


class Case(NamedTuple):
    """What is measured: `lengths` is one of LENGTHS."""

    rows: int
    context: int
    lengths: str = "equal"

    def __str__(self) -> str:
        return f"{self.rows} rows of {self.context}, {self.lengths}"


# Block, stages, warps and registers. The block table is loaded ahead of keys and values, so 3 stages hold one
# block of a program in shared memory, 5 two and 7 three; a token has 256 bytes. Registers are limited where
# more programs fit an SM then and little is spilled. One warp spills with blocks of 64 tokens, two with 128.
FORMS: tuple[tuple[int, int, int, int | None], ...] = (
    (16, 5, 1, None),
    (32, 3, 1, None),
    (32, 5, 1, None),
    (32, 7, 1, None),
    (32, 5, 1, 128),
    (32, 5, 2, None),
    (64, 3, 2, None),
    (64, 5, 2, None),
    (64, 7, 2, None),
    (64, 5, 2, 168),
    (32, 5, 4, None),
    (64, 3, 4, None),
    (64, 5, 4, None),
    (64, 7, 4, None),
    (64, 5, 4, 128),
    (128, 3, 4, None),
    (128, 5, 4, None),
    (128, 7, 4, None),
    (128, 5, 8, None),
    (128, 5, 8, 128),
)
PROGRAMS = {1: (4, 8, 16), 2: (2, 4, 8), 4: (2, 4, 8), 8: (1, 2, 4)}  # for each SM, by warps
FEW = 64  # rows, up to which programs are short: what they load before they may begin counts


def candidates(rows: int) -> list[DecodeAttention]:
    """Tiles worth a try for so many rows; rows is None in them."""
    found = []
    for block, stages, warps, registers in FORMS:
        few, *more = PROGRAMS[warps]
        for programs in (few, *more) if rows <= FEW else more:
            for prefetch in (16, 64) if rows <= FEW else (16,):
                merge = 4 if warps == 1 else 8
                found.append(
                    DecodeAttention(None, block, stages, warps, prefetch, merge, programs, registers)
                )
    return found


class Bench:
    """Caches of both kinds and the kernel's calls. device "meta": nothing runs."""

    def __init__(self, heads: int, kv_heads: int, longest: int, blocks: int, device: str = "cuda") -> None:
        self.heads, self.kv_heads, self.device = heads, kv_heads, device
        # One width of all tables: the kernel is compiled for whether it is a multiple of 16.
        self.columns = _up(longest, 16 * BLOCK_SIZE) // BLOCK_SIZE
        shape = (blocks, BLOCK_SIZE, kv_heads, DIM)
        self.caches = {fp8: (self._random(shape, fp8), self._random(shape, fp8)) for fp8 in (False, True)}
        self.order = torch.randperm(blocks, device=device, dtype=torch.int32) if device != "meta" else None

    def _random(self, shape: tuple[int, ...], fp8: bool) -> Tensor:
        # In parts, as a cache may be most of the memory.
        cache = torch.empty(shape, dtype=E4M3 if fp8 else torch.bfloat16, device=self.device)
        if self.device != "meta":
            for part in cache.split(1 << 14):
                part.copy_(torch.randn(part.shape, dtype=torch.bfloat16, device=self.device))
        return cache

    def call(self, q: Tensor, out: Tensor, items: Tensor, table: Tensor, workspace: Any, fp8: bool) -> None:
        """q, out [rows, Hq, D] by the numbers in use."""
        from flashinfer_backend.attention import triton_decode

        scales = SCALES if fp8 else (1.0, 1.0)
        triton_decode.decode(q, self.caches[fp8], out, items, table, workspace, DIM**-0.5, scales)

    def compile_calls(self, works: Sequence[tuple[int, bool, Tuned]]) -> None:
        """A call of so many rows for each, with tensors that have no memory."""
        from flashinfer_backend.attention import split, triton_decode
        from flashinfer_backend.ops import device

        where = torch.device("meta")
        for rows, fp8, numbers in works:
            with device.use(numbers):
                count = split.max_items(rows, self.kv_heads, fp8)
                workspace = triton_decode.DecodeWorkspace(rows, count, self.heads, self.kv_heads, DIM, where)
                q = torch.empty(rows, self.heads, DIM, dtype=torch.bfloat16, device=where)
                items = torch.empty(count, split.ITEM_WORDS, dtype=torch.int32, device=where)
                table = torch.empty(rows, self.columns, dtype=torch.int32, device=where)
                self.call(q, q, items, table, workspace, fp8)

    def tables(self, lens: np.ndarray) -> list[Tensor]:
        """Block tables [rows, columns] for the calls of a graph, at least two; those of `copies` calls name
        blocks of their own."""
        assert self.order is not None
        counts = -(-lens // BLOCK_SIZE)
        need = int(counts.sum(dtype=np.int64))
        starts = torch.from_numpy(np.cumsum(counts, dtype=np.int64) - counts).to(self.order.device)
        places = starts[:, None] + torch.arange(self.columns, device=self.order.device)
        places = places.clamp(max=need - 1)  # beyond a row's blocks stands something that nobody reads
        each = [self.order[need * copy :][places] for copy in range(copies(lens, self.kv_heads))]
        return each if len(each) > 1 else each * 2

    def work(self, lens: np.ndarray, count: int) -> tuple[Tensor, Any]:
        """Items [count, ITEM_WORDS] of rows of these lengths, a slot each, and a workspace for them."""
        from flashinfer_backend.attention import split, triton_decode

        rows, where = len(lens), torch.device(self.device)
        items = np.zeros((count, split.ITEM_WORDS), np.int32)
        split.split_rows(lens, np.arange(rows, dtype=np.int32), count, items)
        space = triton_decode.DecodeWorkspace(rows, count, self.heads, self.kv_heads, DIM, where)
        return torch.from_numpy(items).to(where), space

    def times(self, lens: np.ndarray, works: Sequence[tuple[bool, Tuned]]) -> list[float]:
        """Microseconds of a call by each of these numbers, over the cache of 16 bits or of e4m3; infinite
        where it cannot run. The results of e4m3 are compared with the first of them."""
        from flashinfer_backend.attention import split
        from flashinfer_backend.ops import device
        from flashinfer_backend.tune.measure import capture, microseconds

        rows, tables = len(lens), self.tables(lens)
        q = torch.randn(rows, self.heads, DIM, device=self.device).bfloat16()
        out, expected = torch.empty_like(q), None
        made: dict[int, tuple[Tensor, Any]] = {}  # by the number of items; graphs keep their addresses
        graphs: dict[int, torch.cuda.CUDAGraph] = {}  # by which of the works it is
        for index, (fp8, numbers) in enumerate(works):
            with device.use(numbers):
                count = split.max_items(rows, self.kv_heads, fp8)
                if count not in made:
                    made[count] = self.work(lens, count)
                items, space = made[count]

                def body(items: Tensor = items, space: Any = space, fp8: bool = fp8) -> None:
                    for table in tables:
                        self.call(q, out, items, table, space, fp8)

                out.fill_(math.nan)
                try:
                    graph = capture(body)
                except Exception as error:  # Triton's own: too much shared memory, too few registers
                    said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                    print(f"  left out: {said[:120]}: {shown(numbers.decode(rows, fp8))}", flush=True)
                    continue
            if fp8:
                expected = out.float() if expected is None else expected
                error_of = ((out - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()
                if not error_of < LARGEST_ERROR:
                    print(f"  left out: differs by {error_of:.1e}: {shown(numbers.decode(rows, fp8))}")
                    continue
            graphs[index] = graph
        found = [math.inf] * len(works)
        for index, us in zip(graphs, microseconds(list(graphs.values())) if graphs else (), strict=True):
            found[index] = us / len(tables)
        return found


def _up(number: int, to: int) -> int:
    return -(-number // to) * to


def lengths(rows: int, context: int, kind: str) -> np.ndarray:
    """int32 [rows], of about the same sum either way. kind: one of LENGTHS."""
    if kind == "equal":
        return np.full(rows, context, np.int32)
    rng = np.random.default_rng(rows * 1000003 + context)
    return rng.integers(context - context // 2, context + context // 2 + 1, rows).astype(np.int32)


def read_bytes(lens: np.ndarray, kv_heads: int) -> int:
    """Of e4m3 in one call."""
    return int(lens.sum(dtype=np.int64)) * 2 * kv_heads * DIM


def copies(lens: np.ndarray, kv_heads: int) -> int:
    """How many calls over blocks of their own are more than L2 holds."""
    return -(-BYTES // read_bytes(lens, kv_heads))


def blocks_of(lens: np.ndarray, kv_heads: int) -> int:
    """Blocks of all calls of a graph."""
    return int((-(-lens // BLOCK_SIZE)).sum(dtype=np.int64)) * copies(lens, kv_heads)


def now(today: Tuned, rows: int) -> DecodeAttention:
    """What is taken today for so many rows over e4m3, with rows None."""
    return replace(today.decode(rows, fp8=True), rows=None)


def with_tile(numbers: Tuned, tile: DecodeAttention) -> Tuned:
    return replace(numbers, fp8_decode_attention=(replace(tile, rows=None),))


def compile_all(bench: Bench, works: Sequence[tuple[int, bool, Tuned]]) -> None:
    """The kernels of these rows, caches and numbers, in threads."""
    from flashinfer_backend.worker.prebuild_triton import collect

    began, variants = time.monotonic(), collect(lambda: bench.compile_calls(works))
    index = torch.cuda.current_device()

    def preload(variant: tuple[Any, str]) -> bool:
        try:
            variant[0].preload(variant[1])
        except Exception:  # which the call itself says once more
            return False
        return True

    workers = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(workers, initializer=lambda: torch.cuda.set_device(index)) as threads:
        ready = sum(threads.map(preload, variants))
    took = time.monotonic() - began
    print(f"compiled {ready} of {len(variants)} kernels in {took:.0f} s", flush=True)


def measure(
    cases: Sequence[Case],
    end: float,
    today: Tuned,
    run: Callable[[Case, Sequence[tuple[bool, Tuned]]], list[float]],
) -> tuple[dict[Case, float], dict[Case, Times]]:
    """Microseconds over the cache of 16 bits, and over e4m3 by tile (with rows None), today's among them.
    `run` measures one case; what would begin after `end` is left out."""
    dense: dict[Case, float] = {}
    found: dict[Case, Times] = {}
    for case in cases:
        if time.monotonic() > end:
            break
        rows = case.rows
        current = now(today, rows)
        before = next((times for other, times in found.items() if other.rows == rows), None)
        tried = list(dict.fromkeys([current, *candidates(rows)]))
        if before is not None:
            near = NEAR * min(before.values())
            tried = [tile for tile in tried if tile == current or before[tile] <= near]
        works = [(False, today), *((True, with_tile(today, tile)) for tile in tried)]
        dense[case], *each = run(case, works)
        found[case] = dict(zip(tried, each, strict=True))
        best = min(tried, key=found[case].__getitem__)
        print(
            f"{case}: 16 bits {dense[case]:.1f}, e4m3 {found[case][current]:.1f},"
            f" fastest of {len(tried)} {found[case][best]:.1f}: {shown(best)}",
            flush=True,
        )
    return dense, found


def choose(found: dict[Case, Times], today: Tuned) -> dict[int, DecodeAttention]:
    """By rows, the tile with the best geometric mean over the cases, of those that were tried in all of
    them; today's where it is as fast. Rows that were not measured are left out."""
    chosen: dict[int, DecodeAttention] = {}
    for rows in sorted({case.rows for case in found}):
        cases = [times for case, times in found.items() if case.rows == rows]
        means = {
            tile: sum(math.log(times[tile]) for times in cases) / len(cases)
            for tile in cases[0]
            if all(tile in times for times in cases)
        }
        current = now(today, rows)
        best = min(means, key=means.__getitem__)
        chosen[rows] = best if means[best] < means[current] + math.log(FASTER) else current
    return chosen


def entry(chosen: dict[int, DecodeAttention]) -> dict[str, Any]:
    """For a device's file; the largest number of rows stands for all more."""
    steps: list[DecodeAttention] = []
    for rows, tile in sorted(chosen.items()):
        same = steps and replace(steps[-1], rows=None) == tile
        steps[len(steps) - 1 if same else len(steps) :] = [replace(tile, rows=rows)]
    if not steps:
        return {}
    ours = (*steps[:-1], replace(steps[-1], rows=None))
    numbers = replace(tuned.fallback(), fp8_decode_attention=ours)  # checks them
    return {"fp8_decode_attention": numbers.fp8_decode_attention}


def shown(tile: DecodeAttention) -> str:
    text = f"block {tile.block}, stages {tile.stages}, warps {tile.warps}, prefetch {tile.prefetch},"
    text += f" merge {tile.merge}, programs {tile.programs_per_sm}"
    return text + (f", registers {tile.registers}" if tile.registers else "")


def print_table(
    cases: Sequence[Case],
    dense: dict[Case, float],
    found: dict[Case, Times],
    chosen: dict[int, DecodeAttention],
    floors: dict[Case, float],
    today: Tuned,
) -> None:
    of_e4m3 = " | ".join(f"e4m3, {which}" for which in ("today", "fastest", "chosen"))
    print(f"\n| rows | context | lengths | 16 bits | {of_e4m3} | floor | fastest |")
    print("|---:|---:|---|---:|---:|---:|---:|---:|---|")
    for case in cases:
        if case not in found:
            continue
        times = found[case]
        best = min(times, key=times.__getitem__)
        current = times[now(today, case.rows)]
        numbers = dense[case], current, times[best], times[chosen[case.rows]], floors[case]
        cells = " | ".join([*map(str, case), *(f"{us:.1f}" for us in numbers)])
        print(f"| {cells} | {shown(best)} |")
    print()
    for rows, tile in chosen.items():
        print(f"{rows} rows: {shown(tile)}")


def numbers_of(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"should be numbers from 1 on, separated by commas, not {text!r}")
    return list(dict.fromkeys(found))


def kinds_of(text: str) -> list[str]:
    found = text.split(",")
    if set(found) - set(LENGTHS):
        raise argparse.ArgumentTypeError(f"should be mixed, equal or both with a comma, not {text!r}")
    return list(dict.fromkeys(found))


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=numbers_of, default=ROWS, help=f"default {ROWS}")
    parser.add_argument("--contexts", type=numbers_of, default=CONTEXTS, help=f"default {CONTEXTS}")
    parser.add_argument("--heads", type=whole(1), default=32)
    parser.add_argument("--kv-heads", type=whole(1), default=8)
    parser.add_argument("--lengths", type=kinds_of, default=",".join(LENGTHS), help="default mixed,equal")
    parser.add_argument("--limit", type=some_seconds, default=200, metavar="SECONDS", help="default 200")
    options = parser.parse_args()
    if options.heads % options.kv_heads:
        parser.error(f"--heads {options.heads} should be a multiple of --kv-heads {options.kv_heads}")
    require_cuda(parser)
    end = time.monotonic() + options.limit
    from flashinfer_backend.ops import device

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    today, kv_heads, sizes = device.active(), options.kv_heads, sorted(options.rows)
    cases = [
        Case(rows, context, kind)
        for kind in options.lengths
        for context in options.contexts
        for rows in sizes
    ]
    lens = {case: lengths(*case) for case in cases}
    need = {case: blocks_of(lens[case], kv_heads) for case in cases}
    # Both caches: three bytes for each number; a tenth is for the rest.
    room = int(torch.cuda.mem_get_info()[0] * 0.9) // (BLOCK_SIZE * kv_heads * DIM * 2 * 3)
    for case in [case for case in cases if need[case] > room]:
        print(f"left out: {case}, as {need[case]} blocks are more than {room}")
        cases.remove(case)
    if not cases:
        parser.exit(1, f"{parser.prog}: nothing of that fits the device's memory\n")
    longest = max(int(lens[case].max()) for case in cases)
    meta = Bench(options.heads, kv_heads, longest, 2, "meta")
    works = [(rows, fp8, today) for rows in sizes for fp8 in (False, True)]
    works += [(rows, True, with_tile(today, tile)) for rows in sizes for tile in candidates(rows)]
    compile_all(meta, works)
    bench = Bench(options.heads, kv_heads, longest, max(need[case] for case in cases))

    dense, found = measure(cases, end, today, lambda case, works: bench.times(lens[case], works))
    chosen = choose(found, today)
    floors = {case: read_bytes(lens[case], kv_heads) / BANDWIDTH * 1e6 for case in cases}
    print_table(cases, dense, found, chosen, floors, today)
    late = [case for case in cases if case not in found]
    if late:
        print(f"out of time: {'; '.join(map(str, late))}")
    print(msgspec.json.encode(entry(chosen)).decode())


if __name__ == "__main__":
    main()
