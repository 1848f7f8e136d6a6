# SPDX-License-Identifier: Apache-2.0
"""Tuned numbers: the files, what is chosen by them, and devices without one."""

import hashlib
import json
import re
from itertools import product

import msgspec
import pytest
import torch
from msgspec.structs import replace

from flashinfer_backend.attention import split
from flashinfer_backend.core import tuned
from flashinfer_backend.core.tuned import LAYER_ROLES, BlockTile, Entry, RowTile, Tiling, Tuned, find, steps
from flashinfer_backend.ops import blocks_linear, cublas, cuda_module, device, gated_linear, tilings
from tables import LLAMA_8B, entries, measured

FILES = sorted(tuned.FOLDER.glob("*.json"))


@pytest.fixture
def h200() -> Tuned:
    return measured()


def choices(tokens: int) -> list[object]:
    """All that is chosen for a step of so many tokens or rows."""
    products: list[object] = []
    for role, shape in LLAMA_8B.items():
        tiling = tilings.choose(role, tokens, torch.empty(shape, device="meta"))
        products += [tiling and list(msgspec.structs.astuple(tiling)), cublas.takes_lt(*shape, tokens)]
    attention = list(msgspec.structs.astuple(split.choose_config(tokens, fp8=False)))
    tile = gated_linear.tile_tokens(tokens, LLAMA_8B["gate_up"][0], 132)
    return [*products, gated_linear.pays(tokens), tile, attention]


@pytest.mark.parametrize(
    ("name", "stages", "expected"),
    [("NVIDIA H200", 4, "a17ac9b76a3aa5aa"), ("NVIDIA H100 80GB HBM3", 3, "29493b4e7a25a1e2")],
)
def test_choices_for_a_device_are_the_measured_ones(name, stages, expected):
    """A digest of every choice up to 2048 tokens: what changes one should be a measurement."""
    with device.use(measured(name)):
        every = [choices(tokens) for tokens in range(1, 2049)]
        assert choices(16)[0] == [16, 64, 256, 1, stages, 4, True, 32768, True, True, False]
    assert hashlib.sha256(msgspec.json.encode(every)).hexdigest()[:16] == expected


def test_a_device_that_nobody_has_measured_takes_cublas():
    assert tuned.load("NVIDIA H100 PCIe") is None and tuned.load("fallback") is None
    with device.use(tuned.fallback()):
        for tokens in (1, 64, 300):
            assert not gated_linear.pays(tokens)
            for role, shape in LLAMA_8B.items():
                assert tilings.choose(role, tokens, torch.empty(shape, device="meta")) is None
                assert not cublas.takes_lt(*shape, tokens)


@pytest.mark.parametrize(
    ("name", "capability", "sms", "expected", "said"),
    [
        ("NVIDIA GH200 480GB", (9, 0), 132, "NVIDIA H200", "using those of the NVIDIA H200 (same chip)"),
        ("NVIDIA H100 PCIe", (9, 0), 114, "any other",
         "no tuned values for NVIDIA H100 PCIe: using cuBLAS for products"),
        ("NVIDIA B200", (10, 0), 132, "any other", "using cuBLAS for products"),
        ("NVIDIA H100 80GB HBM3", (9, 0), 132, "NVIDIA H100 80GB HBM3", ""),
    ],
)  # fmt: skip
def test_a_device_without_numbers_takes_those_of_its_processor(
    name, capability, sms, expected, said, monkeypatch, caplog
):
    monkeypatch.setattr(device, "_active", [])
    monkeypatch.setattr(device, "sms", lambda: sms)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert device.active().device == expected
    assert said in caplog.text and bool(said) == bool(caplog.text)


def test_a_shape_of_its_own_wins_over_the_rule_for_all(h200):
    rule, own = h200.linear["o"][0], Entry(LLAMA_8B["o"], ((8, None), (32, Tiling(32, 64, 64))))
    assert rule.shape is None
    with device.use(replace(h200, linear=h200.linear | {"o": (rule, own)})):
        same, other = (torch.empty(n, 4096, device="meta") for n in (4096, 2048))
        assert tilings.choose("o", 8, same) is None
        assert tilings.choose("o", 9, same) == Tiling(32, 64, 64)
        assert tilings.choose("o", 33, same) is None
        assert tilings.choose("o", 8, other) == rule.steps[0][1]
    with device.use(h200):  # nothing of the choices before is remembered
        assert tilings.choose("o", 8, same) == rule.steps[0][1]


def test_the_rule_by_which_tables_are_read():
    table = {"o": (*entries((8, "a"), (16, None), (None, "b")), *entries((4, "c"), shape=(64, 64)))}
    found = [find(table, "o", tokens) for tokens in (1, 8, 9, 16, 17, 9999)]
    assert found == ["a", "a", None, None, "b", "b"]
    assert [find(table, "o", tokens, (64, 64)) for tokens in (4, 5)] == ["c", None]
    assert find(table, "o", 4, (64, 65)) == "a" and find(table, "down", 4) is None
    assert steps(table, "o", (64, 64)) == ((4, "c"),) and steps(table, "down") == ()


def test_blocks_take_cublas_from_as_many_tokens_on_as_the_file_says(h200):
    few, many = BlockTile(16, 64), BlockTile(64, 128)
    blocks = h200.blocks_fp8 | {"o": entries((16, few), (99, many), (None, None))}
    numbers = replace(h200, blocks_fp8=blocks | {"down": entries((0, few), (None, None))})
    with device.use(msgspec.json.decode(msgspec.json.encode(numbers), type=Tuned)):
        assert [tilings.choose_blocks("o", tokens, 4096) for tokens in (16, 17, 99, 100, 4096)] == [
            *(few, many, many), None, None,
        ]  # fmt: skip
        assert tilings.choose_blocks("down", 1, 4096) is None
        # Rows that leave a block unfilled are Triton's.
        assert tilings.choose_blocks("o", 100, 4096 + 64) == many
        assert tilings.choose_blocks("down", 1, 4096 + 64) == few
    fallback = tuned.fallback()
    assert all(find(fallback.blocks_fp8, role, tokens) for role in LAYER_ROLES for tokens in (1, 64, 4096))


def test_the_cuda_kernel_of_blocks_takes_few_tokens_of_whole_tiles(h200):
    tile = RowTile(4, 3)
    with device.use(replace(h200, blocks_linear={"o": entries((16, tile), (32, None))})):
        assert [tilings.choose_rows("o", tokens, 5120, 6144) for tokens in (1, 16, 17)] == [tile, tile, None]
        assert tilings.choose_rows("down", 1, 5120, 6144) is None  # not in the table
        assert tilings.choose_rows("o", 1, 5120 + 128, 6144) is None  # tiles of 256 rows
        assert tilings.choose_rows("o", 1, 5120, 256) is None  # two blocks for three parts
    for fields, said in (
        ({"groups": 3}, "Invalid enum value 3"),
        ({"split": 9}, "Expected `int` <= 8"),
        ({"split": 0}, "Expected `int` >= 1"),
    ):
        with pytest.raises(msgspec.ValidationError, match=said):
            msgspec.convert(fields, RowTile)
    for limit in (64, None):
        with pytest.raises(ValueError, match="for at most 32 tokens"):
            replace(h200, blocks_linear={"o": entries((limit, tile))})


def test_the_cuda_kernel_of_blocks_has_the_tiles_that_numbers_can_name():
    listed = re.findall(r"TILE\((\d+), (\d+)\)", (cuda_module.CUDA / "blocks_linear.cu").read_text())
    assert sorted((int(a), int(b)) for a, b in listed) == sorted(product(blocks_linear.TOKENS, (2, 4)))


def test_a_modules_name_depends_on_what_its_source_includes(tmp_path, monkeypatch):
    """And not on other files: what was compiled for those stays."""
    files = {
        "a.cu": '#include "a_kernel.cuh"\n#include <cuda.h>\n',
        "a_kernel.cuh": '#include "shared.cuh"\n#include "a.cu"\n',
    }
    for name, text in {**files, "shared.cuh": "1", "other.cuh": "2"}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(cuda_module, "CUDA", tmp_path)
    assert list(cuda_module._texts(tmp_path / "a.cu", set())) == [*files.values(), "1"]


def test_a_tiling_that_does_not_fit_is_left_out(h200):
    with device.use(h200):
        assert tilings.choose("qkv", 8, torch.empty(96, 4096, device="meta")) is None
        assert tilings.choose("down", 8, torch.empty(4096, 256, device="meta")) is None
        assert tilings.choose("gate_up", 8, torch.empty(64, 256, device="meta")) is None
        assert tilings.choose("qkv", 8, torch.empty(64, 256, device="meta")) is not None


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_are_as_they_would_be_written(path, tmp_path):
    numbers = tuned.read(path)
    assert path.stem in (tuned.FALLBACK, tuned.slug(numbers.device))
    assert set(numbers.gated_linear.wave_us) <= set(gated_linear.TILES)
    copy = tmp_path / "copy.json"
    tuned.write(copy, numbers)
    assert tuned.read(copy) == numbers
    own = json.loads(path.read_text())
    assert (tuned._text(own) + "\n" if "like" in own else copy.read_text()) == path.read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_that_builds_on_another_repeats_none_of_it(path):
    own = json.loads(path.read_text())
    if "like" not in own:
        return
    other = json.loads((tuned.FOLDER / f"{own['like']}.json").read_text())
    for name, section in own.items():
        assert section != other.get(name)
        if isinstance(section, dict) and name != "measured":
            assert not [key for key in section if key in other[name] and section[key] == other[name][key]]


def test_a_file_can_build_on_another(h200, tmp_path):
    """By role and key, and what is empty takes away."""
    own = {
        "device": "NVIDIA X", "measured": {"by": "hand"}, "like": "nvidia-h200", "int4": {},
        "fp8_gated_linear": None, "scheduling": {"slow_step_ms": 9}, "linear_fp8": {"head": []},
        "linear": {"qkv": [{"shape": None, "steps": [[8, {"tokens": 16, "rows": 64, "inner": 64}]]}]},
        "linear_adapted": {"o": [{"shape": None, "steps": []}]},
    }  # fmt: skip
    path = tmp_path / "nvidia-x.json"
    path.write_text(json.dumps(own))
    assert tuned.read(path) == replace(
        h200, device="NVIDIA X", measured={"by": "hand"}, int4={}, fp8_gated_linear=None,
        scheduling=replace(h200.scheduling, slow_step_ms=9),
        linear_fp8=h200.linear_fp8 | {"head": ()},
        linear=h200.linear | {"qkv": entries((8, Tiling(16, 64, 64)))},
        linear_adapted={"o": entries()},
    )  # fmt: skip
    for name in ("device", "measured"):
        path.write_text(json.dumps({key: value for key, value in own.items() if key != name}))
        with pytest.raises(ValueError, match=f"missing required field `{name}`"):
            tuned.read(path)


def test_a_file_cannot_build_on_itself_or_on_none(tmp_path, monkeypatch):
    one, two = tmp_path / "nvidia-1.json", tmp_path / "nvidia-2.json"
    whole = (tuned.FOLDER / "nvidia-h200.json").read_text()
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    (tmp_path / "nvidia-h200.json").write_text(whole)

    def refused(path, like, said):
        path.write_text(json.dumps({"device": "NVIDIA 1", "measured": {}, "like": like}))
        with pytest.raises(ValueError, match=re.escape(said)) as error:
            tuned.read(one)
        assert str(error.value).startswith(f"{one}: ")

    two.write_text(whole)
    refused(one, "nvidia-1", "like should be one of nvidia-2, nvidia-h200, not nvidia-1")
    refused(one, ["nvidia-2"], "like should be one of nvidia-2, nvidia-h200, not ['nvidia-2']")
    refused(one, "nvidia-3", "not nvidia-3")
    refused(one, "../nvidia-2", "not ../nvidia-2")
    one.write_text(json.dumps({"device": "NVIDIA 1", "measured": {}, "like": "nvidia-2"}))
    refused(two, "nvidia-1", f"{two}: like should be one of nvidia-h200, not nvidia-1")
    two.write_text(whole.replace("filled_step", "filled_steps"))
    with pytest.raises(ValueError, match=f"{one}: {two}: Object .* `filled_steps`"):
        tuned.read(one)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('[16, {"tokens"', '[4, {"tokens"', r"steps should rise, not be \[8, 4"),
        ('[32, {"tokens"', '[-1, {"tokens"', "Expected `int` >= 0"),
        ('"cublasLt"', '"lt"', "Invalid enum value 'lt'"),
        ("[null, {", "[2000, {",
         r"last step of decode_attention.* should have null for its tokens: all more"),
        ('[\n      {"shape": null', '[\n      {"shape": null, "steps": []},\n      {"shape": null',
         "linear.qkv should have one entry a shape"),
        ('"block": 64', '"block": 48', "block should be a power of two of at least 16, not 48"),
        ('"prefetch": 16', '"prefetch": 24', "prefetch should be a power of two of at least 0, not 24"),
        ('"programs_per_sm": 2', '"programs_per_sm": 0', "Expected `int` >= 1 - at .*programs_per_sm"),
        ('"stages": 3, "warps": 2, "prefetch": 16', '"stages": 0, "warps": 2, "prefetch": 16',
         "Expected `int` >= 1 - at .*stages"),
        ('"qkv"', '"wide"', "keys of linear should be qkv, .*, not wide"),
        ('"16 bits"', '"8 bits"', "keys of cublas should be 16 bits, not 8 bits"),
        ('"filled_step"', '"filled_steps"', "filled_steps"),
        ('"teams": 2', '"teams": 3', "teams should be 0, 1 or 2 for a tile of 16 .* not 3 for 16"),
        ('"tile_of_many": 192', '"tile_of_many": 512', "wave_us should have a tile of at least"),
        ('"shape": null', '"shape": [1]', "length 2"),
        ("{", "", "Expected `object`"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_by_name(tmp_path, old, new, message):
    text = (tuned.FOLDER / "nvidia-h200.json").read_text()
    assert old in text
    path = tmp_path / "nvidia-x.json"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=message) as error:
        tuned.read(path)
    assert str(path) in str(error.value)


ROWS, SMS = 28672, 132  # Llama-3.1-8B on an H200


def waves(tokens: int, tile: int) -> int:
    return -(-(-(-tokens // tile) * (ROWS // 128)) // SMS)


def test_tiles_fill_waves():
    wave_us = device.active().gated_linear.wave_us
    assert gated_linear.tile_tokens(256, ROWS, SMS) == 256  # two waves of one tile a weight block
    assert gated_linear.tile_tokens(288, ROWS, SMS) == 144  # not two tiles of 256, mostly padding
    assert gated_linear.tile_tokens(72, ROWS, SMS) == 80
    for tokens in range(65, 2049, 13):
        tile = gated_linear.tile_tokens(tokens, ROWS, SMS)
        time = waves(tokens, tile) * wave_us[tile]
        assert all(time <= waves(tokens, t) * us for t, us in wave_us.items())


def test_many_tokens_take_large_tiles():
    assert all(gated_linear.tile_tokens(tokens, ROWS, SMS) >= 192 for tokens in (2049, 4096, 8192))


def test_there_is_none_without_a_hopper_gpu():
    assert not gated_linear.takes(torch.empty(256, 128, dtype=torch.bfloat16))
