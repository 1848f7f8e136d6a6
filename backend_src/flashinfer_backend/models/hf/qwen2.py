# SPDX-License-Identifier: Apache-2.0
"""Qwen2 and Qwen2.5: https://arxiv.org/abs/2407.10671. Llama with a bias of queries, keys and values, and a
window in the last layers of some checkpoints."""

from dataclasses import replace

from flashinfer_backend.models.hf.config import Config
from flashinfer_backend.models.spec import ModelSpec

FULL_LAYERS = 28  # the first ones, where config.json does not say how many


def qwen2(config: Config) -> ModelSpec:
    config.refuse_unsupported()
    attention, mlp = config.attention(kv_heads=32, bias=True, o_bias=False), config.gated()
    return config.model([(replace(attention, window=window), mlp) for window in windows_of(config)])


def windows_of(config: Config) -> list[int | None]:
    """Each layer's window."""
    return config.windows(used_window(config), config.raw.get("max_window_layers", FULL_LAYERS))


def used_window(config: Config) -> int | None:
    """The same of families that have one only where use_sliding_window says so."""
    if not config.flag("use_sliding_window"):
        return None
    if config.raw.get("sliding_window") == 0:  # as transformers writes it for none
        raise ValueError("use_sliding_window is true, but sliding_window is 0; set the window's length")
    return config.window()
