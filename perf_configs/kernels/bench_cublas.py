# SPDX-License-Identifier: Apache-2.0
"""cuBLAS against cublasLt for the products of a layer that are left to them, by number of tokens.

    python perf_configs/kernels/bench_cublas.py [--shapes 6144x4096,4096x4096,4096x14336]

Per weight [N, K]: median microseconds of x[T, K] @ weight.T, added to [T, N] in place where N <= K. A CUDA
graph has the products with WEIGHTS different weights, so that they come from memory; the graphs of the two
interfaces take turns. `python -m flashinfer_backend.tune` measures the same and writes which is faster.
"""

from __future__ import annotations

import argparse

import torch

from flashinfer_backend.core.arguments import require_cuda
from flashinfer_backend.tune.measure import INTERFACES, WEIGHTS, interface_times
from flashinfer_backend.tune.search import FULL, faster_interfaces

SHAPES = "6144x4096,4096x4096,4096x14336"
SIZES = [*FULL.interface_tokens, 1280, 1536, 1792, 2048]


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=SHAPES, help="NxK of the weights, separated by commas")
    options = parser.parse_args()
    require_cuda(parser)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    kind = {"dtype": torch.bfloat16, "device": "cuda"}
    for shape in options.shapes.split(","):
        rows, inner = map(int, shape.split("x"))
        weights = [torch.randn(rows, inner, **kind) * 0.02 for _ in range(WEIGHTS)]
        print(f"weight [{rows}, {inner}]: tokens, {' / '.join(INTERFACES)} us")
        times = {}
        for tokens in SIZES:
            times[tokens] = interface_times(weights, tokens)
            print(f"  {tokens:5d}  {times[tokens][0]:7.1f} / {times[tokens][1]:7.1f}", flush=True)
        print(f"  cublasLt is faster at {list(faster_interfaces((rows, inner), FULL.above, times).lt)}")


if __name__ == "__main__":
    main()
