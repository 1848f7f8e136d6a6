# SPDX-License-Identifier: Apache-2.0
"""OLMo 2: https://arxiv.org/abs/2501.00656. Norms of what layers add, in place of the residual stream's, and
of all heads' queries and keys."""

from flashinfer_backend.models.hf.config import OUTER_NORMS, Config, normed
from flashinfer_backend.models.spec import ModelSpec


def olmo2(config: Config) -> ModelSpec:
    config.refuse_unsupported()
    attention = normed(config.attention(bias=config.flag("attention_bias")), "all")
    return config.model([(attention, config.gated())] * config.num_layers, norms=OUTER_NORMS)
