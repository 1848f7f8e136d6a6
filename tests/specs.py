# SPDX-License-Identifier: Apache-2.0
"""Specs of models that need no checkpoint of their own."""

from typing import Any

from flashinfer_backend.core.paths import resolve_model_dir
from flashinfer_backend.models.hf import read_spec
from flashinfer_backend.models.spec import ModelSpec

# Keys that make experts of the bundled model's MLPs.
EXPERTS = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "moe_intermediate_size": 768}
# The same with an expert that all tokens share, folded as two.
SHARED = EXPERTS | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "shared_expert_intermediate_size": 2 * 768,
}


def bundled(**changes: Any) -> ModelSpec:
    """The bundled model with other values in its config.json."""
    return read_spec(resolve_model_dir("bundled"), changes=changes)
