# SPDX-License-Identifier: Apache-2.0
"""Llama 1 to 3.3: https://arxiv.org/abs/2302.13971, https://arxiv.org/abs/2407.21783.

Pre-norm layers, rotary embedding, grouped queries, an MLP gated by SiLU.
"""

from dataclasses import replace

from flashinfer_backend.models.hf.config import Config
from flashinfer_backend.models.spec import ModelSpec


def llama(config: Config) -> ModelSpec:
    """transformers gives it full attention whatever its keys say of windows, others a window: up to the
    window's length both are the same."""
    config.refuse_unsupported(attention_bias=False)
    windows = config.windows(config.window(otherwise=None))
    model = config.model([(config.attention(), config.gated())] * config.num_layers)
    return replace(model, disputed_window=next(filter(None, windows), None))
