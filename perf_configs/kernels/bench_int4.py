# SPDX-License-Identifier: Apache-2.0
"""Products with weights of 4 bits: which tile of the CUDA kernel is the fastest, and from how many tokens on
writing the weight out in 16 bits is.

    python perf_configs/kernels/bench_int4.py [--shapes qkv=6144x4096,...] [--group 128] [--symmetric]

Per role and number of tokens: microseconds in a CUDA graph over different weights of bfloat16 by cuBLAS, of 4
bits by the tile of the rule for shapes without numbers, by the fastest tile, and written out first; and how
long reading the 4 bits takes at 4.8 TB/s. The norm before a product and what follows it (residual,
activation) are part of each. At the end it prints what a layer's products take, and "int4" for the device's
file in core/tuned.
"""

from __future__ import annotations

import argparse
import itertools

import msgspec
import torch
import torch.nn.functional as F

from flashinfer_backend.core.arguments import require_cuda
from flashinfer_backend.core.tuned import LARGEST_CLUSTER, Int4Product, Int4Step, Int4Tile, Role, Shape
from flashinfer_backend.ops.int4_linear import TILES
from flashinfer_backend.ops.tilings import untuned_int4
from flashinfer_backend.ops.weight import Weight
from flashinfer_backend.tune.measure import capture, microseconds

SHAPES = "qkv=6144x4096,o=4096x4096,gate_up=28672x4096,down=4096x14336"  # of an 8B Llama
TOKENS = (1, 8, 16, 32, 48, 64, 128, 256)
QUICK = (1, 16, 64)
SMS = 132
BYTES = 160 << 20  # of weights that a graph goes through: three times an H200's L2
BANDWIDTH = 4.8e12
AGREES = 2e-2  # most relative error beside the weight written out; rounding that is 3e-3


def candidates(tokens: int, shape: Shape) -> list[Int4Tile]:
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
    """Products of one role with several weights."""

    def __init__(self, role: Role, shape: Shape, group: str, symmetric: bool) -> None:
        self.role, self.shape = role, shape
        copies = -(-BYTES // (shape[0] * shape[1] // 2))
        format = f"int4_{'packed' if symmetric else 'awq'}_{group}"
        self.weights = [self._weight(format) for _ in range(copies)]
        self.norm = torch.ones(shape[1], dtype=torch.bfloat16, device="cuda")

    def _weight(self, format: str) -> Weight:
        weight = Weight.empty(self.role, self.shape, format, torch.bfloat16, torch.device("cuda"))
        weight.format.fill(weight, torch.randn(self.shape, dtype=torch.bfloat16, device="cuda") * 0.02)
        return weight

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

    def times(self, tokens: int, tiles: list[Int4Tile]) -> list[float]:
        """Microseconds of a product: by each tile (inf where it fails or gives something else), written out
        in 16 bits, in bfloat16."""
        from flashinfer_backend.ops import triton_int4

        rows, inner = self.shape
        x = torch.randn(tokens, inner, dtype=torch.bfloat16, device="cuda")
        out = torch.zeros(tokens, rows, dtype=torch.bfloat16, device="cuda")
        matrices = [torch.randn(rows, inner, dtype=torch.bfloat16, device="cuda") for _ in self.weights[::4]]

        def written(weight: Weight) -> torch.Tensor:
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

        right = [tile for tile in tiles if agrees(tile)]
        graphs = [
            capture(lambda tile=tile: [self.by_cuda(x, out, weight, tile) for weight in self.weights])
            for tile in right
        ]
        graphs.append(capture(lambda: [written(weight) for weight in self.weights]))
        graphs.append(capture(lambda: [self.dense(x, out, matrix) for matrix in matrices]))
        *of_tiles, of_written, of_dense = microseconds(graphs)
        took = {tile: us / len(self.weights) for tile, us in zip(right, of_tiles, strict=True)}
        each = [took.get(tile, float("inf")) for tile in tiles]
        return [*each, of_written / len(self.weights), of_dense / len(matrices)]


def line(tokens: int, row: list[float]) -> str:
    return f"  {tokens:4d} " + " | ".join(f"{us:7.1f}" for us in row)


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=SHAPES, help="role=NxK of the weights, separated by commas")
    parser.add_argument("--group", default="128", choices=["32", "64", "128", "row"])
    parser.add_argument("--symmetric", action="store_true", help="without zero points")
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK} tokens")
    options = parser.parse_args()
    require_cuda(parser)
    sizes = QUICK if options.quick else TOKENS
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    shapes: dict[Role, Shape] = {}
    for item in options.shapes.split(","):
        role, _, shape = item.partition("=")
        rows, inner = map(int, shape.split("x"))
        shapes[role] = rows, inner
    products: dict[str, list[Int4Product]] = {}
    totals = {tokens: [0.0] * 4 for tokens in sizes}
    for role, shape in shapes.items():
        bench, steps = Bench(role, shape, options.group, options.symmetric), []
        floor = shape[0] * shape[1] / 2 / BANDWIDTH * 1e6
        print(f"{role} {list(shape)}: tokens, us of bfloat16 | the rule's tile | fastest tile | "
              f"written out; floor {floor:.1f}")  # fmt: skip
        for tokens in sizes:
            rule = untuned_int4(tokens, *shape)
            tiles = list(dict.fromkeys([*([rule] if rule else ()), *candidates(tokens, shape)]))
            tiles = [tile for tile in tiles if bench.takes(tile)]
            *each, written, dense = bench.times(tokens, tiles)
            fastest = min(each, default=float("inf"))
            tile = tiles[each.index(fastest)] if fastest < written else None
            row = [dense, each[tiles.index(rule)] if rule in tiles else float("inf"), fastest, written]
            print(line(tokens, row), tile, flush=True)
            totals[tokens] = [a + b for a, b in zip(totals[tokens], row, strict=True)]
            steps.append(Int4Step(tokens, tile))
        while steps and steps[-1].tile is None:
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
