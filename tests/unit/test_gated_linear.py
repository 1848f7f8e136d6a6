# SPDX-License-Identifier: Apache-2.0
"""How many tokens a tile of the Hopper kernel gets, and where there is no such kernel."""

from __future__ import annotations

import torch

from flashinfer_backend.ops import device, gated_linear

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
