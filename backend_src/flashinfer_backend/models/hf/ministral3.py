# SPDX-License-Identifier: Apache-2.0
"""Ministral 3: https://huggingface.co/mistralai/Ministral-3-8B-Instruct-2512. Mistral with YaRN, and queries
that grow with their position beyond the positions of the first training."""

from dataclasses import replace
from typing import Any

from flashinfer_backend.models.hf.config import ORIGINAL, Config
from flashinfer_backend.models.spec import ModelSpec

BETA = "llama_4_scaling_beta"
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    ORIGINAL: 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    BETA: 0.1,
}


def ministral3(config: Config) -> ModelSpec:
    config.refuse_unsupported(attention_bias=False)
    config.layer_types()  # which do not change the windows
    rope: dict[str, Any] = config.rope_keys() or ROPE
    known = {key: value for key, value in rope.items() if key not in (BETA, "max_position_embeddings")}
    if known.get("rope_theta") is None:
        known["rope_theta"] = config.raw.get("rope_theta")
    beta: Any = rope.get(BETA)
    every: Any = rope.get(ORIGINAL)
    if type(beta) not in (int, float) or type(every) is not int or every < 1:
        raise ValueError(f"rope_parameters should have {BETA}, a number, and {ORIGINAL}, a whole one")
    attention = config.attention(kv_heads=8, head_dim=128, theta=1e6, rope=known)
    window = config.window(otherwise=None)
    attention = replace(attention, window=window, query_scaling=(float(beta), every, 0))
    return config.changed(rope_scaling=known).model([(attention, config.gated())] * config.num_layers)
