# SPDX-License-Identifier: Apache-2.0
"""The Triton decode kernel over a cache of e4m3 in Triton's interpreter, without a GPU: what the tiles that
perf_configs/kernels/bench_fp8_decode.py tries compute. tests/gpu/test_fp8_cache.py runs the real one.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from msgspec.structs import replace

HEADS, KV_HEADS, DIM, BLOCK_SIZE = 4, 2, 32, 16
SCALES = (0.5, 0.25)
TILES = [(16, 4, 16), (32, 4, 4), (64, 8, 2), (128, 8, 2)]  # block, merge, programs of an SM
LENGTHS = [1, 64, 129, 500]


def check(block: int, merge: int, programs: int) -> None:
    """Against float64."""
    from flashinfer_backend.attention import split, triton_decode
    from flashinfer_backend.attention.batch import AttentionBatch
    from flashinfer_backend.attention.torch_paged import TorchPagedAttention
    from flashinfer_backend.core import tuned
    from flashinfer_backend.core.tuned import DecodeAttention
    from flashinfer_backend.kv_cache.cache import KVCache
    from flashinfer_backend.ops import device, fp8

    torch.manual_seed(0)
    rows, blocks = len(LENGTHS), sum(-(-length // BLOCK_SIZE) for length in LENGTHS)
    lens, slots = np.array(LENGTHS, np.int32), np.arange(rows, dtype=np.int32)[::-1].copy()
    order, table = iter(torch.randperm(blocks).tolist()), torch.zeros(rows, 48, dtype=torch.int32)
    for slot, length in zip(slots.tolist(), LENGTHS, strict=True):
        for column in range(-(-length // BLOCK_SIZE)):
            table[slot, column] = next(order)
    shape = (blocks, BLOCK_SIZE, KV_HEADS, DIM)
    cache = tuple(fp8.to_e4m3(torch.randn(shape), scale) for scale in SCALES)
    q = torch.randn(rows, HEADS, DIM).half()  # the interpreter multiplies no bfloat16
    ours = (DecodeAttention(None, block, 3, 1, 0, merge, programs),)
    with device.use(replace(tuned.fallback(), fp8_decode_attention=ours)):
        count = split.max_items(rows, KV_HEADS, fp8=True)
        items = np.zeros((count, split.ITEM_WORDS), np.int32)
        split.split_rows(lens, slots, count, items)
        assert (items[:, 4] > 1).any()
        space = triton_decode.DecodeWorkspace(rows, count, HEADS, KV_HEADS, DIM, torch.device("cpu"))
        out = torch.empty_like(q)
        triton_decode.decode(q, cache, out, torch.from_numpy(items), table, space, DIM**-0.5, SCALES)
    wide = tuple(elements.double() * scale for elements, scale in zip(cache, SCALES, strict=True))
    reference, expected = TorchPagedAttention(KVCache.over([wide]), HEADS), torch.empty_like(q).double()
    reference.plan(AttentionBatch(np.ones(rows, np.int32), lens, slots, table))
    reference.run(0, q.double(), expected)
    error = (out.double() - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    assert (error < 2e-3).all(), f"block {block}: {error.tolist()}"
    assert not space.counters.any()


def test_tiles_in_the_interpreter():
    """In a process of its own: what is interpreted is decided when Triton is imported."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    from flashinfer_backend.attention import triton_decode as kernels

    # Waiting for the kernel before is a GPU's alone.
    kernels.gdc_wait = kernels.gdc_launch_dependents = lambda: None
    for tile in TILES:
        check(*tile)
