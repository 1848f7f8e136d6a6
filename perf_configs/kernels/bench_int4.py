# SPDX-License-Identifier: Apache-2.0
"""Products with weights of 4 bits: which tiling of the Triton kernel and which tile of the CUDA kernel is the
fastest, and from how many tokens on writing the weight out in 16 bits is.

    python perf_configs/kernels/bench_int4.py [--shapes qkv=6144x4096,...] [--group 128] [--symmetric]

Per role and number of tokens: microseconds in a CUDA graph over different weights of bfloat16 by cuBLAS, of 4
bits as Triton cuts them up without measured numbers, by its fastest tiling, by the fastest tile of the CUDA
kernel, and written out first; and how long reading the 4 bits takes at 4.8 TB/s. What follows a product
(residual, activation) is part of each; a norm is part of the tilings that fuse it, and run before the others.
At the end it prints what a layer's products take, and "int4" for the device's file in core/tuned.

--kernel cuda: of Triton's tilings only the one without measured numbers, which takes less long to compile.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import torch
import torch.nn.functional as F

from client.arguments import integer
from flashinfer_backend.core.arguments import require_cuda
from flashinfer_backend.core.tuned import (
    LARGEST_CLUSTER,
    Int4Product,
    Int4Step,
    Int4Tile,
    Role,
    Shape,
    Tiling,
)
from flashinfer_backend.ops.int4_linear import TILES
from flashinfer_backend.ops.tilings import untuned_int4
from flashinfer_backend.ops.weight import Weight
from flashinfer_backend.tune.measure import capture, microseconds
from flashinfer_backend.worker.prebuild_triton import collect

SHAPES = "qkv=6144x4096,o=4096x4096,gate_up=28672x4096,down=4096x14336"  # of an 8B Llama
TOKENS = (1, 8, 16, 32, 48, 64, 128, 256)
QUICK = (1, 16, 64)
SMS = 132
BYTES = 160 << 20  # of weights that a graph goes through: three times an H200's L2
BANDWIDTH = 4.8e12
AGREES = 2e-2  # most relative error beside the weight written out; rounding that is 3e-3


def candidates(role: Role, tokens: int, shape: Shape) -> list[Tiling]:
    """Tilings worth a try."""
    gated, adds = role == "gate_up", role in ("o", "down")
    tile = min(64, max(16, 1 << (tokens - 1).bit_length()))
    found = []
    for rows, warps in ((64, 4), (128, 4), (128, 8)):
        programs = shape[0] // rows // (2 if gated else 1) * -(-tokens // tile)
        for split, stages, early in itertools.product((1, 2, 4, 8, 16), (4, 6), (True, False)):
            if warps == 4 < rows // 16 and tile == 64:
                continue  # too few registers
            if (split > 1 and gated) or (not early and stages == 6) or not 64 <= programs * split <= 1600:
                continue
            for fuse_norm in (False, True) if split == 1 and not adds and tokens <= 16 else (False,):
                tiling = Tiling(
                    tokens=tile, rows=rows, inner=128, split=split, stages=stages, warps=warps, early=early,
                    fuse_norm=fuse_norm,
                )  # fmt: skip
                if tiling.fits(shape, gated, tokens):
                    found.append(tiling)
    return found


def cuda_candidates(tokens: int, shape: Shape) -> list[Int4Tile]:
    """Tiles of the CUDA kernel worth a try: 2 to 8 warps a block, of which an SM gets 4 to 32, and at most a
    third more tokens than the smallest that has room for all. From 48 tokens on with every split: few of the
    large tiles fill the SMs."""
    found = []
    sizes = [tile_tokens for tile_tokens, *_ in TILES]
    size = min((each for each in sizes if each >= tokens), default=max(sizes))
    splits, depths = ((1, 2, 4, 8), (2, 3, 4)) if size <= 32 else (range(1, LARGEST_CLUSTER + 1), (2, 3))
    for (tile_tokens, warp_rows, row_warps), warps, split, stages in itertools.product(
        TILES, (2, 4, 8), splits, depths
    ):
        teams = max(1, warps // row_warps)
        tile = Int4Tile(tile_tokens, warp_rows, row_warps, teams, split, stages)
        programs = shape[0] // (warp_rows * row_warps) * -(-tokens // tile_tokens) * split
        steps = shape[1] // 128 // split // teams
        if not size <= tile_tokens <= size * 4 / 3 or not tile.fits(shape) or teams * row_warps != warps:
            continue
        if steps > 1 and 4 <= programs * warps / SMS <= 32:
            found.append(tile)
    return found


class Bench:
    """Products of one role with several weights. device "meta": nothing runs."""

    def __init__(self, role: Role, shape: Shape, group: str, symmetric: bool, device: str) -> None:
        self.role, self.shape, self.device = role, shape, device
        copies = -(-BYTES // (shape[0] * shape[1] // 2)) if device == "cuda" else 1
        format = f"int4_{'packed' if symmetric else 'awq'}_{group}"
        self.weights = [self._weight(format) for _ in range(copies)]
        self.norm = torch.ones(shape[1], dtype=torch.bfloat16, device=device)

    def _weight(self, format: str) -> Weight:
        weight = Weight.empty(self.role, self.shape, format, torch.bfloat16, torch.device(self.device))
        if self.device == "cuda":
            weight.format.fill(weight, torch.randn(self.shape, dtype=torch.bfloat16, device="cuda") * 0.02)
        return weight

    def fused(self, x: torch.Tensor, out: torch.Tensor, weight: Weight, tiling: Tiling) -> torch.Tensor:
        """The Triton product of one layer."""
        from flashinfer_backend.ops import triton_int4

        gated, adds = self.role == "gate_up", self.role in ("o", "down")
        norm, eps = (self.norm, 1e-5) if tiling.fuse_norm and not adds else (None, 0.0)
        if norm is None and not adds and self.device == "cuda":
            import flashinfer

            x = flashinfer.rmsnorm(x, self.norm, 1e-5, enable_pdl=True)
        stored = weight.data, weight.scale, weight.zero
        return triton_int4.linear(x, *stored, tiling, norm, eps, None, out if adds else None, gated)

    def by_cuda(self, x: torch.Tensor, out: torch.Tensor, weight: Weight, tile: Int4Tile) -> torch.Tensor:
        """The CUDA kernel's product of one layer."""
        import flashinfer

        from flashinfer_backend.ops import int4_linear

        adds = self.role in ("o", "down")
        if not adds:
            x = flashinfer.rmsnorm(x, self.norm, 1e-5, enable_pdl=True)
        stored, gated = (weight.data, weight.scale, weight.zero), self.role == "gate_up"
        return int4_linear.linear(x, *stored, tile, residual=out if adds else None, gated=gated)

    def takes(self, tile: Int4Tile) -> bool:
        """Whether the CUDA kernel has this tile here."""
        from flashinfer_backend.ops import int4_linear

        weight = self.weights[0]
        return int4_linear.takes(weight.data, weight.scale, weight.zero, tile)

    def dense(self, x: torch.Tensor, out: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        """cuBLAS's product of one layer."""
        if self.role in ("o", "down"):
            return out.addmm_(x, matrix.t())
        import flashinfer

        product = F.linear(flashinfer.rmsnorm(x, self.norm, 1e-5, enable_pdl=True), matrix)
        return flashinfer.silu_and_mul(product, enable_pdl=True) if self.role == "gate_up" else product

    def times(self, tokens: int, tilings: list[Tiling | Int4Tile | None]) -> list[float]:
        """Microseconds of a product: by each tiling or tile (None, and what fails or gives something else:
        inf), written out in 16 bits, in bfloat16."""
        from flashinfer_backend.ops import triton_int4

        rows, inner = self.shape
        x = torch.randn(tokens, inner, dtype=torch.bfloat16, device="cuda")
        out = torch.zeros(tokens, rows, dtype=torch.bfloat16, device="cuda")
        matrices = [torch.randn(rows, inner, dtype=torch.bfloat16, device="cuda") for _ in self.weights[::4]]

        def written(weight: Weight) -> object:
            stored = weight.data, weight.scale, weight.zero
            return self.dense(x, out, triton_int4.dequantise(*stored, x.dtype))

        expected = written(self.weights[0]).float()
        out.zero_()

        def agrees(tile: Int4Tile) -> bool:
            try:
                product = self.by_cuda(x, out, self.weights[0], tile)
            except RuntimeError as refused:  # a launch: clusters of this size, or its shared memory
                print(f"  left out: {refused}: {tile}", flush=True)
                return False
            error = (product.float() - expected).norm() / expected.norm()
            if not error <= AGREES:
                print(f"  WRONG by {error:.2g}: {tile}", flush=True)
            return bool(error <= AGREES)

        def of(tiling: Tiling | Int4Tile) -> Callable[[], object]:
            if isinstance(tiling, Tiling):
                return lambda: [self.fused(x, out, weight, tiling) for weight in self.weights]
            return lambda: [self.by_cuda(x, out, weight, tiling) for weight in self.weights]

        tilings = [None if isinstance(each, Int4Tile) and not agrees(each) else each for each in tilings]
        works = [of(tiling) for tiling in tilings if tiling is not None]
        works += [
            lambda: [written(weight) for weight in self.weights],
            lambda: [self.dense(x, out, matrix) for matrix in matrices],
        ]
        counts = [len(self.weights)] * (len(works) - 1) + [len(matrices)]
        graphs, ran = [], []
        for work in works:
            try:
                graphs.append(capture(work))
                ran.append(True)
            except Exception as error:  # Triton's own: too much shared memory
                print(f"  left out: {type(error).__name__}: {error}")
                ran.append(False)
        measured = iter(microseconds(graphs))
        each = [next(measured) / count if ok else float("inf") for ok, count in zip(ran, counts, strict=True)]
        some = iter(each)
        return [float("inf") if tiling is None else next(some) for tiling in tilings] + list(some)


def compile_all(benches: list[Bench], sizes: tuple[int, ...]) -> None:
    """Every candidate's kernel, in threads."""

    def calls() -> None:
        for bench in benches:
            for tokens in sizes:
                x = torch.empty(tokens, bench.shape[1], dtype=torch.bfloat16, device="meta")
                out = x.new_empty(tokens, bench.shape[0])
                for tiling in candidates(bench.role, tokens, bench.shape):
                    bench.fused(x, out, bench.weights[0], tiling)

    variants = collect(calls)
    index = torch.cuda.current_device()
    print(f"compiling {len(variants)} kernels", flush=True)
    with ThreadPoolExecutor(os.cpu_count(), initializer=lambda: torch.cuda.set_device(index)) as threads:
        list(threads.map(lambda variant: variant[0].preload(variant[1]), variants))


def line(tokens: int, row: list[float]) -> str:
    return f"  {tokens:4d} " + " | ".join(f"{us:7.1f}" for us in row)


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=SHAPES, help="role=NxK of the weights, separated by commas")
    parser.add_argument("--group", default="128", choices=["32", "64", "128", "row"])
    parser.add_argument("--symmetric", action="store_true", help="without zero points")
    parser.add_argument(
        "--subtract-from", type=integer(1), metavar="TOKENS",
        help="of a tile from which on zero points are subtracted from the elements (default: as served)",
    )  # fmt: skip
    parser.add_argument(
        "--kernel", choices=["both", "cuda"], default="both", help="cuda: no other tilings of Triton's"
    )
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK} tokens")
    options = parser.parse_args()
    if options.symmetric and options.subtract_from is not None:
        parser.error("--subtract-from is of zero points, which --symmetric weights have not: leave out one")
    require_cuda(parser)
    from flashinfer_backend.ops import triton_int4

    triton_int4.SUBTRACT_FROM = options.subtract_from or triton_int4.SUBTRACT_FROM
    sizes = QUICK if options.quick else TOKENS
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    shapes: dict[Role, Shape] = {}
    for item in options.shapes.split(","):
        role, _, shape = item.partition("=")
        rows, inner = map(int, shape.split("x"))
        shapes[role] = rows, inner  # type: ignore[index]
    kind = options.group, options.symmetric
    if options.kernel == "both":
        compile_all([Bench(role, shape, *kind, "meta") for role, shape in shapes.items()], sizes)
    products: dict[str, list[Int4Product]] = {}
    totals = {tokens: [0.0] * 5 for tokens in sizes}
    for role, shape in shapes.items():
        bench, steps = Bench(role, shape, *kind, "cuda"), []
        floor = shape[0] * shape[1] / 2 / BANDWIDTH * 1e6
        print(f"{role} {list(shape)}: tokens, us of bfloat16 | unmeasured tiling | fastest | fastest tile | "
              f"written out; floor {floor:.1f}")  # fmt: skip
        for tokens in sizes:
            plain = untuned_int4(tokens, *shape, role == "gate_up")
            tilings = [plain, *(candidates(role, tokens, shape) if options.kernel == "both" else ())]
            tiles = [tile for tile in cuda_candidates(tokens, shape) if bench.takes(tile)]
            *each, written, dense = bench.times(tokens, [*tilings, *tiles])
            of_tilings, of_tiles = each[: len(tilings)], [*each[len(tilings) :], float("inf")]
            by_triton, by_cuda = min(of_tilings), min(of_tiles)
            tiling = tilings[of_tilings.index(by_triton)] if by_triton < written else None
            tile = tiles[of_tiles.index(by_cuda)] if by_cuda < min(by_triton, written) else None
            row = [dense, of_tilings[0], by_triton, by_cuda, written]
            print(line(tokens, row), tiling, tile, flush=True)
            totals[tokens] = [a + b for a, b in zip(totals[tokens], row, strict=True)]
            steps.append(Int4Step(tokens, tiling, tile))
        while steps and steps[-1].tiling is None and steps[-1].tile is None:
            steps.pop()
        products[role] = [Int4Product(shape, tuple(steps))]
        del bench
        torch.cuda.empty_cache()
    print("all together, of the same:")
    for tokens, row in totals.items():
        print(line(tokens, row))
    print(msgspec.json.encode({"int4": products}).decode())


if __name__ == "__main__":
    main()
