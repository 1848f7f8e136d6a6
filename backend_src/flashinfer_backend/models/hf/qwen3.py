# SPDX-License-Identifier: Apache-2.0
"""Qwen3, the dense models: https://arxiv.org/abs/2505.09388. Qwen2 with norms of each head's queries and keys
in place of the bias."""

from dataclasses import replace

from flashinfer_backend.models.hf.config import Config, normed
from flashinfer_backend.models.hf.qwen2 import windows_of
from flashinfer_backend.models.spec import ModelSpec


def qwen3(config: Config) -> ModelSpec:
    config.refuse_unsupported(attention_bias=False)
    attention, mlp = normed(config.attention(kv_heads=32, head_dim=128), "head"), config.gated()
    return config.model([(replace(attention, window=window), mlp) for window in windows_of(config)])
