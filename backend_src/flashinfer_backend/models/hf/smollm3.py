# SPDX-License-Identifier: Apache-2.0
"""SmolLM3: https://huggingface.co/blog/smollm3. Llama, with layers without rotary embedding."""

from dataclasses import replace

from flashinfer_backend.core.values import shown
from flashinfer_backend.models.hf.config import ANY, Config
from flashinfer_backend.models.spec import ModelSpec


def smollm3(config: Config) -> ModelSpec:
    config.refuse_unsupported(mlp_bias=ANY)
    bias = config.flag("attention_bias")
    attention = config.attention(kv_heads=4, theta=2e6, bias=bias)
    rotated = rotated_layers(config)
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


def rotated_layers(config: Config) -> list[int]:
    """For each layer 1 if it has a rotary embedding, else 0; by default every fourth has none."""
    interval, count = config.count_or("no_rope_layer_interval", 4), config.num_layers
    rotated = config.raw.get("no_rope_layers")
    if rotated in (None, []):
        rotated = [int((index + 1) % interval != 0) for index in range(count)]
    if type(rotated) is not list or len(rotated) != count or any(each not in (0, 1) for each in rotated):
        raise ValueError(
            f"no_rope_layers is {shown(rotated)}; it should be a list of num_hidden_layers, {count},"
            " numbers: 1 for a layer with rotary embedding, 0 for one without"
        )
    return rotated
