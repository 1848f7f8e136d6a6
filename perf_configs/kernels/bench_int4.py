# SPDX-License-Identifier: Apache-2.0
"""Products with weights of 4 bits: which tiling is the fastest, and from how many tokens on writing the
weight out in 16 bits is.

    python perf_configs/kernels/bench_int4.py [--shapes qkv=6144x4096,...] [--group 128] [--symmetric]

Per role and number of tokens: microseconds in a CUDA graph over different weights of bfloat16 by cuBLAS, of 4
bits as they are cut up without measured numbers, by the fastest tiling, and written out first; and how long
reading the 4 bits takes at 4.8 TB/s. What follows a product (residual, activation) is part of each; a norm is
part of the tilings that fuse it, and run before the others. At the end it prints "int4" for the device's file
in core/tuned.
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
from flashinfer_backend.core.tuned import Product, Role, Shape, Step, Tiling
from flashinfer_backend.ops.tilings import untuned_int4
from flashinfer_backend.ops.weight import Weight
from flashinfer_backend.tune.measure import capture, microseconds
from flashinfer_backend.worker.prebuild_triton import collect

SHAPES = "qkv=6144x4096,o=4096x4096,gate_up=28672x4096,down=4096x14336"  # of an 8B Llama
TOKENS = (1, 16, 32, 64, 128, 256)
QUICK = (1, 16, 64)
BYTES = 160 << 20  # of weights that a graph goes through: three times an H200's L2
BANDWIDTH = 4.8e12


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

    def dense(self, x: torch.Tensor, out: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        """cuBLAS's product of one layer."""
        if self.role in ("o", "down"):
            return out.addmm_(x, matrix.t())
        import flashinfer

        product = F.linear(flashinfer.rmsnorm(x, self.norm, 1e-5, enable_pdl=True), matrix)
        return flashinfer.silu_and_mul(product, enable_pdl=True) if self.role == "gate_up" else product

    def times(self, tokens: int, tilings: list[Tiling | None]) -> list[float]:
        """Microseconds of a product: by each tiling (None: inf), written out in 16 bits, in bfloat16."""
        from flashinfer_backend.ops import triton_int4

        rows, inner = self.shape
        x = torch.randn(tokens, inner, dtype=torch.bfloat16, device="cuda")
        out = torch.zeros(tokens, rows, dtype=torch.bfloat16, device="cuda")
        matrices = [torch.randn(rows, inner, dtype=torch.bfloat16, device="cuda") for _ in self.weights[::4]]

        def written(weight: Weight) -> object:
            stored = weight.data, weight.scale, weight.zero
            return self.dense(x, out, triton_int4.dequantise(*stored, x.dtype))

        def of(tiling: Tiling) -> Callable[[], object]:
            return lambda: [self.fused(x, out, weight, tiling) for weight in self.weights]

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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=SHAPES, help="role=NxK of the weights, separated by commas")
    parser.add_argument("--group", default="128", choices=["32", "64", "128", "row"])
    parser.add_argument("--symmetric", action="store_true", help="without zero points")
    parser.add_argument(
        "--subtract-from", type=integer(1), metavar="TOKENS",
        help="of a tile from which on zero points are subtracted from the elements (default: as served)",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK} tokens")
    options = parser.parse_args()
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
    compile_all([Bench(role, shape, *kind, "meta") for role, shape in shapes.items()], sizes)
    products: dict[str, list[Product]] = {}
    for role, shape in shapes.items():
        bench, steps = Bench(role, shape, *kind, "cuda"), []
        floor = shape[0] * shape[1] / 2 / BANDWIDTH * 1e6
        print(f"{role} {list(shape)}: tokens, us of bfloat16 | unmeasured tiling | fastest | written out; "
              f"floor {floor:.1f}")  # fmt: skip
        for tokens in sizes:
            tried = candidates(role, tokens, shape)
            plain = untuned_int4(tokens, *shape, role == "gate_up")
            *each, unmeasured, written, dense = bench.times(tokens, [*tried, plain])
            best = min(range(len(tried)), key=each.__getitem__)
            print(f"  {tokens:4d} {dense:7.1f} | {unmeasured:7.1f} | {each[best]:7.1f} | {written:7.1f}  "
                  f"{tried[best]}", flush=True)  # fmt: skip
            steps.append(Step(tokens, tried[best] if each[best] < written else None))
        while steps and steps[-1].tiling is None:
            steps.pop()
        products[role] = [Product(shape, tuple(steps))]
        del bench
        torch.cuda.empty_cache()
    print(msgspec.json.encode({"int4": products}).decode())


if __name__ == "__main__":
    main()
