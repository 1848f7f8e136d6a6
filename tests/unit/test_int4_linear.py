# SPDX-License-Identifier: Apache-2.0
"""When products with weights of 4 bits take the CUDA kernel, and with which tiles, without a GPU."""

import re

import msgspec
import pytest
import torch
from msgspec.structs import replace

from flashinfer_backend.core import tuned
from flashinfer_backend.core.tuned import Int4Tile, Tuned
from flashinfer_backend.ops import cuda_module, device, int4_linear
from flashinfer_backend.ops.tilings import MOST_UNTUNED, choose_int4, untuned_int4
from flashinfer_backend.ops.weight import FORMATS, Int4, Weight
from flashinfer_backend.tune import cases
from tables import LLAMA_8B, entries

SHAPES = [shape for role, shape in LLAMA_8B.items() if role != "head"]
SMALL, LARGE = Int4Tile(8, 64, 1, 4, 4, 3), Int4Tile(64, 32, 4, 1, 8, 3)


def kind(tile: Int4Tile) -> tuple[int, int, int]:
    return tile.tokens, tile.warp_rows, tile.row_warps


def test_the_lists_of_tiles_agree():
    found = re.findall(r"TILE\((\d+), (\d+), (\d+)\)", (cuda_module.CUDA / "int4_linear.cu").read_text())
    assert tuple(tuple(map(int, tile)) for tile in found) == int4_linear.TILES


def test_numbers_of_a_device_name_tiles():
    numbers = replace(tuned.fallback(), int4={"o": entries((8, SMALL), (32, None), (64, LARGE))})
    read = msgspec.json.decode(msgspec.json.encode(numbers), type=Tuned)
    assert read == numbers
    with device.use(read):
        chosen = [choose_int4("o", tokens, 4096, 4096) for tokens in (1, 8, 9, 32, 33, 64, 65)]
        assert chosen == [SMALL, SMALL, None, None, LARGE, LARGE, None]
        assert choose_int4("o", 8, 4096 + 32, 4096) is None  # rows that it does not divide
        assert choose_int4("o", 8, 4096, 256) is None  # more parts than blocks of columns
        assert choose_int4("qkv", 8, 6144, 4096) == untuned_int4(8, 6144, 4096) is not None


@pytest.mark.parametrize("path", sorted(tuned.FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_the_tiles_of_a_devices_numbers_exist(path):
    """One that does not would have the weight written out without a word. With the most that groups bring: of
    32 columns, with zero points; in the memory that a block on Hopper may have."""
    for of_role in tuned.read(path).int4.values():
        for entry in of_role:
            for tile in [tile for _, tile in entry.steps if tile]:
                assert kind(tile) in int4_linear.TILES and tile.fits(entry.shape)
                assert 2 <= tile.stages <= 5 and 1 <= tile.teams * tile.row_warps <= 8
                rows = tile.warp_rows * tile.row_warps
                stage = rows * (64 + 4 * 3) + tile.tokens * 256
                sums = tile.tokens * (rows + 2) * 4
                assert tile.teams * max(tile.stages * stage, sums) <= 227 << 10


def test_without_numbers_it_is_a_tile_of_the_rule():
    with device.use(replace(device.active(), int4={})):
        for tokens in (1, 64, MOST_UNTUNED):
            assert choose_int4("o", tokens, 4096, 4096) == untuned_int4(tokens, 4096, 4096) is not None
        assert choose_int4("o", MOST_UNTUNED + 1, 4096, 4096) is None


@pytest.mark.parametrize("shape", [*SHAPES, (1536, 512), (96, 128), (64, 8 * 128)])
def test_the_rules_tiles_exist_and_divide_the_weight(shape):
    for tokens in range(1, MOST_UNTUNED + 1):
        tile = untuned_int4(tokens, *shape)
        if tile is None:  # fewer rows than four warps have
            assert tokens > 16 and shape[0] % 64
            continue
        assert kind(tile) in int4_linear.TILES and tile.fits(shape) and tile.tokens >= min(tokens, 64)


def test_the_rules_tiles_have_no_more_tokens_than_they_need():
    for tokens, expected in ((16, 16), (17, 32), (32, 32), (33, 48), (48, 48), (49, 64), (65, 64)):
        for shape in SHAPES:
            tile = untuned_int4(tokens, *shape)
            assert tile and tile.tokens == expected


def test_what_is_measured_exists_divides_the_weight_and_has_few_idle_tokens():
    for shape in SHAPES:
        for tokens in cases.FULL["int4"]:
            tiles = cases.int4_tiles(shape, tokens)
            assert tiles and len(tiles) == len(set(tiles)) < 100
            assert all(kind(tile) in int4_linear.TILES and tile.fits(shape) for tile in tiles)
        for tokens, sizes in ((8, {8}), (32, {32}), (33, {48, 64}), (48, {48, 64}), (49, {64}), (256, {64})):
            assert {tile.tokens for tile in cases.int4_tiles(shape, tokens)} == sizes


def test_a_tile_of_more_blocks_than_a_cluster_has_is_refused():
    text = msgspec.json.encode(replace(tuned.fallback(), int4={"o": entries((8, SMALL))}))
    with pytest.raises(msgspec.ValidationError, match=r"Expected `int` <= 8 - at .*split"):
        msgspec.json.decode(text.replace(b'"split":4', b'"split":9'), type=Tuned)


def test_every_group_has_a_kernel():
    found = {format.group: int4_linear.parts_of(format.group) for format in FORMATS.values()
             if isinstance(format, Int4)}  # fmt: skip
    assert found == {32: 4, 64: 2, 128: 1, 0: 1}


def test_there_is_none_without_a_hopper_gpu():
    weight = Weight.empty("o", (256, 512), "int4_awq_128", torch.bfloat16, torch.device("cpu"))
    assert SMALL.fits(weight.shape)
    assert not int4_linear.takes(weight.data, weight.scale, weight.zero, SMALL)
