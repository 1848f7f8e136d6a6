# SPDX-License-Identifier: Apache-2.0
"""Ministral 8B: https://mistral.ai/news/ministraux. Mistral with a window in some layers."""

from dataclasses import replace

from flashinfer_backend.models.hf.config import Config
from flashinfer_backend.models.spec import ModelSpec


def ministral(config: Config) -> ModelSpec:
    config.refuse_unsupported(attention_bias=False)
    attention, mlp = config.attention(kv_heads=8), config.gated()
    return config.model(
        [(replace(attention, window=window), mlp) for window in config.windows(config.window())]
    )
