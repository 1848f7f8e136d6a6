# SPDX-License-Identifier: Apache-2.0
"""SmolLM3: https://huggingface.co/blog/smollm3. Llama, with layers without rotary embedding."""

from __future__ import annotations

from dataclasses import replace

from flashinfer_backend.models.hf.config import ANY, Config
from flashinfer_backend.models.spec import ModelSpec


def smollm3(config: Config) -> ModelSpec:
    config.refuse_unsupported(mlp_bias=ANY)
    bias = config.flag("attention_bias")
    attention = config.attention(kv_heads=4, theta=2e6, bias=bias)
    rotated = config.rotated_layers()
    window = config.window(otherwise=None) if config.flag("use_sliding_window") else None
    windows = (
        config.windows(window)
        if config.layer_types()
        else [None if has_rope else window for has_rope in rotated]
    )
    mlp = config.gated(bias=config.flag("mlp_bias"))
    layers = [
        (replace(attention, rope=attention.rope if has_rope else None, window=own), mlp)
        for has_rope, own in zip(rotated, windows, strict=True)
    ]
    return config.model(layers, tied=True)
