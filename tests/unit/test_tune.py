# SPDX-License-Identifier: Apache-2.0
"""The command that measures tuned numbers: what it makes of times, which are recorded or made up here."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hopper_driver import use_hopper
from msgspec.structs import replace

from flashinfer_backend.core import tuned
from flashinfer_backend.core.shard import Shard
from flashinfer_backend.core.tuned import BlockTile, Product, Role, Step, Tiling, Tuned
from flashinfer_backend.models.transformer import Transformer
from flashinfer_backend.models.weights import load_weights
from flashinfer_backend.ops import torch_ops
from flashinfer_backend.ops.tilings import choose
from flashinfer_backend.tune import __main__ as command
from flashinfer_backend.tune import search as s
from flashinfer_backend.tune.measure import ModelBench
from flashinfer_backend.worker import prebuild_triton
from specs import EXPERTS, bundled

BUNDLED = bundled()
SMALL = {"num_attention_heads": 4, "num_key_value_heads": 2}

LLAMA_8B: dict[Role, tuned.Shape] = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
# Microseconds of one product on an H200: tokens -> with cuBLAS, with cublasLt
# (docs/notes/performance-notes.md).
RECORDED: dict[Role, dict[int, tuple[float, float]]] = {
    "qkv": {80: (16.1, 16.2), 128: (16.7, 16.7), 208: (21.4, 20.6), 272: (28.1, 22.8), 512: (35.7, 35.7)},
    "o": {80: (13.0, 12.7), 128: (14.3, 14.4), 208: (18.6, 16.8), 272: (21.8, 19.6), 512: (24.7, 24.6)},
    "down": {80: (37.6, 33.0), 128: (37.5, 40.0), 208: (48.2, 48.2), 272: (53.9, 55.3), 512: (83.5, 83.6)},
}
CUBLAS: dict[Role, float] = {"qkv": 16.0, "o": 13.2, "gate_up": 66.4, "down": 31.7, "head": 250.0}
PLAN = s.Plan((8, 64, 256), (80, 128, 208, 272, 512), rounds=3)


class Recorded:
    """A Bench whose products take `tilings` microseconds by role and tiling, cuBLAS's time without one, and
    do not run with any other; the gated kernel takes `gated` by tokens."""

    def __init__(self, tilings: dict[tuple[Role, Tiling], float], gated: dict[int, float]) -> None:
        self.shapes = LLAMA_8B
        self.kinds: dict[Role, s.Kind] = dict.fromkeys(tuned.ROLES, "dense")
        self.tilings, self.gated = tilings, gated
        self.asked: set[tuple[Role, Tiling]] = set()

    def steps(self, tokens: int, candidates: Sequence[Tuned]) -> list[float]:
        return [sum(self._product(role, tokens, numbers) for role in tuned.ROLES) for numbers in candidates]

    def _product(self, role: Role, tokens: int, numbers: Tuned) -> float:
        tiling = numbers.tiling(role, tokens, LLAMA_8B[role])
        fewest = numbers.gated_linear.fewest_tokens
        fused = tiling is not None and tiling.fuse_norm
        if role == "gate_up" and fewest is not None and tokens >= fewest and not fused:
            return self.gated[tokens]
        if tiling is None:
            return CUBLAS[role]
        self.asked.add((role, tiling))
        return self.tilings.get((role, tiling), math.inf)

    def interfaces(self, role: Role, tokens: int) -> tuple[float, float]:
        return RECORDED[role][tokens]

    def waves(self) -> dict[int, float]:
        return {64: 18.0, 256: 47.0} if self.gated else {}


class RecordedFp8(Recorded):
    """The same of a model whose layers are in FP8, of a kind; tiles of blocks take `tiles` microseconds, and
    cuBLAS with blocks `by_cublas`."""

    def __init__(self, kind: s.Kind, tilings: dict, tiles: dict[tuple[Role, BlockTile], float]) -> None:
        super().__init__(tilings, {})
        self.kinds = dict.fromkeys(tuned.ROLES, kind) | {"head": "dense"}
        self.tiles = tiles
        self.by_cublas: dict[tuple[Role, int], float] = {}

    def _product(self, role: Role, tokens: int, numbers: Tuned) -> float:
        if self.kinds[role] == "dense":
            return super()._product(role, tokens, numbers)
        if self.kinds[role] == "blocks":
            tile = numbers.block_tile(role, tokens)
            if tile is None:
                return self.by_cublas.get((role, tokens), math.inf)
            return self.tiles.get((role, replace(tile, tokens=None)), 50.0)
        tiling = numbers.tiling(role, tokens, LLAMA_8B[role], fp8=True)
        fewest = numbers.fp8_gated_linear.fewest_tokens if numbers.fp8_gated_linear else None
        fused = tiling is not None and tiling.quantise
        if role == "gate_up" and fewest is not None and tokens >= fewest and not fused:
            return self.gated[tokens]
        if tiling is not None:
            self.asked.add((role, tiling))
        return CUBLAS[role] if tiling is None else self.tilings.get((role, tiling), math.inf)


def quiet(line: str) -> None:
    pass


def steps_of(numbers: Tuned, role: Role) -> dict[int, Tiling | None]:
    return {step.tokens: step.tiling for step in numbers.steps(role, LLAMA_8B[role])}


START, BETTER, BEST = Tiling(16, 64, 128), Tiling(16, 64, 256), Tiling(16, 64, 256, stages=3)


def test_a_search_goes_from_neighbour_to_neighbour():
    bench = Recorded({("qkv", START): 15.9, ("qkv", BETTER): 15.0, ("qkv", BEST): 14.0}, {})
    lines: list[str] = []
    found = s.search(tuned.fallback(), bench, PLAN, lines.append)
    (said,) = (line for line in lines if line.startswith("qkv [6144, 4096], 8 tokens: Tiling("))
    assert said.endswith("step 375.3 us, 377.3 us before")
    assert "down [4096, 14336], 8 tokens: cuBLAS, step 375.3 us, as before" in lines
    assert steps_of(found, "qkv") == {8: BEST, 64: None, 256: None}
    assert steps_of(found, "down") == {8: None, 64: None, 256: None}  # nothing else runs
    assert found.scheduling == tuned.fallback().scheduling
    assert found.decode_attention == tuned.fallback().decode_attention
    without_rounds = s.search(tuned.fallback(), bench, s.Plan((8,), (80,), rounds=0), quiet)
    assert steps_of(without_rounds, "qkv")[8] == BEST  # which an H200's file has for these tokens


def test_products_in_fp8_have_tilings_of_their_own():
    """What weights in 16 bits have stays, but for the head, which is in them."""
    h200 = tuned.load("NVIDIA H200")
    assert h200 is not None
    guess = Product(None, (Step(16, Tiling(16, 64, 256, 4)),))
    base = replace(h200, products={}, fp8_products={"o": (guess,), "qkv": (guess,)})
    start, better = Tiling(16, 64, 256, 4), Tiling(16, 64, 512, 4)
    best = Tiling(16, 64, 512, 4, quantise=True)
    times = {("o", start): 10.0, ("o", better): 9.0, ("o", best): 8.0}
    bench = RecordedFp8("rows", times, {})
    lines: list[str] = []
    found = s.search(base, bench, PLAN, lines.append)
    assert found.tiling("o", 8, LLAMA_8B["o"], fp8=True) == best
    assert found.tiling("down", 8, LLAMA_8B["down"], fp8=True) is None  # nothing else runs
    assert found.products.keys() == {"head"}
    assert (found.interfaces, found.gated_linear) == (base.interfaces, base.gated_linear)
    assert any("as the layers' weights are in FP8" in line for line in lines)
    for role, tiling in bench.asked:
        assert tiling.fits(LLAMA_8B[role], role == "gate_up", 8) and (tiling.fuse_norm or role == "head")
        assert tiling.split == 1 or role != "gate_up"
    assert any(tiling.split > 1 for role, tiling in bench.asked if role == "qkv")
    assert {tiling.quantise for role, tiling in bench.asked if role == "down"} == {False, True}
    assert not s.possible(best, "o", LLAMA_8B["o"], 64, fp8=True)
    changed = s.changes(base, found, LLAMA_8B, bench.kinds)
    assert any(line.startswith("o, 1..8 tokens: (16, 64, 256, 4") for line in changed)


def test_one_token_in_fp8_has_a_tile_of_its_own():
    alone = Tiling(1, 64, 128, quantise=True)
    bench = RecordedFp8("rows", {("down", alone): 20.0}, {})
    found = s.search(tuned.fallback(), bench, replace_tokens(PLAN, (1, 8)), quiet)
    assert found.tiling("down", 1, LLAMA_8B["down"], fp8=True) == alone
    assert found.tiling("down", 2, LLAMA_8B["down"], fp8=True) is None


def replace_tokens(plan: s.Plan, tokens: tuple[int, ...]) -> s.Plan:
    return s.Plan(tokens, plan.interface_tokens, plan.rounds)


def test_blocks_have_tiles_by_role_and_tokens():
    split, wide = BlockTile(None, 16, 64, 4, 4, 4), BlockTile(None, 128, 128, 1, 4, 8)
    bench = RecordedFp8("blocks", {}, {("down", split): 20.0, ("gate_up", wide): 30.0})
    found = s.search(tuned.fallback(), bench, PLAN, quiet)
    down = {tile.tokens: tile for tile in found.block_tiles("down")}
    assert down[16] == replace(split, tokens=16)
    assert down[64] == replace(tuned.BLOCK_TILES[2], tokens=64)
    gate_up = {tile.tokens: tile for tile in found.block_tiles("gate_up")}
    assert gate_up[None] == wide and gate_up[16].tile == 16
    assert found.products.keys() <= {"head"}
    read = tuned.Tuned(**{name: getattr(found, name) for name in found.__struct_fields__})
    assert read.block_tiles("qkv")[-1].tokens is None
    with pytest.raises(ValueError, match=r"last entry of fp8_blocks\.qkv should have tokens null"):
        replace(found, fp8_blocks={"qkv": (BlockTile(16, 16, 64),)})
    changed = s.changes(tuned.fallback(), found, LLAMA_8B, bench.kinds)
    assert any(
        line.startswith("down, 1..16 tokens: (16, 64, 1, 4, 4) -> (16, 64, 4, 4, 4)") for line in changed
    )


@pytest.mark.parametrize(
    ("us", "fewest"),
    [
        ({16: 60.0, 64: 60.0, 1024: 40.0}, 65),
        ({16: 60.0, 64: 40.0, 1024: 40.0}, 17),
        ({16: 40.0, 64: 40.0, 1024: 40.0}, 1),
        ({16: 40.0, 64: 60.0, 1024: 40.0}, 65),
        ({16: 40.0, 64: 40.0, 1024: 49.9}, None),  # within what repeats differ by
        ({16: 40.0, 64: 40.0, 1024: math.inf}, None),  # no Hopper GPU
    ],
)
def test_cublas_multiplies_blocks_above_the_last_size_at_which_it_is_slower(us, fewest):
    bench = RecordedFp8("blocks", {}, {})
    bench.by_cublas |= {("down", tokens): each for tokens, each in us.items()}
    base = replace(tuned.fallback(), fp8_blocks_by_cublas={"down": 300, "o": 5})
    lines: list[str] = []
    found = s.search(base, bench, PLAN, lines.append)
    assert found.fp8_blocks_by_cublas == ({} if fewest is None else {"down": fewest})
    assert "down, 1024 tokens: step" in "".join(line for line in lines if "with cuBLAS" in line)
    assert [found.block_tile("down", tokens) is None for tokens in (1, 17, 65, 4096)] == [
        fewest is not None and tokens >= fewest for tokens in (1, 17, 65, 4096)
    ]
    changed = s.changes(base, found, LLAMA_8B, bench.kinds)
    assert any(line.startswith("o, 5..16 tokens: cuBLAS -> (16, 64, 1, 4, 4)") for line in changed)


def test_without_time_blocks_stay_as_they_were():
    base = replace(tuned.fallback(), fp8_blocks_by_cublas={"down": 300, "o": 5})
    found = s.search(base, RecordedFp8("blocks", {}, {}), replace_seconds(PLAN), quiet)
    assert found == base


def test_tiles_that_are_tried_divide_the_work():
    for role in ("qkv", "o", "gate_up", "down"):
        shape = LLAMA_8B[role]
        for tokens in (1, 16, 64, 128, 256, 1024, 4096):
            tiles = s.block_tiles(shape, tokens, None)
            assert len(tiles) == len(set(tiles)) >= 8
            for tile in tiles:
                assert shape[1] // 128 % tile.split == 0 and (tile.split == 1 or tokens <= 256)
                assert tile.tile <= 128 and (tokens > 64 or tile.tile < max(32, 2 * tokens))
    assert any(tile.split == 8 for tile in s.block_tiles(LLAMA_8B["down"], 1, None))


def test_a_gain_within_what_repeats_differ_by_changes_nothing():
    total = sum(CUBLAS.values())
    for gain, expected in ((0.001 * total, None), (0.003 * total, BEST)):
        bench = Recorded({("qkv", BEST): CUBLAS["qkv"] - gain}, {})
        assert steps_of(s.search(tuned.fallback(), bench, PLAN, quiet), "qkv")[8] == expected


def test_only_tilings_that_the_kernel_can_have_are_tried():
    bench = Recorded({(role, START): 1.0 for role in tuned.ROLES}, {})
    s.search(tuned.fallback(), bench, PLAN, quiet)
    assert len(bench.asked) > 50
    for role, tiling in bench.asked:
        assert tiling.fits(LLAMA_8B[role], role == "gate_up", 8)
        assert (tiling.split == 1 or role != "gate_up") and not tiling.quantise
    head = Tiling(64, 64, 128, split=4, fuse_norm=False)  # 33 million sums, and there is room for 17
    assert not s.possible(head, "head", LLAMA_8B["head"], 64) and s.possible(head, "qkv", (6144, 4096), 64)


def test_interfaces_follow_from_recorded_times():
    found = s.search(tuned.fallback(), Recorded({}, {}), PLAN, quiet)
    by_shape = {entry.shape: entry.lt for entry in found.interfaces}
    assert by_shape == {(6144, 4096): (208, 272), (4096, 4096): (80, 208, 272), (4096, 14336): (80,)}
    h200 = tuned.load("NVIDIA H200")
    assert h200 is not None
    for entry in found.interfaces:  # as the whole measurement said of the same sizes
        assert all(h200.takes_lt(entry.shape, t) == (t in entry.lt) for t in entry.tokens)
    assert not found.takes_lt((4096, 4096), 64) and found.takes_lt((4096, 4096), 65)


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
    found = s.search(tuned.fallback(), Recorded({}, gated), PLAN, quiet)
    assert found.gated_linear.fewest_tokens == fewest
    waves = {64: 18.0, 256: 47.0} if gated else tuned.fallback().gated_linear.wave_us
    assert found.gated_linear.wave_us == waves


def test_a_tiling_with_the_norm_in_it_does_not_hide_the_gated_kernel():
    fused = Tiling(128, 64, 128)
    bench = Recorded({("gate_up", fused): 65.0, ("gate_up", replace(fused, fuse_norm=False)): 66.0}, {})
    assert steps_of(s.search(tuned.fallback(), bench, PLAN, quiet), "gate_up")[256] == fused
    bench.gated = {8: 70.0, 64: 70.0, 256: 60.0, 1024: 60.0}
    found = s.search(tuned.fallback(), bench, PLAN, quiet)
    assert steps_of(found, "gate_up")[256] == replace(fused, fuse_norm=False)
    assert found.gated_linear.fewest_tokens == 65


def test_the_gated_kernel_of_fp8_has_numbers_of_its_own():
    bench = RecordedFp8("rows", {("gate_up", Tiling(64, 64, 128, quantise=True)): 50.0}, {})
    found = s.search(tuned.fallback(), bench, PLAN, quiet)
    assert found.fp8_gated_linear is not None and found.fp8_gated_linear.fewest_tokens is None
    bench.gated = {8: 70.0, 64: 70.0, 256: 48.0, 1024: 60.0}
    found = s.search(tuned.fallback(), bench, PLAN, quiet)
    assert found.gated_linear == tuned.fallback().gated_linear
    assert found.fp8_gated_linear is not None and found.fp8_gated_linear.fewest_tokens == 65
    assert found.fp8_gated_linear.wave_us == {64: 18.0, 256: 47.0}
    apart = found.tiling("gate_up", 256, LLAMA_8B["gate_up"], fp8=True)
    assert apart is None or not apart.quantise


def test_when_time_is_up_the_rest_stays():
    h200 = tuned.load("NVIDIA H200")
    assert h200 is not None
    lines: list[str] = []
    found = s.search(h200, Recorded({}, {}), replace_seconds(PLAN), lines.append)
    assert (found.products, found.interfaces) == (h200.products, h200.interfaces)
    assert sum("out of time" in line for line in lines) == 3 + 5 * len(PLAN.tokens)


def replace_seconds(plan: s.Plan) -> s.Plan:
    return s.Plan(plan.tokens, plan.interface_tokens, plan.rounds, seconds=-1.0)


def test_a_shape_without_an_entry_begins_as_the_rule():
    rule = Product(None, (Step(8, START), Step(64, BETTER)))
    numbers = replace(tuned.fallback(), products={"o": (rule,)})
    one = s.with_tiling(numbers, "o", (4096, 4096), 16, BEST)
    assert steps_of(one, "o") == {8: START, 16: BEST, 64: BETTER}
    assert one.steps("o", (2048, 2048)) == rule.steps
    two = s.with_tiling(one, "o", (4096, 4096), 64, None)
    assert steps_of(two, "o") == {8: START, 16: BEST, 64: None}


def test_the_command_writes_a_file_that_gathers_shapes(tmp_path, capsys):
    output = tmp_path / "nvidia-x.json"
    bench = Recorded({("qkv", BEST): 14.0}, {8: 60.0, 64: 70.0, 1024: 60.0})
    bench.interfaces = lambda role, tokens: (20.0, 19.0 if tokens == 192 else 20.0)  # type: ignore[method-assign]
    base = command.starting_point(output, "NVIDIA X")
    assert base == replace(tuned.fallback(), device="NVIDIA X")
    command.tune(base, bench, s.QUICK, output, measured={"shape": "a", "torch": "1"})
    printed = capsys.readouterr().out
    assert "qkv, 1..8 tokens: cuBLAS -> (16, 64, 256, 1, 3" in printed
    assert "o, 129..192 tokens: cuBLAS -> cublasLt" in printed
    found = command.starting_point(output, "NVIDIA X")
    assert found.tiling("qkv", 8, LLAMA_8B["qkv"]) == BEST and found.gated_linear.fewest_tokens == 65
    bench.shapes = LLAMA_8B | {"qkv": (5120, 4096)}
    command.tune(found, bench, s.QUICK, output, measured={"shape": "b", "torch": "2"})
    both = tuned.read(output)
    assert [product.shape for product in both.products["qkv"]] == [(6144, 4096), (5120, 4096)]
    assert both.measured == {"shape": "a; b", "torch": "2"}
    with pytest.raises(ValueError, match="has the numbers of NVIDIA X, and this is NVIDIA Y; name another"):
        command.starting_point(output, "NVIDIA Y")


def test_chosen_sizes_leave_the_gated_kernel_alone():
    """Which sizes it takes follows from many, so a few say nothing of it."""
    h200 = tuned.load("NVIDIA H200")
    assert h200 is not None and h200.gated_linear.fewest_tokens == 65
    base = replace(tuned.fallback(), gated_linear=h200.gated_linear)
    few, many = Tiling(64, 64, 128), Tiling(128, 64, 128)
    bench = Recorded({("gate_up", few): 1.0, ("down", many): 1.0}, {256: 10.0})
    lines: list[str] = []
    found = s.search(base, bench, s.Plan((48, 256), (80,), rounds=0, gated=False), lines.append)
    assert found.gated_linear == h200.gated_linear
    assert found.tiling("gate_up", 48, LLAMA_8B["gate_up"]) == few
    assert found.tiling("gate_up", 256, LLAMA_8B["gate_up"]) is None
    assert found.tiling("down", 256, LLAMA_8B["down"]) == many
    assert "gate_up, 256 tokens: as before, as the gated kernel has them" in lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "32,16"], "32,16: the numbers should rise"),
        (["--tokens", "0"], "should be a whole number from 1"),
        (
            ["--fp8-blocks", "--tokens", "16"],
            r"is for weights without scales of 128x128 blocks; leave it out",
        ),
        (["--layers", "9"], r"--layers 9: the model has 2"),
        (["--tensor-parallel-size", "8"], "tensor_parallel_size=8 should divide num_attention_heads"),
        (["--tensor-parallel-size", "3"], "invalid choice: 3"),
    ],
)
def test_the_command_refuses_what_it_cannot_measure(arguments, message, tmp_path, capsys, monkeypatch):
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128}
    small = bundled(**SMALL, num_hidden_layers=2, **sizes)
    monkeypatch.setattr(command, "read_spec", lambda _: small)
    with pytest.raises(SystemExit) as end:
        command.main(["--model", "bundled", "--output", str(tmp_path / "new.json"), *arguments])
    assert end.value.code == 2
    assert re.search(message, " ".join(capsys.readouterr().err.split()))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            BUNDLED.with_format("int4_awq_128"),
            "weights of 4 bits are measured by perf_configs/kernels/bench_int4.py",
        ),
        (
            bundled(**EXPERTS, num_experts=8, num_experts_per_tok=2),
            "mixtures of experts are measured by perf_configs/kernels/bench_experts.py",
        ),
    ],
)
def test_what_has_another_command_is_refused(other, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "read_spec", lambda _: other)
    with pytest.raises(SystemExit):
        command.main(["--model", "bundled", "--output", str(tmp_path / "new.json")])
    assert message in capsys.readouterr().err


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
    assert bench.kinds == dict.fromkeys(weights, "dense")
    fp8 = Transformer(config.quantised_on_load(), torch_ops, "float32", "cpu", max_seq_len=64)
    assert ModelBench(fp8).kinds == dict.fromkeys(weights, "rows") | {"head": "dense"}
    assert {role: tuple(weight.data.shape) for role, weight in weights.items()} == bench.shapes
    torch.manual_seed(0)
    body = bench.step(5)
    logits = body()
    assert logits.shape == (5, config.head.shape[0]) and logits.isfinite().all()
    assert torch.equal(body(), logits)  # a replay computes the same: nothing is added up
    assert not torch.equal(bench.step(5, layers=1)(), logits)


def test_candidates_are_compiled_together(monkeypatch, tmp_path):
    pytest.importorskip("triton")
    use_hopper(monkeypatch, tmp_path)
    from flashinfer_backend.ops.triton_linear import _linear, linear

    def product(role, x, weight, gated=False, **more):
        tiling = choose(role, len(x), weight.data)
        assert tiling is not None
        return linear(x, weight.data, tiling, gated=gated, **more)

    ops: Any = SimpleNamespace(  # of cuda_ops what few tokens take, which need no FlashInfer
        norm_linear=lambda x, norm, eps, weight, bias, out=None: product(
            weight.role, x, weight, norm_weight=norm, eps=eps, bias=bias, out=out
        ),
        linear_add=lambda x, weight, residual: product(weight.role, x, weight, residual=residual),
        norm_gate_up_silu=lambda x, norm, eps, weight: product(
            "gate_up", x, weight, norm_weight=norm, eps=eps, gated=True
        ),
    )
    h200 = tuned.load("NVIDIA H200")
    assert h200 is not None
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "head_dim": 128, "vocab_size": 4096}
    config = bundled(num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=2, **sizes)
    bench = ModelBench(Transformer(config.share(Shard(0, 2)), ops, "bfloat16", "meta", max_seq_len=64))
    shape = bench.shapes["down"]
    one = h200.tiling("down", 8, shape)
    assert one is not None
    others = [s.with_tiling(h200, "down", shape, 8, replace(one, stages=stages)) for stages in (2, 4)]
    variants: list = []
    monkeypatch.setattr(prebuild_triton, "compile_together", variants.extend)
    bench._compile(8, [h200, *others])
    # Each role's, and two more of the down projection.
    assert len(variants) == 7 and {kernel for kernel, _ in variants} == {_linear}
    monkeypatch.undo()
    use_hopper(monkeypatch, tmp_path)
    told: list[int] = []
    assert prebuild_triton.compile_together(variants[:2], lambda: told.append(1)) == []
    assert len(told) == 2 and len(list(tmp_path.rglob("*.cubin"))) == 2
    (error,) = prebuild_triton.compile_together([(variants[0][0], "{}")])
    assert isinstance(error, KeyError)
