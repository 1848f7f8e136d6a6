# SPDX-License-Identifier: Apache-2.0
"""Which of cuBLAS's two interfaces a product takes: each picks kernels by rules of its own.

Neither is the better one, so this is a table of what measured faster, for the products of Llama-3.1-8B's
shape that triton_linear.py and gated_linear.py leave to cuBLAS (perf_configs/kernels/bench_cublas.py measures
it, docs/performance.md has the times). Other shapes take PyTorch's default.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# Tokens that were measured. What lies between them goes with the next larger one.
_SIZES = (*range(80, 513, 16), *range(544, 1025, 32))
# weight [N, K] -> tokens at which cublasLt was faster, by 1.5 % or more, on an H200 with cuBLAS 13.0.
_LT: dict[tuple[int, int], tuple[int, ...]] = {
    (6144, 4096): (208, 272, 288, 336, 400),
    (4096, 4096): (80, 96, 112, 144, 160, 176, 192, 208, 224, 272, 288, 336, 384, 400, 416, 464, 576),
    (4096, 14336): (80, 96, 112, 224, 256, 336, 384, 400, 416, 448, 480, 576),
}


def takes_lt(rows: int, inner: int, tokens: int) -> bool:
    """Whether x[tokens, inner] @ weight[rows, inner].T is faster with cublasLt."""
    if not _SIZES[0] - 16 < tokens <= _SIZES[-1]:
        return False
    return _SIZES[bisect_left(_SIZES, tokens)] in _LT.get((rows, inner), ())


@contextmanager
def library(weight: Tensor, tokens: int) -> Iterator[None]:
    """Products of `tokens` rows with weight[N, K] inside the block use the faster interface."""
    rows, inner = weight.shape
    if not takes_lt(rows, inner, tokens):
        yield
        return
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)
