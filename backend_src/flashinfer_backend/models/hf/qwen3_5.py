# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5 and later, text: Qwen3-Next's layers, with MLPs or with experts. Projections of delta nets are
matrices of their own."""

from flashinfer_backend.models.hf.config import Config
from flashinfer_backend.models.hf.qwen3_next import hybrid, shared_experts
from flashinfer_backend.models.spec import ModelSpec


def qwen3_5_text(config: Config) -> ModelSpec:
    return hybrid(config, [config.gated()] * config.num_layers, kv_heads=4, fused=False)


def qwen3_5_moe_text(config: Config) -> ModelSpec:
    experts = shared_experts(config, norm_topk=True)
    return hybrid(config, [experts] * config.num_layers, kv_heads=2, fused=False)
