# SPDX-License-Identifier: Apache-2.0
"""EXAONE 4: https://arxiv.org/abs/2507.11407. Norms of what layers add, in place of the residual stream's,
and of each head's queries and keys; in large ones windows, and layers without them that are not rotated."""

from dataclasses import replace

from flashinfer_backend.core.values import shown
from flashinfer_backend.models.errors import UnsupportedModelError
from flashinfer_backend.models.hf.config import OUTER_NORMS, Config, normed
from flashinfer_backend.models.spec import ModelSpec


def exaone4(config: Config) -> ModelSpec:
    config.refuse_unsupported(attention_bias=False)
    attention, mlp = normed(config.attention(kv_heads=32), "head"), config.gated()
    window = config.window()
    if window is None:
        windows: list[int | None] = [None] * config.num_layers
    elif config.layer_types():
        windows = config.windows(window)
    else:
        every = config.raw.get("sliding_window_pattern", 4)
        if type(every) is not int or every < 1:
            raise UnsupportedModelError(
                f"sliding_window_pattern is {shown(every)}; supported: the number of layers of which the last"
                " has no window, or layer_types"
            )
        windows = config.windows(window, every=every)
    plain = replace(attention, rope=attention.rope if window is None else None)
    layers = [(plain if own is None else replace(attention, window=own), mlp) for own in windows]
    return config.model(layers, norms=OUTER_NORMS)
