# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS: https://arxiv.org/abs/2508.10925. Windows in every other layer, sinks, biases everywhere, experts
gated by a clipped SwiGLU whose gate and up projections take turns row by row."""

from dataclasses import replace

from flashinfer_backend.models.hf.config import Config, whole
from flashinfer_backend.models.spec import Experts, ModelSpec, Product, Stack

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
SIZE = "intermediate_size"


def gpt_oss(config: Config) -> ModelSpec:
    """A token's weights are a softmax of its own experts' logits: those of all, divided by their sum."""
    config.refuse_unsupported()
    if config.raw.get("rope_scaling") is None and config.raw.get("rope_parameters") is None:
        config = config.changed(rope_scaling=YARN)
    bias = config.flag("attention_bias", True)
    windows = config.windows(config.window(otherwise=128), every=2)
    attention = config.attention(kv_heads=8, head_dim=64, theta=150000.0, bias=bias)
    attention, mlp = replace(attention, sinks=True), _experts(config)
    return config.model([(replace(attention, window=own), mlp) for own in windows])


def _experts(config: Config) -> Experts:
    (count, per_token), size, hidden = config.expert_counts(), config.count(SIZE), config.hidden_size
    rows = whole("mlp.experts.gate_up_proj", size, hidden)
    columns = whole("mlp.experts.down_proj", hidden, size)
    both, down = (Stack(source.module, transposed=True, turns=True) for source in (rows, columns))
    return Experts(
        size,
        SIZE,
        Product("gate_up", (rows, rows) * count, "rows", "gate_up", experts=count, bias=True, stack=both),
        Product("down", (columns,) * count, "columns", "down", experts=count, bias=True, stack=down),
        Product("router", (whole("mlp.router", count, hidden),), None, "", bias=True),
        count,
        per_token,
        norm_topk=True,
        clip=(config.number("swiglu_alpha") or 1.702, config.number("swiglu_limit") or 7.0),
    )
