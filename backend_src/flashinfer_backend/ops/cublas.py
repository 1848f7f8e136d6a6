# SPDX-License-Identifier: Apache-2.0
"""Which of cuBLAS's two interfaces a product takes: each has its own rules for kernels.

Neither is the better one, so what measured faster on this device decides (core/tuned), for the weights that
triton_linear.py and gated_linear.py leave to cuBLAS; perf_configs/kernels/bench_cublas.py shows the times.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from flashinfer_backend.core.tuned import find
from flashinfer_backend.ops import device


@device.cached
def takes_lt(rows: int, inner: int, tokens: int) -> bool:
    """Whether x[tokens, inner] @ weight[rows, inner].T is faster with cublasLt."""
    return find(device.active().cublas, "16 bits", tokens, (rows, inner)) == "cublasLt"


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


def add_product(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """residual[T, N], which is overwritten, plus x @ weight.T and a bias[N]."""
    total = residual.addmm_(x, weight.t())
    return total if bias is None else total.add_(bias)
