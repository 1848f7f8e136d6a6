# SPDX-License-Identifier: Apache-2.0
"""What perf_configs/kernels/bench_experts.py tries, and makes of times, which are made up here."""

from __future__ import annotations

import json
import sys

import msgspec
import pytest
import torch
from msgspec.structs import replace

from flashinfer_backend.core import tuned
from flashinfer_backend.core.tuned import ExpertBlock, ExpertTile
from perf_configs.kernels import bench_experts as bench

SHAPE = bench.Shape(16, 4, 64, 32)  # a quarter of the tokens an expert
FEW = ExpertTile(None, 16, ExpertBlock(64, 128, 4, 4), ExpertBlock(32, 128, 4, 4))
MANY = ExpertTile(None, 128, ExpertBlock(64, 64, 4, 8), ExpertBlock(128, 64, 4, 8))


@pytest.mark.parametrize(
    ("chosen", "limits"),
    [
        ({1: FEW, 16: FEW, 256: MANY}, [(4, FEW), (None, MANY)]),
        ({1: FEW, 16: MANY, 256: MANY}, [(0, FEW), (None, MANY)]),
        ({1: MANY, 3: FEW}, [(None, FEW)]),  # as many an expert, rounded down: the later one
        ({64: FEW}, [(None, FEW)]),
    ],
)
def test_a_tile_holds_up_to_the_tokens_it_was_measured_with(chosen, limits):
    measured = {
        tokens: bench.Measured((1.0,) * 5, 9.0, 8.0, tile, distinct=16.0) for tokens, tile in chosen.items()
    }
    found = bench.entry(measured, SHAPE)
    assert found == tuple(replace(tile, pairs=limit) for limit, tile in limits)
    tuned.Tuned(**fields(experts={"none": found}))  # refuses what is out of order


def fields(**more):
    numbers = tuned.fallback()
    return {name: getattr(numbers, name) for name in numbers.__struct_fields__} | more


@pytest.mark.parametrize("pairs", [0, 0.5, 3, 16, 40, 64, 100, 512, 5000])
def test_tiles_are_about_as_large_as_what_fills_them(pairs):
    sizes = bench.sizes_of(pairs)
    assert sizes and all(size <= max(16, 4 * pairs) and (size >= pairs / 4 or size == 128) for size in sizes)
    for size in sizes:
        for format in bench.SCALES:
            blocks = bench.blocks_of(size, format)
            assert len(blocks) > 1
            if format == "fp8_block":
                assert all(block.rows <= 128 and block.inner == 128 for block in blocks)


def test_rows_of_several_blocks_are_refused():
    with pytest.raises(ValueError, match=r"rows of experts.blocks should be at most 128, not 256"):
        wide = replace(FEW, down=ExpertBlock(256, 128, 2, 8))
        tuned.Tuned(**fields(experts={"blocks": (wide,)}))


def test_what_is_printed_can_go_into_a_file(monkeypatch, capsys):
    def best(self, tokens):
        return bench.Measured((1.0, 2.0, 30.0, 10.0, 3.0), 50.0, 46.0, FEW if tokens < 9 else MANY, 16.0)

    make = bench.Bench.__init__
    monkeypatch.setattr(
        bench.Bench, "__init__", lambda self, shape, format: make(self, shape, format, "meta")
    )
    monkeypatch.setattr(bench.Bench, "compile", lambda self, sizes: None)
    monkeypatch.setattr(bench.Bench, "best", best)
    monkeypatch.setattr(bench, "require_cuda", lambda parser: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(
        sys, "argv", ["bench_experts.py", "--tokens", "8,2048", "--formats", "dense,fp8_token"]
    )
    bench.main()
    lines = capsys.readouterr().out.splitlines()
    entries = json.loads("{" + ",".join(line for line in lines if line.startswith('"')) + "}")
    assert set(entries) == {"none", "rows"} and len(entries["rows"]) == 2
    assert msgspec.convert(entries["none"][0], ExpertTile) == replace(FEW, pairs=0)
    # 16 experts of 3 x 768 x 2048 in 40 us; 2048 tokens with 8 of them each.
    assert "| 8 | 1.0 | 2.0 | 30.0 | 10.0 | 3.0 | 50.0 | 46.0 | 3.77 | 15 |" in "\n".join(lines)
    assert "| 46.0 | 1.89 | 3865 |" in next(line for line in reversed(lines) if line.startswith("| 2048 |"))


def test_unknown_formats_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_experts.py", "--formats", "dense,int4"])
    with pytest.raises(SystemExit):
        bench.main()
    assert "--formats: unknown int4; known: dense, fp8_token, fp8_block" in capsys.readouterr().err
