# SPDX-License-Identifier: Apache-2.0
"""What perf_configs/kernels/bench_fp8_blocks.py makes of times, which are made up here."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from msgspec.structs import replace

from flashinfer_backend.core.tuned import BlockTile
from perf_configs.kernels import bench_fp8_blocks as bench

FEW, MORE, MANY = BlockTile(None, 16, 64, 4), BlockTile(None, 64, 128), BlockTile(None, 128, 128, 1, 3, 8)
SIZES = [1, 16, 64, 1024]
TILES = {"o": {1: FEW, 16: FEW, 64: MORE, 1024: MANY}}


def found(triton: list[float], cublas: list[float]) -> bench.Times:
    times = zip(SIZES, triton, cublas, strict=True)
    return {("o", tokens): {"fastest tile": ours, "cuBLAS": theirs} for tokens, ours, theirs in times}


@pytest.mark.parametrize(
    ("cublas", "fewest", "tiles"),
    [
        ([9, 9, 9, 5], 65, [(16, FEW), (None, MORE)]),
        ([5, 9, 5, 5], 17, [(None, FEW)]),
        ([5, 5, 5, 5], 1, []),
        ([9, 9, 9, math.inf], None, [(16, FEW), (64, MORE), (None, MANY)]),
        ([9, 9, 9, 7.99], None, [(16, FEW), (64, MORE), (None, MANY)]),  # within what repeats differ by
    ],
)
def test_cublas_is_used_above_the_last_size_at_which_it_is_slower(cublas, fewest, tiles):
    said = bench.entry(found([8, 8, 8, 8], cublas), TILES, ["o"], SIZES)
    assert said["fp8_blocks_by_cublas"] == ({} if fewest is None else {"o": fewest})
    steps = tuple(replace(tile, tokens=limit) for limit, tile in tiles)
    assert said["fp8_blocks"] == ({"o": steps} if steps else {})


def test_what_was_not_measured_is_not_cublas():
    some = {key: times for key, times in found([8] * 4, [5] * 4).items() if key[1] < 1024}
    fewer = {"o": {tokens: tile for tokens, tile in TILES["o"].items() if tokens < 64}}
    assert bench.entry(some, fewer, ["o"], SIZES) == {
        "fp8_blocks": {"o": (FEW,)},
        "fp8_blocks_by_cublas": {},
    }


def test_flashinfer_for_which_no_time_is_left_is_said(monkeypatch, capsys):
    monkeypatch.setattr(bench, "require_cuda", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(bench, "try_cublas", lambda: None)
    monkeypatch.setattr(bench, "measure", lambda shapes, *_: ({}, {role: {} for role in shapes}))
    monkeypatch.setattr(sys, "argv", ["bench_fp8_blocks.py", "--limit", "1e-9", "--flashinfer", "60"])
    bench.main()
    assert "FlashInfer: not measured, the 1e-09 s of --limit are over\n" in capsys.readouterr().out
