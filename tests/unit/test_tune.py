# SPDX-License-Identifier: Apache-2.0
"""The command that measures tuned numbers: what it makes of times, which are recorded or made up here."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hopper_driver import use_hopper
from msgspec.structs import replace

from flashinfer_backend.core import tuned
from flashinfer_backend.core.shard import Shard
from flashinfer_backend.core.tuned import BlockTile, Role, RowTile, Tiling, Tuned, find, steps
from flashinfer_backend.models.hf import read_spec
from flashinfer_backend.models.spec import ModelSpec
from flashinfer_backend.models.transformer import Transformer
from flashinfer_backend.models.weights import load_weights
from flashinfer_backend.ops import device, mxfp4_experts, torch_ops
from flashinfer_backend.ops.tilings import choose
from flashinfer_backend.tune import __main__ as command
from flashinfer_backend.tune import cases as c
from flashinfer_backend.tune import measure
from flashinfer_backend.tune import search as s
from flashinfer_backend.tune.measure import ModelBench
from flashinfer_backend.worker import prebuild_triton
from perf_configs import published
from specs import EXPERTS, bundled
from tables import entries, measured

BUNDLED = bundled()
GPT_OSS = Path(__file__).parents[2] / "perf_configs" / "shapes" / "gpt-oss-20b"
SMALL = {"num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA = bundled(
    hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    vocab_size=128256, num_hidden_layers=1,
)  # fmt: skip
SHAPES: dict[Role, tuned.Shape] = {product.role: product.shape for product in LLAMA.products}
CUBLAS: dict[Role, float] = {"qkv": 16.0, "o": 13.2, "gate_up": 66.4, "down": 31.7, "head": 250.0}
SIZES: c.Sizes = {
    "linear": (8, 64, 256), "linear_fp8": (8, 64, 256), "blocks_fp8": (16, 64, 1024), "int4": (8, 64),
    "cublas": (64, 80, 208), "experts": (16, 256), "linear_blocks": (1, 8),
    "blocks_linear": (8,),
}  # fmt: skip


class Recorded:
    """A Bench whose products take `times` microseconds by (role, fields), or without fields by (role,
    cuBLAS's interface, tokens), else CUBLAS. With other fields they do not run. The gated kernel takes
    `gated` by tokens."""

    def __init__(self, times: dict[tuple[Any, ...], float], gated: dict[int, float] | None = None) -> None:
        self.times, self.gated = times, gated or {}
        self.asked: set[tuple[Role, Any]] = set()
        self.table = "linear"

    def steps(self, tokens: int, candidates: Sequence[Tuned]) -> list[float]:
        return [sum(self._product(role, tokens, numbers) for role in SHAPES) for numbers in candidates]

    def _product(self, role: Role, tokens: int, numbers: Tuned) -> float:
        table = "linear" if role == "head" else self.table
        fields = find(getattr(numbers, table), role, tokens, SHAPES[role])
        kernel = numbers.gated_linear if table == "linear" else numbers.fp8_gated_linear
        fewest = kernel.fewest_tokens if kernel else None
        fused = isinstance(fields, Tiling) and (fields.fuse_norm if table == "linear" else fields.quantise)
        if role == "gate_up" and fewest is not None and tokens >= fewest and not fused:
            return self.gated[tokens]
        lt = find(numbers.cublas, "16 bits", tokens, SHAPES[role])
        if fields is None:
            return self.times.get((role, lt, tokens), self.times.get((role, None, tokens), CUBLAS[role]))
        self.asked.add((role, fields))
        return self.times.get((role, fields), 50.0 if table == "blocks_fp8" else math.inf)

    def waves(self) -> dict[int, float]:
        return {64: 18.0, 256: 47.0} if self.gated else {}


def run(
    bench: Recorded,
    base: Tuned | None = None,
    spec: ModelSpec = LLAMA,
    lines: list[str] | None = None,
    **options: Any,
) -> Tuned:
    """A search of a model's cases. options: of the plan, and sizes."""
    base = base or tuned.fallback()
    sizes = SIZES | options.pop("sizes", {})
    plan = s.Plan(**({"rounds": 3, "gated": c.kind_of_gated(spec)} | options))
    found = c.of_model(spec, sizes, base, gated=plan.gated is not None)
    both = {"linear_blocks", "blocks_linear", "blocks_fp8"}
    others = both if bench.table in both else {bench.table}
    assert {case.table for case in found} <= {"linear", "cublas"} | others
    return s.search(base, found, bench, plan, (lines if lines is not None else []).append)


def of_kind(table: str, times: dict[tuple[Any, ...], float]) -> tuple[Recorded, ModelSpec]:
    """The same for a model whose layers have another format."""
    bench = Recorded(times)
    bench.table = table
    spec = LLAMA.quantised_on_load() if table == "linear_fp8" else LLAMA.with_format("fp8_block")
    return bench, spec


def steps_of(numbers: Tuned, role: Role, table: str = "linear") -> dict[int | None, Any]:
    return dict(steps(getattr(numbers, table), role, SHAPES[role]))


START, BETTER, BEST = Tiling(16, 64, 128), Tiling(16, 64, 256), Tiling(16, 64, 256, stages=3)


def test_a_search_goes_from_neighbour_to_neighbour():
    bench = Recorded({("qkv", START): 15.9, ("qkv", BETTER): 15.0, ("qkv", BEST): 14.0})
    lines: list[str] = []
    found = run(bench, lines=lines)
    (said,) = (line for line in lines if line.startswith("qkv [6144, 4096], 8 tokens: (16, 64, 256, 1, 3"))
    assert said.endswith("step 375.3 us, 377.3 us before")
    assert "down [4096, 14336], 8 tokens: cuBLAS, step 375.3 us, as before" in lines
    assert steps_of(found, "qkv") == {8: BEST, 64: None, 256: None}
    assert steps_of(found, "down") == {8: None, 64: None, 256: None}  # nothing else runs
    assert found.scheduling == tuned.fallback().scheduling
    assert found.decode_attention == tuned.fallback().decode_attention
    assert steps_of(run(bench, rounds=0), "qkv")[8] == BEST  # which an H200's file has for these tokens


def test_products_in_fp8_have_tilings_of_their_own():
    """What weights in 16 bits have stays, but for the head, which is in them."""
    best = Tiling(16, 64, 256, 4, quantise=True)
    bench, spec = of_kind("linear_fp8", {("o", best): 9.0, ("o", replace(best, quantise=False)): 11.0})
    base = replace(tuned.fallback(), linear_fp8={"o": entries((16, replace(best, quantise=False)))})
    found = run(bench, base, spec)
    assert steps_of(found, "o", "linear_fp8")[8] == best
    assert found.linear.keys() == {"head"} and found.cublas == base.cublas
    assert found.gated_linear == base.gated_linear
    for role, tiling in bench.asked:
        assert tiling.fits(SHAPES[role], role == "gate_up", 8) and (tiling.fuse_norm or role == "head")
        assert tiling.split == 1 or role != "gate_up"
    assert {tiling.quantise for role, tiling in bench.asked if role == "down"} == {False, True}
    assert not c.possible(best, "o", SHAPES["o"], 64, "linear_fp8")


def test_one_token_in_fp8_has_a_tile_of_its_own():
    alone = Tiling(1, 64, 128, quantise=True)
    bench, spec = of_kind("linear_fp8", {("down", alone): 20.0})
    found = run(bench, spec=spec, sizes={"linear_fp8": (1, 8)})
    assert steps_of(found, "down", "linear_fp8") == {1: alone, 8: None}


def test_few_tokens_have_tilings_with_blocks_too():
    """Their inner columns are those of a block. The search begins with what scales by row take."""
    alone, next_to_it = (Tiling(1, 64, 128, 4, stages, quantise=True) for stages in (3, 2))
    bench, spec = of_kind("linear_blocks", {("down", alone): 20.0, ("down", next_to_it): 19.0})
    found = run(bench, spec=spec, sizes={"blocks_fp8": ()})
    assert steps_of(found, "down", "linear_blocks") == {1: next_to_it, 8: None}
    assert found.blocks_fp8 == tuned.fallback().blocks_fp8
    assert {tiling.inner for role, tiling in bench.asked if role != "head"} == {128}


def test_the_cuda_kernel_of_blocks_is_chosen_where_it_is_faster():
    """Its tiles are of two fifths of the SMs or more: there are those that were the fastest on an H200."""
    bench, spec = of_kind("blocks_linear", {("down", RowTile(2, 3)): 20.0, ("o", RowTile(4, 4)): 30.0})
    found = run(bench, spec=spec, sizes={"blocks_linear": (8, 32), "blocks_fp8": (), "linear_blocks": ()})
    assert steps_of(found, "down", "blocks_linear") == {8: RowTile(2, 3), 32: RowTile(2, 3)}
    assert ("o", RowTile(4, 4)) in bench.asked
    assert steps_of(found, "o", "blocks_linear") == {8: None, 32: None}  # slower than what is there
    tried = {tile for role, tile in bench.asked if role == "gate_up"}
    assert tried == {RowTile(2), RowTile(4), RowTile(4, 2)}
    for shape, fastest in (((2048, 4096), (2, 4)), ((5120, 6144), (4, 3)), ((4352, 5120), (2, 3))):
        assert RowTile(*fastest) in c.row_tiles(shape)
    assert c.row_tiles((2048, 96)) == []  # not of whole blocks


def test_what_other_tables_hide_is_measured_without_them():
    """Else each candidate would take the kernel that the other table names, and noise would choose."""
    bench, spec = of_kind("blocks_fp8", {("o", BlockTile(16, 64, 2)): 10.0})
    rows, tilings = {"o": entries((32, RowTile()))}, {"o": entries((64, START))}
    base, seen, steps_of_bench = tuned.fallback(), [], bench.steps
    base = replace(base, blocks_linear=rows, linear_blocks=tilings)

    def recorded(tokens: int, candidates: Sequence[Tuned]) -> list[float]:
        if candidates[0].blocks_fp8 != candidates[-1].blocks_fp8:
            seen.extend(candidates)
        return steps_of_bench(tokens, candidates)

    bench.steps = recorded
    found = run(bench, base=base, spec=spec, sizes={"linear_blocks": (), "blocks_linear": ()})
    assert find(found.blocks_fp8, "o", 16) == BlockTile(16, 64, 2)
    assert seen and not any(numbers.blocks_linear or numbers.linear_blocks for numbers in seen)
    assert (found.blocks_linear, found.linear_blocks) == (rows, tilings)


def test_tokens_are_those_of_the_command_where_a_kernel_takes_so_many():
    options = SimpleNamespace(quick=False, tokens=(16, 64), decode_attention=None)
    assert [command.sizes_of(options)[table] for table in ("linear_blocks", "blocks_linear")] == [
        (16, 64),
        (16,),
    ]


def test_a_role_has_a_case_for_each_shape_of_its_products():
    """Attention's first product and a delta net's have one role. Tiles of blocks are for all shapes."""
    spec = read_spec(published.SHAPES / "qwen3.5-27b").quantised_on_load()
    cases = c.of_model(spec, SIZES, tuned.fallback(), gated=False)
    shapes = {case.shape for case in cases if case.key == "qkv" and case.table == "linear_fp8"}
    assert shapes == {(14336, 5120), (16384, 5120)}
    assert {case.shape for case in cases if case.key == "ba"} == {(96, 5120)}
    blocks = c.of_model(LLAMA.with_format("fp8_block"), SIZES, tuned.fallback(), gated=False)
    assert [case.shape for case in blocks if case.table == "blocks_fp8"] == [None] * 4


def test_blocks_have_tiles_by_role_and_tokens():
    """cuBLAS may take all sizes but the smallest: it cannot multiply by all weights."""
    split, wide = BlockTile(16, 64, 4, 4, 4), BlockTile(128, 128, 1, 4, 8)
    bench, spec = of_kind(
        "blocks_fp8", {("down", split): 20.0, ("gate_up", wide): 30.0, ("o", None, 64): 40.0}
    )
    bench.times |= {(role, None, tokens): math.inf for role in tuned.LAYER_ROLES for tokens in (16, 1024)}
    bench.times |= {(role, None, 64): math.inf for role in ("qkv", "gate_up", "down")}
    found = run(bench, spec=spec, sizes={"linear_blocks": ()})
    assert find(found.blocks_fp8, "down", 16) == split
    assert (
        find(found.blocks_fp8, "gate_up", 9999) == wide and find(found.blocks_fp8, "gate_up", 16).tile == 16
    )
    assert [find(found.blocks_fp8, "o", tokens) is None for tokens in (16, 64, 65)] == [False, True, False]
    assert None not in c.block_tiles(SHAPES["o"], 16, 16) and None in c.block_tiles(SHAPES["o"], 64, 16)
    changed = s.changes(tuned.fallback(), found, c.of_model(spec, SIZES, found, gated=True))
    assert any(
        line.startswith("down [4096, 14336], blocks, 1..16 tokens: (16, 64, 1, 4, 4) -> (16, 64, 4")
        for line in changed
    )


def test_without_time_everything_stays_as_it_was():
    h200 = measured()
    lines: list[str] = []
    assert run(Recorded({}), h200, seconds=-1.0, lines=lines, gated=None) == h200
    assert sum("out of time" in line for line in lines) == 4 * 3 + 2 + 3 * 3  # gate up: without 256 tokens


def test_tiles_that_are_tried_divide_the_work():
    for role in ("qkv", "o", "gate_up", "down"):
        shape = SHAPES[role]
        for tokens in (1, 16, 64, 128, 256, 1024, 4096):
            tiles = [tile for tile in c.block_tiles(shape, tokens) if tile]
            assert len(tiles) == len(set(tiles)) >= 8
            for tile in tiles:
                assert shape[1] // 128 % tile.split == 0 and (tile.split == 1 or tokens <= 256)
                assert tile.tile <= 128 and (tokens > 64 or tile.tile < max(32, 2 * tokens))
    assert any(tile.split == 8 for tile in c.block_tiles(SHAPES["down"], 1) if tile)


def test_a_gain_within_what_repeats_differ_by_changes_nothing():
    total = sum(CUBLAS.values())
    for gain, expected in ((0.001 * total, None), (0.003 * total, BEST)):
        bench = Recorded({("qkv", BEST): CUBLAS["qkv"] - gain})
        assert steps_of(run(bench), "qkv")[8] == expected


def test_only_tilings_that_the_kernel_can_have_are_tried():
    bench = Recorded({(role, START): 1.0 for role in tuned.ROLES})
    run(bench, sizes={"linear": (8,)})
    assert len(bench.asked) > 50
    for role, tiling in bench.asked:
        assert tiling.fits(SHAPES[role], role == "gate_up", 8)
        assert (tiling.split == 1 or role != "gate_up") and not tiling.quantise
    head = Tiling(64, 64, 128, split=4, fuse_norm=False)  # 33 million sums, and there is room for 17
    assert not c.possible(head, "head", SHAPES["head"], 64) and c.possible(head, "qkv", (6144, 4096), 64)


def test_interfaces_of_cublas_are_compared_above_the_first_size():
    bench = Recorded(
        {("o", "cublasLt", 64): 1.0, ("o", "cublasLt", 80): 12.0, ("down", "cublasLt", 208): 31.6}
    )
    found = run(bench)
    by_shape = {entry.shape: entry.steps for entry in found.cublas["16 bits"]}
    assert by_shape == {
        SHAPES["qkv"]: ((64, None), (80, None), (208, None)),
        SHAPES["o"]: ((64, None), (80, "cublasLt"), (208, None)),
        SHAPES["down"]: ((64, None), (80, None), (208, None)),  # within what repeats differ by
    }


@pytest.mark.parametrize(
    ("gated", "fewest"),
    [
        ({8: 60.0, 64: 70.0, 256: 60.0, 1024: 60.0}, 65),
        ({8: 60.0, 64: 60.0, 256: 60.0, 1024: 60.0}, 1),
        ({8: 60.0, 64: 60.0, 256: 70.0, 1024: 60.0}, 257),
        ({8: 60.0, 64: 60.0, 256: 60.0, 1024: 70.0}, None),
        ({8: 60.0, 64: CUBLAS["gate_up"] - 0.1, 256: 60.0, 1024: 60.0}, 65),  # within what repeats differ by
        ({}, None),
    ],
)
def test_the_gated_kernel_is_used_above_the_last_size_at_which_it_is_slower(gated, fewest):
    found = run(Recorded({}, gated))
    assert found.gated_linear.fewest_tokens == fewest
    waves = {64: 18.0, 256: 47.0} if gated else tuned.fallback().gated_linear.wave_us
    assert found.gated_linear.wave_us == waves


def test_a_tiling_with_the_norm_in_it_does_not_hide_the_gated_kernel():
    fused = Tiling(128, 64, 128)
    bench = Recorded({("gate_up", fused): 65.0, ("gate_up", replace(fused, fuse_norm=False)): 66.0})
    assert steps_of(run(bench), "gate_up")[256] == fused
    bench.gated = {8: 70.0, 64: 70.0, 256: 60.0, 1024: 60.0}
    found = run(bench)
    assert steps_of(found, "gate_up")[256] == replace(fused, fuse_norm=False)
    assert found.gated_linear.fewest_tokens == 65


def test_the_gated_kernel_of_fp8_has_numbers_of_its_own():
    bench, spec = of_kind("linear_fp8", {("gate_up", Tiling(64, 64, 128, quantise=True)): 50.0})
    found = run(bench, spec=spec)
    assert found.fp8_gated_linear is not None and found.fp8_gated_linear.fewest_tokens is None
    bench.gated = {8: 70.0, 64: 70.0, 256: 48.0, 1024: 60.0}
    found = run(bench, spec=spec)
    assert found.gated_linear == tuned.fallback().gated_linear
    assert found.fp8_gated_linear is not None and found.fp8_gated_linear.fewest_tokens == 65
    assert found.fp8_gated_linear.wave_us == {64: 18.0, 256: 47.0}
    apart = steps_of(found, "gate_up", "linear_fp8")[256]
    assert apart is None or not apart.quantise


def test_a_shape_without_an_entry_begins_as_the_rule():
    rule = entries((8, START), (64, BETTER))
    cases = c.of_model(LLAMA, SIZES, tuned.fallback(), gated=True)
    (case,) = (case for case in cases if (case.table, case.key) == ("linear", "o"))
    one = case.with_step(replace(tuned.fallback(), linear={"o": rule}), 16, BEST)
    assert steps_of(one, "o") == {8: START, 16: BEST, 64: BETTER}
    assert steps(one.linear, "o", (2048, 2048)) == rule[0].steps
    two = case.with_step(one, 64, None)
    assert steps_of(two, "o") == {8: START, 16: BEST, 64: None}
    assert [entry.shape for entry in two.linear["o"]] == [None, SHAPES["o"]]


@pytest.mark.parametrize(
    ("spec", "tables"),
    [
        (LLAMA, {"linear", "cublas"}),
        (LLAMA.quantised_on_load(), {"linear", "linear_fp8"}),
        (LLAMA.with_format("fp8_block"), {"linear", "linear_blocks", "blocks_linear", "blocks_fp8"}),
        (LLAMA.with_format("fp8_block_scale"), {"linear", "linear_blocks", "blocks_linear", "blocks_fp8"}),
        (LLAMA.with_format("int4_awq_128"), {"linear", "int4"}),
        (bundled(**EXPERTS, num_experts=8, num_experts_per_tok=2), {"linear", "cublas", "experts"}),
    ],
)
def test_every_format_has_cases(spec, tables):
    """And each candidate can be put into the numbers."""
    base = measured()
    found = c.of_model(spec, c.FULL, base, gated=True)
    found.append(c.of_decode_attention("e4m3", c.FULL["decode_attention"]))
    assert {case.table for case in found} == tables | {"decode_attention"}
    for case in found:
        for tokens in case.sizes:
            for fields in case.candidates(tokens)[:3]:
                assert case.now(case.with_step(base, tokens, fields), tokens) == fields
        table = getattr(base, case.table) | {case.key: ()}
        fresh = base
        if case.table not in ("experts", "decode_attention", "blocks_fp8"):  # not whole
            fresh = replace(base, **{case.table: table})
        for tokens in case.sizes:
            fresh = case.with_step(fresh, tokens, case.candidates(tokens)[0])
        last = steps(getattr(fresh, case.table), case.key, case.shape)[-1][0]
        assert last == (None if case.whole else case.limit(case.sizes[-1]))


@pytest.mark.parametrize("scales", ["none", "rows", "blocks", "mxfp4", "int4"])
def test_experts_try_tiles_near_the_tokens_that_an_expert_has(scales):
    format = {"none": "dense", "rows": "fp8_token", "blocks": "fp8_block"}.get(scales, scales)
    case = c.of_experts(format, 128, 8, c.FULL["experts"], teams=scales == "mxfp4")
    without = c.of_experts(format, 128, 8, c.FULL["experts"])
    assert not any(tile.teams for tile in without.candidates(1))
    assert {tile.teams for tile in case.candidates(1)} == ({0, 1, 2} if scales == "mxfp4" else {0})
    assert case.sizes == (1, 16, 64, 128, 256, 1024, 4096, 8192) and case.limit(64) == 4
    for tokens, sizes in ((1, {16}), (256, {16, 32, 64}), (8192, {128})):
        tiles = case.candidates(tokens)
        assert {tile.tokens for tile in tiles} == sizes and len(set(tiles)) == len(tiles)
        for tile in tiles:
            downs = case.neighbours(tile, tokens)
            assert (tile.teams or len(downs) > 3) and {each.gate_up for each in downs} == {tile.gate_up}
            assert scales != "blocks" or (tile.gate_up.inner == 128 and tile.gate_up.rows <= 128)


def test_no_mixture_in_cuda_runs_where_kernels_are_collected(monkeypatch):
    """Its tiles are written by Triton's kernels, which are not launched there."""
    h200, seen = measured(), []
    assert any(tile.teams for entry in h200.experts["mxfp4"] for _, tile in entry.steps)
    monkeypatch.setattr(prebuild_triton, "compile_together", lambda variants: None)
    measure.compile_all(lambda: seen.append(device.active()), [h200])
    (active,) = seen
    assert not any(tile.teams for entry in active.experts["mxfp4"] for _, tile in entry.steps)
    assert replace(active, experts=h200.experts) == h200
    assert active.experts["blocks"] == h200.experts["blocks"]


@pytest.mark.parametrize(
    ("columns", "built", "can"), [(2880, True, True), (2880, False, False), (3104, True, False)]
)
def test_teams_are_searched_where_the_kernel_can_be_used(monkeypatch, columns, built, can):
    monkeypatch.setattr(mxfp4_experts, "module", lambda place: "a module" if built else None)
    spec = read_spec(GPT_OSS, changes={"hidden_size": columns})
    assert command.has_teams(spec, torch.device("cuda", 0)) == can
    assert not command.has_teams(LLAMA, torch.device("cuda", 0))
    cases = c.of_model(spec, c.FULL, measured(), gated=False, teams=can)
    (case,) = (case for case in cases if case.table == "experts")
    assert any(tile.teams for tile in case.candidates(1)) == can


def test_the_command_writes_a_file_that_gathers_shapes(tmp_path, capsys):
    output = tmp_path / "nvidia-x.json"
    bench = Recorded({("qkv", BEST): 14.0, ("o", "cublasLt", 192): 10.0}, {8: 60.0, 64: 70.0, 1024: 60.0})
    base = command.starting_point(output, "NVIDIA X")
    assert base == replace(tuned.fallback(), device="NVIDIA X")
    plan = s.Plan(0, gated="dense")
    cases = c.of_model(LLAMA, c.QUICK, base, gated=True)
    command.tune(base, cases, bench, plan, output, measured={"shape": "a", "torch": "1"})
    printed = capsys.readouterr().out
    assert "qkv [6144, 4096], 1..8 tokens: cuBLAS -> (16, 64, 256, 1, 3" in printed
    assert "o [4096, 4096], cuBLAS, 129..192 tokens: PyTorch's default -> cublasLt" in printed
    found = command.starting_point(output, "NVIDIA X")
    assert steps_of(found, "qkv")[8] == BEST and found.gated_linear.fewest_tokens == 65
    qkv, *_ = cases
    other = s.Case("qkv", "linear", "qkv", (5120, 4096), (8,), qkv.candidates)
    command.tune(found, [other], bench, s.Plan(0), output, measured={"shape": "b", "torch": "2"})
    both = tuned.read(output)
    assert [entry.shape for entry in both.linear["qkv"]] == [(6144, 4096), (5120, 4096)]
    assert both.measured == {"shape": "a; b", "torch": "2"}
    with pytest.raises(ValueError, match="has the numbers of NVIDIA X, and this is NVIDIA Y; name another"):
        command.starting_point(output, "NVIDIA Y")


def test_chosen_sizes_leave_the_gated_kernel_alone():
    """Which sizes it takes follows from many, so a few say nothing of it."""
    h200 = measured()
    assert h200.gated_linear.fewest_tokens == 65
    base = replace(tuned.fallback(), gated_linear=h200.gated_linear)
    few, many = Tiling(64, 64, 128), Tiling(128, 64, 128)
    bench = Recorded({("gate_up", few): 1.0, ("down", many): 1.0}, {80: 10.0, 208: 10.0, 256: 10.0})
    found = run(bench, base, rounds=0, gated=None, sizes={"linear": (48, 256)})
    assert found.gated_linear == h200.gated_linear
    assert steps_of(found, "gate_up") == {48: few}
    assert steps_of(found, "down") == {48: None, 256: many}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "32,16"], "32,16: the numbers should rise"),
        (["--tokens", "0"], "should be a whole number from 1"),
        (["--decode-attention", "e4m3", "--tokens", "16"], r"--tokens is for products: of attention"),
        (["--layers", "9"], r"--layers 9: the model has 2"),
        (["--tensor-parallel-size", "8"], "tensor_parallel_size=8 should divide num_attention_heads"),
        (["--tensor-parallel-size", "3"], "invalid choice: 3"),
    ],
)  # fmt: skip
def test_the_command_refuses_what_it_cannot_measure(arguments, message, tmp_path, capsys, monkeypatch):
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128}
    small = bundled(**SMALL, num_hidden_layers=2, **sizes)
    monkeypatch.setattr(command, "read_spec", lambda _: small)
    with pytest.raises(SystemExit) as end:
        command.main(["--model", "bundled", "--output", str(tmp_path / "new.json"), *arguments])
    assert end.value.code == 2
    assert re.search(message, " ".join(capsys.readouterr().err.split()))


def test_a_device_of_the_package_begins_with_its_numbers(tmp_path):
    assert command.starting_point(tmp_path / "new.json", "NVIDIA H200") == tuned.load("NVIDIA H200")


def test_a_checkpoint_of_16_bits_is_measured_in_blocks():
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128}
    whole = bundled(**SMALL, **sizes)
    layers = command.in_blocks(whole).layers
    assert {product.format for layer in layers for product in layer.products} == {"fp8_block"}
    with pytest.raises(ValueError, match="should have multiples of 128"):
        command.in_blocks(bundled(**sizes | {"head_dim": 64, "num_key_value_heads": 1}))
    with pytest.raises(ValueError, match=r"--fp8-blocks is for .* quantised already \(fp8_on_load\)"):
        command.in_blocks(whole.quantised_on_load())


@pytest.mark.skipif(torch.cuda.is_available(), reason="is for machines without a GPU")
def test_the_command_needs_a_gpu(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        command.main(["--model", "bundled", "--output", str(tmp_path / "new.json")])
    assert end.value.code == 1
    assert "needs a CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_measured_is_a_step_of_the_model(ranks):
    """Of one rank's share, where it has others."""
    config = BUNDLED.share(Shard(0, ranks))
    model = Transformer(config, torch_ops, "float32", "cpu", max_seq_len=64)
    load_weights(model, "", "dummy")
    bench = ModelBench(model)
    layer = model.layers[0]
    weights = {"qkv": layer.qkv, "o": layer.o, "gate_up": layer.gate_up, "down": layer.down}
    weights["head"] = model.lm_head
    cases = c.of_model(config, c.FULL, tuned.fallback(), gated=True)
    shapes = {case.key: case.shape for case in cases if case.table == "linear"}
    assert {role: tuple(weight.data.shape) for role, weight in weights.items()} == shapes
    torch.manual_seed(0)
    body = bench.step(5)
    logits = body()
    assert logits.shape == (5, config.head.shape[0]) and logits.isfinite().all()
    assert torch.equal(body(), logits)  # a replay computes the same: nothing is added up
    assert not torch.equal(bench.step(5, layers=1)(), logits)


@pytest.mark.parametrize(
    "spec",
    [
        bundled(hidden_size=128, intermediate_size=256, head_dim=32).with_format("int4_awq_128"),
        bundled(**EXPERTS, num_experts=8, num_experts_per_tok=2),
    ],
    ids=["int4", "experts"],
)
def test_a_step_of_other_formats(spec):
    model = Transformer(spec, torch_ops, "float32", "cpu", max_seq_len=64)
    load_weights(model, "", "dummy")
    body = ModelBench(model).step(5)
    assert body().isfinite().all() and torch.equal(body(), body())


def test_candidates_are_compiled_together(monkeypatch, tmp_path):
    pytest.importorskip("triton")
    use_hopper(monkeypatch, tmp_path)
    from flashinfer_backend.ops.triton_linear import _linear, linear

    def product(role, x, weight, gated=False, **more):
        tiling = choose(role, len(x), weight.data)
        assert tiling is not None
        return linear(x, weight.data, tiling, gated=gated, **more)

    def mlp_add(x, norm, eps, gate_up, down, residual, *_):
        inner = product("gate_up", x, gate_up, norm_weight=norm, eps=eps, gated=True)
        return product(down.role, inner, down, residual=residual)

    ops: Any = SimpleNamespace(  # of cuda_ops what few tokens take, which need no FlashInfer
        norm_linear=lambda x, norm, eps, weight, bias, out=None, chosen=None: product(
            weight.role, x, weight, norm_weight=norm, eps=eps, bias=bias, out=out
        ),
        linear_add=lambda x, weight, residual, *_: product(weight.role, x, weight, residual=residual),
        mlp_add=mlp_add,
    )
    h200 = measured()
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "head_dim": 128, "vocab_size": 4096}
    config = bundled(num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=2, **sizes)
    bench = ModelBench(Transformer(config.share(Shard(0, 2)), ops, "bfloat16", "meta", max_seq_len=64))
    cases = c.of_model(config.share(Shard(0, 2)), c.FULL, h200, gated=True)
    (case,) = (case for case in cases if case.table == "linear" and case.key == "down")
    one = case.now(h200, 8)
    assert one is not None
    others = [case.with_step(h200, 8, replace(one, stages=stages)) for stages in (2, 4)]
    variants: list = []
    monkeypatch.setattr(prebuild_triton, "compile_together", variants.extend)
    measure.compile_all(bench.step(8, layers=1), [h200, *others])
    # Each role's, and two more of the down projection.
    assert len(variants) == 7 and {kernel for kernel, _ in variants} == {_linear}
    monkeypatch.undo()
    use_hopper(monkeypatch, tmp_path)
    told: list[int] = []
    assert prebuild_triton.compile_together(variants[:2], lambda: told.append(1)) == []
    assert len(told) == 2 and len(list(tmp_path.rglob("*.cubin"))) == 2
    (error,) = prebuild_triton.compile_together([(variants[0][0], "{}")])
    assert isinstance(error, KeyError)
