# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts: what its kernels take, and which tiles are the fastest.

    python perf_configs/kernels/bench_experts.py [--experts 128 --per-token 8 --hidden 2048 --inner 768]
        [--formats dense,fp8_token,fp8_block] [--tokens 1,16,...] [--limit 200]

The shape is Qwen3-30B-A3B's unless options say otherwise. Per format and number of tokens: microseconds of
each kernel and of the whole operation, norm included, in a CUDA graph over several inputs that choose experts
at random, with the tiles that a device without its own takes (default) and with the fastest ones. Each tile's
result is compared with the first one's. The tables come last, with what goes into "experts" of the device's
file in core/tuned. After `--limit` seconds, what is left is not measured.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from client.arguments import integer, integers
from flashinfer_backend.core.arguments import require_cuda, some_seconds
from flashinfer_backend.core.tuned import EXPERT_TILES, ExpertBlock, ExpertTile, Role, Scales, Tuned
from flashinfer_backend.ops.weight import Weight

TOKENS = "1,16,64,128,256,1024,4096,8192"
INPUTS = 8  # with other experts each, so that few tokens' weights are not in L2
# By tokens of a tile: rows, inner, stages, warps. In FP8 as many columns take half of the memory.
FEW = [
    (32, 128, 4, 4), (32, 128, 6, 4), (32, 256, 3, 4), (64, 64, 6, 4), (64, 128, 3, 4), (64, 128, 4, 4),
    (64, 128, 5, 4), (64, 256, 2, 4), (64, 256, 3, 4), (128, 64, 4, 4), (128, 128, 3, 4), (128, 128, 3, 8),
]  # fmt: skip
MORE = [
    (64, 64, 4, 4), (64, 64, 5, 4), (64, 128, 3, 4), (64, 128, 4, 4), (128, 64, 3, 4), (128, 64, 4, 4),
    (128, 64, 4, 8), (128, 128, 2, 8),
]  # fmt: skip
MANY = [
    (64, 64, 4, 4), (64, 64, 4, 8), (64, 128, 3, 8), (128, 64, 3, 4), (128, 64, 3, 8), (128, 64, 4, 8),
    (128, 128, 2, 8), (256, 64, 2, 8),
]  # fmt: skip
BLOCKS = {16: FEW, 32: FEW, 64: MORE, 128: MANY}
FEW_IN_FP8 = [
    (32, 128, 4, 4), (32, 128, 6, 4), (32, 256, 4, 4), (64, 128, 3, 4), (64, 128, 4, 4), (64, 128, 6, 4),
    (64, 256, 3, 4), (64, 256, 4, 4), (128, 128, 3, 4), (128, 128, 4, 8), (128, 256, 2, 8),
]  # fmt: skip
MORE_IN_FP8 = [
    (64, 128, 3, 4), (64, 128, 4, 4), (64, 128, 5, 4), (64, 256, 3, 4), (128, 128, 3, 4), (128, 128, 3, 8),
    (128, 128, 4, 8),
]  # fmt: skip
MANY_IN_FP8 = [
    (64, 128, 3, 4), (64, 128, 3, 8), (64, 128, 4, 8), (128, 64, 4, 8), (128, 128, 2, 8), (128, 128, 3, 8),
    (128, 128, 4, 8),
]  # fmt: skip
BLOCKS_IN_FP8 = {16: FEW_IN_FP8, 32: FEW_IN_FP8, 64: MORE_IN_FP8, 128: MANY_IN_FP8}
SCALES: dict[str, Scales] = {"dense": "none", "fp8_token": "rows", "fp8_block": "blocks"}
PARTS = ("logits", "routing", "gate_up", "down", "sum")
WORST = 2e-2  # relative difference of two tiles' results; larger is wrong


class Shape(NamedTuple):
    experts: int
    per_token: int
    hidden: int
    inner: int

    def pairs(self, tokens: int) -> float:
        """Tokens an expert on average."""
        return tokens * self.per_token / self.experts


class Measured(NamedTuple):
    """Microseconds: of each of PARTS with the fastest tile, of the whole with the default tile and with the
    fastest. distinct: experts that the tokens of an input have, on average."""

    parts: tuple[float, ...]
    default: float
    fastest: float
    tile: ExpertTile
    distinct: float


def blocks_of(tokens: int, format: str) -> list[ExpertBlock]:
    """What to try for a tile of so many tokens; with scales of 128x128 blocks no more rows, and one inner."""
    found = [ExpertBlock(*block) for block in (BLOCKS if format == "dense" else BLOCKS_IN_FP8)[tokens]]
    if not format.startswith("fp8_block"):
        return found
    return [block for block in found if block.inner == 128 and block.rows <= 128]


def sizes_of(pairs: float) -> list[int]:
    """Tokens of the tiles to try where an expert has so many on average."""
    return [
        size for size in BLOCKS if size == 16 > pairs or pairs / 4 <= size <= 4 * pairs or size == 128 < pairs
    ]


class Bench:
    """One layer's experts in a format. device "meta": nothing runs."""

    def __init__(self, shape: Shape, format: str, device: str = "cuda") -> None:
        self.shape, self.format, self.device = shape, format, device
        count, _, hidden, inner = shape
        self.gate_up = self._weight("gate_up", count * 2 * inner, hidden)
        self.down = self._weight("down", count * hidden, inner)
        self.router = self._draw(count, hidden)
        self.norm = torch.ones(hidden, dtype=torch.bfloat16, device=device)

    def _weight(self, role: Role, rows: int, inner: int) -> Weight:
        weight = Weight.empty(role, (rows, inner), self.format, torch.bfloat16, torch.device(self.device))
        if self.device == "cuda":
            for index in range(self.shape.experts):  # quantising all at once would take memory
                values = self._draw(rows // self.shape.experts, inner) * inner**-0.5
                weight.format.fill(weight.part(index, self.shape.experts), values)
        return weight

    def _draw(self, *shape: int) -> Tensor:
        draw = torch.randn if self.device == "cuda" else torch.empty
        return draw(shape, dtype=torch.bfloat16, device=self.device)

    def default(self, tokens: int) -> ExpertTile:
        """What a device without tiles of its own takes."""
        pairs = int(self.shape.pairs(tokens))
        tiles = EXPERT_TILES[SCALES[self.format]]
        return next(tile for tile in tiles if tile.pairs is None or pairs <= tile.pairs)

    def with_tile(self, tile: ExpertTile) -> Tuned:
        """The device's numbers with this tile for any number of tokens."""
        from flashinfer_backend.ops import device

        return replace(device.active(), experts={SCALES[self.format]: (replace(tile, pairs=None),)})

    def whole(self, x: Tensor) -> Tensor:
        """The operation as a layer has it, by the numbers in use."""
        from flashinfer_backend.ops import cuda_ops

        weights = self.router, self.gate_up, self.down
        return cuda_ops.experts_add(x, self.norm, 1e-6, *weights, self.shape.per_token, True, x)

    def compile(self, sizes: Sequence[int]) -> None:
        """What the tiles to try for so many tokens need, in threads."""
        from flashinfer_backend.ops import cuda_experts, device
        from flashinfer_backend.worker.prebuild_triton import collect, compile_together

        meta = Bench(self.shape, self.format, "meta")

        def calls() -> None:
            for tokens in sizes:
                x = meta._draw(tokens, self.shape.hidden)
                logits = torch.empty(tokens, self.shape.experts, device="meta")
                blocks = {size: blocks_of(size, self.format) for size in sizes_of(self.shape.pairs(tokens))}
                tiles = [ExpertTile(None, size, block, block) for size in blocks for block in blocks[size]]
                for tile in (self.default(tokens), *tiles):
                    with device.use(self.with_tile(tile)):
                        weights = meta.gate_up, meta.down
                        cuda_experts.weighted_sum(x, logits, *weights, self.shape.per_token, True, x)

        began, variants = time.monotonic(), collect(calls)
        failed = compile_together(variants)
        took = time.monotonic() - began
        print(f"compiled {len(variants)} kernels, of which {len(failed)} failed, in {took:.0f} s", flush=True)

    def best(self, tokens: int) -> Measured:
        """First the tiles' gate and up, then down, for each size of tile."""
        inputs = [self._draw(tokens, self.shape.hidden) for _ in range(INPUTS)]
        default = self.default(tokens)
        found: dict[ExpertTile, float] = {}
        for size in sizes_of(self.shape.pairs(tokens)):
            blocks = blocks_of(size, self.format)
            start = next(block for block in blocks if block.rows <= 64)
            gates = [ExpertTile(None, size, block, start) for block in blocks]
            times = dict(zip(gates, self._times(inputs, [default, *gates])[1:], strict=True))
            gate = min(times, key=times.__getitem__).gate_up
            downs = [ExpertTile(None, size, gate, block) for block in blocks]
            found |= times | dict(zip(downs, self._times(inputs, [default, *downs])[1:], strict=True))
        tile = min(found, key=found.__getitem__)
        first, second = self._times(inputs, [default, tile])
        return Measured(self._parts(inputs, tile), first, second, tile, self._distinct(inputs))

    def _times(self, inputs: Sequence[Tensor], tiles: Sequence[ExpertTile]) -> list[float]:
        """Microseconds of the whole with each tile, infinite where it cannot run; what differs from the first
        one's result is an error."""
        from flashinfer_backend.ops import device
        from flashinfer_backend.tune.measure import capture, microseconds

        expected: Tensor | None = None
        graphs: dict[int, torch.cuda.CUDAGraph] = {}
        for index, tile in enumerate(tiles):
            try:
                with device.use(self.with_tile(tile)):
                    result = self.whole(inputs[0]).float()
                    graphs[index] = capture(lambda: [self.whole(x) for x in inputs])
            except Exception as error:  # Triton's own, for one: too much shared memory
                why = f"{type(error).__name__}: {str(error)[:60]}"
                print(f"  {tile.tokens} {tile.gate_up} {tile.down}: left out: {why}", flush=True)
                continue
            if expected is None:
                expected = result
            difference = float((result - expected).norm() / expected.norm())
            if not difference < WORST:
                raise RuntimeError(f"{tile} gives something else than {tiles[0]}: {difference:.1e} of it")
        times = [math.inf] * len(tiles)
        for index, us in zip(graphs, microseconds(list(graphs.values())), strict=True):
            times[index] = us / len(inputs)
        return times

    def _parts(self, inputs: Sequence[Tensor], tile: ExpertTile) -> tuple[float, ...]:
        from flashinfer_backend.ops import cuda_experts, triton_experts
        from flashinfer_backend.tune.measure import capture, microseconds

        logits = [cuda_experts.router_logits(x, self.router) for x in inputs]
        tiles = [triton_experts.route(each, self.shape.per_token, True, tile.tokens) for each in logits]

        def products(is_gated: bool, inputs: Sequence[Tensor]) -> list[Tensor]:
            weight = self.gate_up if is_gated else self.down
            return [
                cuda_experts.product_of(x, weight, placed, tile, is_gated)
                for x, placed in zip(inputs, tiles, strict=True)
            ]

        gated = products(True, inputs)
        down = products(False, gated)
        bodies: list[Callable[[], object]] = [
            lambda: [cuda_experts.router_logits(x, self.router) for x in inputs],
            lambda: [triton_experts.route(each, self.shape.per_token, True, tile.tokens) for each in logits],
            lambda: products(True, inputs),
            lambda: products(False, gated),
            lambda: [triton_experts.add_up(y, x, len(x)) for x, y in zip(inputs, down, strict=True)],
        ]
        return tuple(us / len(inputs) for us in microseconds([capture(body) for body in bodies]))

    def _distinct(self, inputs: Sequence[Tensor]) -> float:
        chosen = [(x.float() @ self.router.float().t()).topk(self.shape.per_token).indices for x in inputs]
        return sum(len(each.unique()) for each in chosen) / len(chosen)


def measure(shape: Shape, format: str, sizes: Sequence[int], end: float) -> dict[int, Measured]:
    """By numbers of tokens, as far as the time goes. The weights are gone behind it."""
    bench = Bench(shape, format)
    bench.compile(sizes)
    found: dict[int, Measured] = {}
    for tokens in sizes:
        if time.monotonic() > end:
            print(f"out of time: {format} with {tokens} tokens and more is not measured")
            break
        found[tokens] = bench.best(tokens)
        print(f"{format}, {tokens} tokens: {found[tokens].fastest:.1f} us", flush=True)
    return found


def entry(found: dict[int, Measured], shape: Shape) -> tuple[ExpertTile, ...]:
    """For a device's file: the fastest tile of each number of tokens holds up to it."""
    tiles: list[ExpertTile] = []
    for tokens in sorted(found):
        tile = replace(found[tokens].tile, pairs=int(shape.pairs(tokens)))
        again = tiles and (replace(tiles[-1], pairs=tile.pairs) == tile or tiles[-1].pairs == tile.pairs)
        tiles[len(tiles) - 1 if again else len(tiles) :] = [tile]
    return (*tiles[:-1], replace(tiles[-1], pairs=None))


def print_table(format: str, shape: Shape, found: dict[int, Measured]) -> None:
    print(f"\n{format}, {shape}")
    print("| tokens | " + " | ".join(PARTS) + " | whole, default | whole, fastest | TB/s | TFLOP/s | tile |")
    print("|---:" * (len(PARTS) + 5) + "|---|")
    of_expert = 3 * shape.inner * shape.hidden
    width = 2 if format == "dense" else 1
    for tokens, each in sorted(found.items()):
        cells = [f"{us:.1f}" for us in (*each.parts, each.default, each.fastest)]
        both = each.parts[2] + each.parts[3]
        read = each.distinct * of_expert * width / both * 1e-6
        flops = 2 * tokens * shape.per_token * of_expert / both * 1e-6
        blocks = (msgspec.structs.astuple(block) for block in (each.tile.gate_up, each.tile.down))
        tile = f"{each.tile.tokens} {' '.join(map(str, blocks))}"
        print(f"| {tokens} | " + " | ".join(cells) + f" | {read:.2f} | {flops:.0f} | {tile} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experts", type=integer(1), default=128)
    parser.add_argument("--per-token", type=integer(1), default=8)
    parser.add_argument("--hidden", type=integer(32), default=2048)
    parser.add_argument("--inner", type=integer(32), default=768)
    parser.add_argument("--formats", default="dense,fp8_token,fp8_block", help="separated by commas")
    parser.add_argument("--tokens", type=integers(1), default=TOKENS, help="separated by commas")
    parser.add_argument("--limit", type=some_seconds, default=200, metavar="SECONDS", help="default 200")
    options = parser.parse_args()
    formats = options.formats.split(",")
    if unknown := [name for name in formats if name not in SCALES]:
        parser.error(f"--formats: unknown {', '.join(unknown)}; known: {', '.join(SCALES)}")
    require_cuda(parser)
    end = time.monotonic() + options.limit
    shape = Shape(options.experts, options.per_token, options.hidden, options.inner)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    results = {format: measure(shape, format, options.tokens, end) for format in formats}
    for format, found in results.items():
        if found:
            print_table(format, shape, found)
            print(f'"{SCALES[format]}": {msgspec.json.encode(entry(found, shape)).decode()}')


if __name__ == "__main__":
    main()
