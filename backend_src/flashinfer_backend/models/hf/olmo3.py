# SPDX-License-Identifier: Apache-2.0
"""OLMo 3: https://allenai.org/olmo. OLMo 2 with windows in three of four layers, and a rotary embedding for
each kind of layer."""

from dataclasses import replace

from flashinfer_backend.models.hf.config import OUTER_NORMS, Config, normed
from flashinfer_backend.models.hf.gemma3 import KINDS, ropes_by_kind
from flashinfer_backend.models.spec import ModelSpec


def olmo3(config: Config) -> ModelSpec:
    config.refuse_unsupported()
    bias, mlp = config.flag("attention_bias"), config.gated()
    windows = config.windows(config.window(), every=4)
    ropes = ropes_by_kind(config)
    kinds = {
        name: normed(config.attention(theta=5e5, bias=bias, rope=ropes[name]), "all")
        for name in KINDS.values()
    }
    layers = [(replace(kinds[KINDS[own is not None]], window=own), mlp) for own in windows]
    return config.model(layers, norms=OUTER_NORMS)
