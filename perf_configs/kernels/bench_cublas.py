# SPDX-License-Identifier: Apache-2.0
"""cuBLAS against cublasLt for the products of a layer that are left to them, by number of tokens.

    python perf_configs/kernels/bench_cublas.py [--shapes 6144x4096,4096x4096,4096x14336]

Per weight [N, K]: median microseconds of x[T, K] @ weight.T, added to [T, N] in place where N <= K. A CUDA
graph has the products with WEIGHTS different weights, so that they come from memory; the graphs of the two
interfaces take turns. flashinfer_backend/ops/cublas.py has the sizes at which cublasLt was faster.
"""

from __future__ import annotations

import argparse
import statistics
from itertools import pairwise

import torch
import torch.nn.functional as F

SHAPES = "6144x4096,4096x4096,4096x14336"
SIZES = [*range(80, 513, 16), *range(544, 1025, 32), 1280, 1536, 1792, 2048]
INTERFACES = ("cublas", "cublaslt")
WEIGHTS = 10
REPLAYS = 7  # of each graph
FASTER = 0.985


def capture(interface: str, weights: list[torch.Tensor], x: torch.Tensor, out: torch.Tensor | None):
    """A CUDA graph of x's products with all weights."""

    def products() -> None:
        for weight in weights:
            if out is None:
                F.linear(x, weight)
            else:
                out.addmm_(x, weight.t())

    torch.backends.cuda.preferred_blas_library(interface)
    with torch.cuda.stream(torch.cuda.Stream()):  # warm-up outside the capture
        products()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        products()
    return graph


def microseconds(graphs: list[torch.cuda.CUDAGraph]) -> list[float]:
    """Median time of one product in each graph."""
    for graph in graphs:
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS * len(graphs) + 1)]
    events[0].record()
    for index, event in enumerate(events[1:]):
        graphs[index % len(graphs)].replay()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) / WEIGHTS * 1e3 for a, b in pairwise(events)]
    return [statistics.median(times[n :: len(graphs)]) for n in range(len(graphs))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=SHAPES, help="NxK of the weights, separated by commas")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    kind = {"dtype": torch.bfloat16, "device": "cuda"}
    for shape in options.shapes.split(","):
        rows, inner = map(int, shape.split("x"))
        weights = [torch.randn(rows, inner, **kind) * 0.02 for _ in range(WEIGHTS)]
        print(f"weight [{rows}, {inner}]: tokens, {' / '.join(INTERFACES)} us")
        faster = []
        for tokens in SIZES:
            x = torch.randn(tokens, inner, **kind)
            out = torch.zeros(tokens, rows, **kind) if rows <= inner else None
            older, newer = microseconds([capture(name, weights, x, out) for name in INTERFACES])
            print(f"  {tokens:5d}  {older:7.1f} / {newer:7.1f}", flush=True)
            if newer < FASTER * older:
                faster.append(tokens)
        print(f"  cublasLt is faster at {faster}")


if __name__ == "__main__":
    main()
