# SPDX-License-Identifier: Apache-2.0
"""perf_configs/kernels/bench_fp8_decode.py without a GPU: what it would measure, with which tensors, and what
it makes of times, which are made up here."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hopper_driver import use_hopper
from msgspec.structs import replace

from flashinfer_backend.core import tuned
from flashinfer_backend.core.tuned import DecodeAttention, Tuned
from flashinfer_backend.ops import device
from perf_configs.kernels import bench_fp8_decode as bench
from perf_configs.kernels.bench_fp8_decode import Case

TODAY = tuned.fallback()
ROWS = (1, 16, 64, 128, 256, 1024)
SOON = math.inf


def tile(block: int, **others: Any) -> DecodeAttention:
    return replace(DecodeAttention(None, block, 3, 2, 16, 8, 2), **others)


def times(found: dict[Case, dict[DecodeAttention, float]]) -> dict[Case, bench.Times]:
    """With what is taken today, at 10 us."""
    return {case: {bench.now(TODAY, case.rows): 10.0} | each for case, each in found.items()}


def test_the_tile_with_the_best_geometric_mean_wins():
    even, uneven, once = tile(32), tile(64), tile(128)
    assert Case(16, 256) == Case(16, 256, "equal")
    found = times({Case(16, 256): {even: 8, uneven: 5, once: 1}, Case(16, 4096): {even: 8, uneven: 14}})
    assert bench.choose(found, TODAY) == {16: even}
    found = times({Case(16, 256): {even: 8, uneven: 5}, Case(16, 256, "mixed"): {even: 8, uneven: 14}})
    assert bench.choose(found, TODAY) == {16: even}


def test_what_gains_nothing_or_cannot_run_is_not_chosen():
    found = times(
        {
            Case(16, 256): {tile(32): 9.95},
            Case(64, 256): {tile(32): math.inf},
            Case(128, 256): {tile(32): 9.8},
        }
    )
    assert bench.choose(found, TODAY) == {
        16: bench.now(TODAY, 16),
        64: bench.now(TODAY, 64),
        128: tile(32),
    }


def test_the_entry_has_equal_neighbours_once_and_ends_with_all_more():
    chosen = {1: tile(32), 16: tile(32), 64: tile(64, registers=128), 128: tile(32)}
    assert bench.entry(chosen) == {
        "fp8_decode_attention": (
            tile(32, rows=16),
            tile(64, rows=64, registers=128),
            tile(32, rows=None),
        )
    }
    assert bench.entry({64: tile(16)}) == {"fp8_decode_attention": (tile(16),)}
    assert bench.entry({}) == {}


def test_the_entry_fits_a_device_s_file():
    added = msgspec.json.encode(bench.entry({1: tile(32), 64: tile(64, registers=128)}))
    whole = msgspec.json.decode(msgspec.json.encode(TODAY)) | msgspec.json.decode(added)
    numbers = msgspec.json.decode(msgspec.json.encode(whole), type=Tuned)
    assert numbers.decode(1, fp8=True) == tile(32, rows=1)
    assert numbers.decode(999, fp8=True) == tile(64, registers=128)
    assert numbers.decode(999, fp8=False) == TODAY.decode(999, fp8=False)


def test_later_contexts_try_what_was_near_the_best_and_today_s_tile():
    asked: list[tuple[Case, list[DecodeAttention]]] = []

    def run(case: Case, works: Sequence[tuple[bool, Tuned]]) -> list[float]:
        (dense, numbers), *others = works
        assert not dense and numbers == TODAY and all(fp8 for fp8, _ in others)
        tiles = [numbers.decode(case.rows, fp8=True) for _, numbers in others]
        asked.append((case, tiles))
        return [40.0, *(1.0 if each.block == 64 else 30.0 for each in tiles)]

    dense, found = bench.measure([Case(1, 256), Case(1, 4096, "mixed")], SOON, TODAY, run)
    (_, first), (_, second) = asked
    assert dense == {Case(1, 256): 40.0, Case(1, 4096, "mixed"): 40.0}
    assert set(first) == {bench.now(TODAY, 1), *bench.candidates(1)}
    assert set(second) == {bench.now(TODAY, 1), *(each for each in first if each.block == 64)}
    assert list(found[Case(1, 4096, "mixed")]) == second
    assert bench.measure([Case(1, 256)], time.monotonic() - 1, TODAY, run) == ({}, {})


def test_calls_of_a_graph_read_more_than_l2_and_blocks_of_their_own():
    caches = bench.Bench(4, 2, 40, 4000, "cpu")
    for lens in (np.array([33, 40], np.int32), np.array([1], np.int32)):
        assert bench.copies(lens, 8) * bench.read_bytes(lens, 8) >= bench.BYTES
    lens = np.array([33, 1, 40], np.int32)  # blocks: 3, 1 and 3
    caches.kv_heads = bench.BYTES // (3 * 74 * 2 * 128) + 1  # so that there are three copies
    assert bench.copies(lens, caches.kv_heads) == 3 and bench.blocks_of(lens, caches.kv_heads) == 21
    tables = caches.tables(lens)
    used = [int(block) for table in tables for row, n in ((0, 3), (1, 1), (2, 3)) for block in table[row, :n]]
    assert len(tables) == 3 and len(set(used)) == len(used) == 21
    assert {table.shape for table in tables} == {(3, 16)}
    assert all(table.dtype == torch.int32 and table.is_contiguous() for table in tables)


def test_one_large_call_is_there_twice():
    caches = bench.Bench(4, 2, 40, 8, "cpu")
    caches.kv_heads = bench.BYTES
    assert len(caches.tables(np.array([33], np.int32))) == 2


@pytest.mark.parametrize("kind", bench.LENGTHS)
def test_lengths(kind):
    lens = bench.lengths(1024, 256, kind)
    assert lens.dtype == np.int32 and lens.min() >= 128 and lens.max() <= 384
    assert (len(set(lens.tolist())) > 100) is (kind == "mixed") and abs(lens.mean() - 256) < 8


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    pytest.importorskip("triton")
    use_hopper(monkeypatch, tmp_path)


def test_what_is_compiled_ahead_is_what_is_measured(hopper, monkeypatch):
    """Not more than compile in time, and the same whatever the rows, contexts and work."""
    from flashinfer_backend.attention import triton_decode
    from flashinfer_backend.worker.prebuild_triton import collect

    works = [(rows, fp8, TODAY) for rows in ROWS for fp8 in (False, True)]
    works += [(rows, True, bench.with_tile(TODAY, each)) for rows in ROWS for each in bench.candidates(rows)]
    ahead = bench.Bench(32, 8, 4096, 2, "meta")
    variants = collect(lambda: ahead.compile_calls(works))
    assert 30 <= len(variants) <= 60

    caches = bench.Bench(32, 8, 4096, 128, "cpu")
    monkeypatch.setattr(bench, "BYTES", 1)
    seen = []
    plain = triton_decode.decode

    def decode(q: Any, cache: Any, out: Any, items: Any, table: Any, space: Any, *others: Any) -> None:
        rows, count = len(q), len(items)
        used = items[items[:, 0] >= 0]
        assert used[:, 2].max() <= table.shape[1] * 16 and len(table) == rows
        assert used[:, 5].tolist() == used[:, 0].tolist() and int(table.max()) < 128
        assert len(space.out) == count * 32 * 128 and len(space.counters) == rows * 8
        seen.append((rows, cache[0].dtype))
        plain(q, cache, out, items, table, space, *others)

    monkeypatch.setattr(triton_decode, "decode", decode)

    def measured() -> None:
        for rows, fp8, numbers in works:
            if rows not in (1, 16):
                continue
            lens = bench.lengths(rows, 64, "mixed" if rows == 16 else "equal")
            (table, _) = caches.tables(lens)
            with device.use(numbers):
                items, space = caches.work(lens, triton_max(rows, fp8))
                q = torch.empty(rows, 32, 128, dtype=torch.bfloat16)
                caches.call(q, q, items, table, space, fp8)

    def triton_max(rows: int, fp8: bool) -> int:
        from flashinfer_backend.attention import split

        return split.max_items(rows, 8, fp8)

    assert set(collect(measured)) <= set(variants)
    assert {dtype for _, dtype in seen} == {torch.bfloat16, torch.float8_e4m3fn}


@pytest.mark.parametrize("text", ["", "0", "1,,2", "a", "-3"])
def test_rows_that_are_no_numbers_are_refused(text, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_fp8_decode.py", f"--rows={text}"])
    with pytest.raises(SystemExit):
        bench.main()
    assert "should be numbers from 1 on, separated by commas" in capsys.readouterr().err


def test_lengths_of_no_kind_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_fp8_decode.py", "--lengths=equal,long"])
    with pytest.raises(SystemExit):
        bench.main()
    assert "should be mixed, equal or both with a comma, not 'equal,long'" in capsys.readouterr().err


def test_the_table_names_each_case(capsys):
    cases = [Case(16, 256), Case(16, 256, "mixed")]
    found = times({case: {tile(32): 8.0} for case in cases})
    chosen, numbers = bench.choose(found, TODAY), dict.fromkeys(cases, 2.0)
    bench.print_table(cases, numbers, found, chosen, numbers, TODAY)
    rows = capsys.readouterr().out.splitlines()
    assert [row.split(" | ")[:8] for row in rows if row.startswith("| 16")] == [
        ["| 16", "256", kind, "2.0", "10.0", "8.0", "8.0", "2.0"] for kind in ("equal", "mixed")
    ]
