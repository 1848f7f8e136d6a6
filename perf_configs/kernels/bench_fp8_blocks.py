# SPDX-License-Identifier: Apache-2.0
"""Products with FP8 weights of 128x128 blocks: which Triton tile is the fastest, and from how many tokens on
cuBLAS is.

    python perf_configs/kernels/bench_fp8_blocks.py [--shapes qkv=6144x4096,...] [--tokens 1,16,...]
        [--limit 300] [--flashinfer 180]

Per role and number of tokens: microseconds in a CUDA graph over different weights of bfloat16 by cuBLAS, of
FP8 with scales by row as this device multiplies them, and of blocks by Triton with the tile that nobody
measured, with the fastest one, and by cuBLAS. What comes before a product (norm, quantising) and follows it
(residual, activation) is part of each. The table comes last, with "fp8_blocks" and "fp8_blocks_by_cublas" for
the device's file in core/tuned. After `--limit` seconds, what is left is not measured.

`--flashinfer SECONDS` adds FlashInfer's product, in a process of its own that ends after so many seconds: it
compiles a module for minutes, then a kernel for some ten ranges of tokens of each shape.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from msgspec.structs import replace

from flashinfer_backend.core import tuned
from flashinfer_backend.core.arguments import require_cuda, seconds, some_seconds
from flashinfer_backend.core.tuned import BLOCK_TILES, BlockTile, Role, Shape, Tuned
from flashinfer_backend.tune.search import STEP_FASTER, block_tiles

if TYPE_CHECKING:
    from flashinfer_backend.ops.weight import Weight

SHAPES = "qkv=6144x4096,o=4096x4096,gate_up=28672x4096,down=4096x14336"  # of an 8B Llama
TOKENS = "1,16,64,128,256,512,1024,2048,4096"
BYTES = 160 << 20  # of weights that a graph goes through: three times an H200's L2
COLUMNS = ("bfloat16", "by row", "unmeasured tile", "fastest tile", "cuBLAS", "FlashInfer")
Times = dict[tuple[Role, int], dict[str, float]]  # by column


class Bench:
    """Products of one role with several weights. device "meta": nothing runs."""

    def __init__(self, role: Role, shape: Shape, device: str = "cuda") -> None:
        self.role, self.shape, self.device = role, shape, device
        self.rows = self._weights("fp8_token")
        self.blocks = self._weights("fp8_block")
        self.dense = [weight.data for weight in self._weights("dense")]
        self.norm_weight = torch.ones(shape[1], dtype=torch.bfloat16, device=device)

    def _weights(self, format: str) -> list[Weight]:
        from flashinfer_backend.ops.weight import Weight

        copies = max(2, -(-BYTES // (self.shape[0] * self.shape[1]))) if self.device == "cuda" else 1
        found = []
        for _ in range(copies):
            weight = Weight.empty(self.role, self.shape, format, torch.bfloat16, torch.device(self.device))
            if self.device == "cuda":
                values = torch.randn(self.shape, dtype=torch.bfloat16, device="cuda")
                weight.format.fill(weight, values * self.shape[1] ** -0.5)
            found.append(weight)
        return found

    def inputs(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x[T, K], and the residual of products that have one."""
        kind: dict[str, Any] = {"dtype": torch.bfloat16, "device": self.device}
        draw = torch.randn if self.device == "cuda" else torch.empty
        residual = draw(tokens, self.shape[0], **kind) if self.role in ("o", "down") else None
        return draw(tokens, self.shape[1], **kind), residual

    def fp8(self, x: torch.Tensor, residual: torch.Tensor | None, weight: Weight) -> torch.Tensor:
        """A layer's product, by the numbers in use."""
        from flashinfer_backend.ops import cuda_fp8
        from flashinfer_backend.ops.triton_fp8 import Norm

        norm = Norm(self.norm_weight, 1e-5) if residual is None else None
        return cuda_fp8.product(x, weight, None, residual, self.role == "gate_up", norm)

    def bfloat16(self, x: torch.Tensor, out: torch.Tensor | None, matrix: torch.Tensor) -> torch.Tensor:
        """The same by cuBLAS in 16 bits; the residual is added in place."""
        import flashinfer

        if out is not None:
            return out.addmm_(x, matrix.t())
        normed = flashinfer.rmsnorm(x, self.norm_weight, 1e-5, enable_pdl=True)
        product = torch.nn.functional.linear(normed, matrix)
        return flashinfer.silu_and_mul(product, enable_pdl=True) if self.role == "gate_up" else product

    def by_flashinfer(self, x: torch.Tensor, residual: torch.Tensor | None, weight: Weight) -> torch.Tensor:
        """The same by FlashInfer's product."""
        import flashinfer
        from flashinfer.gemm import fp8_blockscale_gemm_sm90

        from flashinfer_backend.ops import triton_fp8

        if residual is None:
            x = flashinfer.rmsnorm(x, self.norm_weight, 1e-5, enable_pdl=True)
        product = fp8_blockscale_gemm_sm90(x, weight.data, None, weight.scale.contiguous())
        gated = self.role == "gate_up"
        plain = residual is None and not gated
        return product if plain else triton_fp8.finish(product, None, None, None, residual, gated)

    def with_tile(self, tile: BlockTile | None) -> Tuned:
        """The device's numbers with this tile for all products with blocks, or cuBLAS."""
        from flashinfer_backend.ops import device

        by_cublas: dict[Role, int] = {self.role: 1} if tile is None else {}
        tiles = {self.role: (replace(tile or BLOCK_TILES[-1], tokens=None),)}
        return replace(device.active(), fp8_blocks=tiles, fp8_blocks_by_cublas=by_cublas)

    def times(self, tokens: int, works: Sequence[tuple[str, Tuned | None]]) -> list[float]:
        """Microseconds of a product, infinite where it cannot run: of blocks by each of these numbers, and
        where there are none, of what the name says."""
        from flashinfer_backend.ops import device
        from flashinfer_backend.tune.measure import capture, microseconds

        x, residual = self.inputs(tokens)
        kinds: dict[str, tuple[Callable[..., object], list[Any]]] = {
            "bfloat16": (self.bfloat16, self.dense),
            "by row": (self.fp8, self.rows),
            "FlashInfer": (self.by_flashinfer, self.blocks),
        }
        graphs: list[torch.cuda.CUDAGraph] = []
        ran: dict[int, int] = {}  # which of the works -> products of a graph
        for index, (name, numbers) in enumerate(works):
            product, weights = kinds.get(name, (self.fp8, self.blocks))

            def body(product: Callable[..., object] = product, weights: list[Any] = weights) -> None:
                for weight in weights:
                    product(x, residual, weight)

            try:
                with device.use(numbers or device.active()):
                    graphs.append(capture(body))
            except Exception as error:  # Triton's own: too much shared memory; cuBLAS's: no Hopper GPU
                print(f"  {self.role}, {tokens} tokens, {name}: left out: {_short(error)}", flush=True)
            else:
                ran[index] = len(weights)
        found = [math.inf] * len(works)
        for (index, count), us in zip(ran.items(), microseconds(graphs), strict=True):
            found[index] = us / count
        return found


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]


def compile_all(shapes: dict[Role, Shape], sizes: Sequence[int], candidates: bool) -> None:
    """The Triton kernels, in threads: of candidates for products with blocks, or of what comes before."""
    from flashinfer_backend.ops import device
    from flashinfer_backend.worker.prebuild_triton import collect

    def calls() -> None:
        for role, shape in shapes.items():
            bench = Bench(role, shape, "meta")
            for tokens in sizes:
                x, residual = bench.inputs(tokens)
                if not candidates:
                    bench.fp8(x, residual, bench.rows[0])
                for tile in block_tiles(shape, tokens, None) if candidates else BLOCK_TILES:
                    with device.use(bench.with_tile(tile)):
                        bench.fp8(x, residual, bench.blocks[0])

    began, variants = time.monotonic(), collect(calls)
    index = torch.cuda.current_device()
    failed = 0

    def preload(variant: tuple[Any, str]) -> None:
        nonlocal failed
        try:
            variant[0].preload(variant[1])
        except Exception:  # which the product itself says once more
            failed += 1

    workers = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(workers, initializer=lambda: torch.cuda.set_device(index)) as threads:
        list(threads.map(preload, variants))
    took = time.monotonic() - began
    print(f"compiled {len(variants)} kernels, of which {failed} failed, in {took:.0f} s", flush=True)


def unmeasured(tokens: int) -> BlockTile:
    """What a device without numbers takes."""
    return next(tile for tile in BLOCK_TILES if tile.tokens is None or tokens <= tile.tokens)


def measure(
    shapes: dict[Role, Shape], sizes: Sequence[int], end: float
) -> tuple[Times, dict[Role, dict[int, BlockTile]]]:
    """The table, and each role's fastest tiles by tokens. First what needs few kernels; then the tiles, all
    of them and cuBLAS in turns."""
    found: Times = {}
    tiles: dict[Role, dict[int, BlockTile]] = {role: {} for role in shapes}
    compile_all(shapes, sizes, candidates=False)
    benches = {role: Bench(role, shape) for role, shape in shapes.items()}
    for tokens in sizes:
        for role, bench in benches.items():
            if time.monotonic() > end:
                continue
            works = [
                ("bfloat16", None),
                ("by row", None),
                ("unmeasured tile", bench.with_tile(unmeasured(tokens))),
                ("cuBLAS", bench.with_tile(None)),
            ]
            times = bench.times(tokens, works)
            found[role, tokens] = {name: us for (name, _), us in zip(works, times, strict=True)}
            line = ", ".join(f"{name} {us:.1f}" for name, us in found[role, tokens].items())
            print(f"{role}, {tokens} tokens: {line}", flush=True)
    if time.monotonic() < end:
        compile_all(shapes, sizes, candidates=True)
    for tokens in sizes:
        for role, bench in benches.items():
            if time.monotonic() > end:
                continue
            tried = [replace(unmeasured(tokens), tokens=None), *block_tiles(bench.shape, tokens, None)]
            works = [(str(tile), bench.with_tile(tile)) for tile in tried]
            *each, cublas = bench.times(tokens, [*works, ("cuBLAS", bench.with_tile(None))])
            best = min(range(len(tried)), key=each.__getitem__)
            tiles[role][tokens] = tried[best]
            columns = {"unmeasured tile": each[0], "fastest tile": each[best], "cuBLAS": cublas}
            found[role, tokens] = found.get((role, tokens), {}) | columns
            print(f"{role}, {tokens} tokens: {each[best]:.1f} of {len(tried)}: {tried[best]}", flush=True)
    return found, tiles


def entry(
    found: Times, tiles: dict[Role, dict[int, BlockTile]], roles: Sequence[Role], sizes: Sequence[int]
) -> dict[str, Any]:
    """For a device's file. cuBLAS multiplies above the largest size at which it is not faster, as the tuner
    has it; a size that was not measured is one at which it is not."""
    by_tile: dict[Role, tuple[BlockTile, ...]] = {}
    by_cublas: dict[Role, int] = {}
    for role in roles:
        for index in reversed(range(len(sizes))):
            times = found.get((role, sizes[index]), {})
            triton = min(times.get(name, math.inf) for name in ("unmeasured tile", "fastest tile"))
            if not times.get("cuBLAS", math.inf) < STEP_FASTER * triton:
                break
            by_cublas[role] = sizes[index - 1] + 1 if index else 1
        fewest = by_cublas.get(role, math.inf)
        steps: list[BlockTile] = []
        for tokens in sorted(tiles[role]):
            tile = replace(tiles[role][tokens], tokens=tokens)
            if tokens < fewest:
                same = steps and replace(steps[-1], tokens=tokens) == tile
                steps[len(steps) - 1 if same else len(steps) :] = [tile]
        if steps:
            by_tile[role] = (*steps[:-1], replace(steps[-1], tokens=None))
    numbers = replace(tuned.fallback(), fp8_blocks=by_tile, fp8_blocks_by_cublas=by_cublas)  # checks them
    return {"fp8_blocks": numbers.fp8_blocks, "fp8_blocks_by_cublas": numbers.fp8_blocks_by_cublas}


def flashinfer_beside(options: argparse.Namespace, seconds: float) -> Times:
    """FlashInfer's times, as far as a process of its own gets in so many seconds."""
    command = [sys.executable, __file__, "--shapes", options.shapes, "--tokens", options.tokens]
    child = subprocess.Popen(
        [*command, "--only-flashinfer"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert child.stdout is not None
    over = threading.Event()

    def end() -> None:
        over.set()
        os.killpg(child.pid, signal.SIGKILL)  # with its compilers

    timer = threading.Timer(seconds, end)
    timer.start()
    found: Times = {}
    for line in child.stdout:
        if line.startswith("{"):
            one = json.loads(line)
            found[one["role"], one["tokens"]] = {"FlashInfer": one["us"]}
        else:
            print(line, end="", flush=True)
    status = child.wait()
    timer.cancel()
    print("FlashInfer: " + (f"ended after {seconds:.0f} s" if over.is_set() else f"exit status {status}"))
    return found


def only_flashinfer(shapes: dict[Role, Shape], sizes: Sequence[int]) -> None:
    benches = {role: Bench(role, shape) for role, shape in shapes.items()}
    for tokens in sorted(sizes, reverse=True):  # those that cuBLAS may lose first
        for role, bench in benches.items():
            began = time.monotonic()
            (us,) = bench.times(tokens, [("FlashInfer", None)])
            print(f"FlashInfer, {role}, {tokens} tokens: {time.monotonic() - began:.1f} s", flush=True)
            if math.isfinite(us):
                print(json.dumps({"role": role, "tokens": tokens, "us": us}), flush=True)


def try_cublas() -> None:
    """Whether cuBLAS multiplies what it is not asked for: blocks that are not full, and a bias."""
    from flashinfer_backend.ops import cuda_fp8, fp8, triton_fp8
    from flashinfer_backend.ops.weight import Weight

    kinds = torch.nn.functional.ScalingType
    for rows, with_bias in ((2112, False), (1008, False), (2048, True)):
        weight = Weight.empty("o", (rows, 640), "fp8_block", torch.bfloat16, torch.device("cuda"))
        weight.format.fill(weight, torch.randn(rows, 640, device="cuda") * torch.rand(rows, 1, device="cuda"))
        x = torch.randn(16, 640, device="cuda").bfloat16()
        bias = torch.randn(rows, device="cuda").bfloat16() if with_bias else None
        expected = weight.format.product(x.float(), weight, bias)
        elements, scales = triton_fp8.quantise_groups(x)
        what = f"{rows} rows" + (" and a bias" if with_bias else "")
        try:
            if with_bias:
                found = torch.nn.functional.scaled_mm(
                    elements, weight.data.t(), scales, kinds.BlockWise1x128,
                    fp8.cublas_block_scales(weight.scale), kinds.BlockWise128x128, bias=bias,
                )  # fmt: skip
            else:
                found = cuda_fp8.blocks_by_cublas(elements, scales, weight)
            error = float((found.float() - expected).norm() / expected.norm())
            print(f"cuBLAS with {what}: relative error {error:.1e}")
        except Exception as error:
            print(f"cuBLAS with {what}: {_short(error)}")


def print_table(found: Times, tiles: dict[Role, dict[int, BlockTile]], sizes: Sequence[int]) -> None:
    print("\n| product | tokens | " + " | ".join(COLUMNS) + " | tile, rows, split, stages, warps |")
    print("|---|---:|" + "---:|" * len(COLUMNS) + "---|")
    for role in tiles:
        for tokens in sizes:
            times, tile = found.get((role, tokens), {}), tiles[role].get(tokens)
            cells = [f"{times[name]:.1f}" if name in times else "-" for name in COLUMNS]
            shown = str(msgspec.structs.astuple(tile)[1:]) if tile else "-"
            print(f"| {role} | {tokens} | " + " | ".join(cells) + f" | {shown} |")


def parse_shapes(text: str) -> dict[Role, Shape]:
    shapes: dict[Role, Shape] = {}
    for item in text.split(","):
        role, _, shape = item.partition("=")
        rows, inner = map(int, shape.split("x"))
        shapes[role] = rows, inner
    return shapes


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=SHAPES, help="role=NxK of the weights, separated by commas")
    parser.add_argument("--tokens", default=TOKENS, help="separated by commas")
    parser.add_argument("--limit", type=some_seconds, default=300, metavar="SECONDS", help="default 300")
    parser.add_argument(
        "--flashinfer", type=seconds, default=0, metavar="SECONDS", help="at most; without, not measured"
    )
    parser.add_argument("--only-flashinfer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    require_cuda(parser)
    end = time.monotonic() + options.limit
    shapes, sizes = parse_shapes(options.shapes), sorted(set(map(int, options.tokens.split(","))))
    if options.only_flashinfer:
        only_flashinfer(shapes, sizes)
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    try_cublas()
    found, tiles = measure(shapes, sizes, end)
    left = min(options.flashinfer, end - time.monotonic())
    if options.flashinfer and left > 0:
        for key, times in flashinfer_beside(options, left).items():
            found[key] = found.get(key, {}) | times
    elif options.flashinfer:
        print(f"FlashInfer: not measured, the {options.limit:g} s of --limit are over")
    print_table(found, tiles, sizes)
    missing = [(role, tokens) for tokens in sizes for role in shapes if tokens not in tiles[role]]
    if missing:
        print(f"out of time: no tiles of {', '.join(f'{role} {tokens}' for role, tokens in missing)}")
    print(msgspec.json.encode(entry(found, tiles, list(shapes), sizes)).decode())


if __name__ == "__main__":
    main()
