# SPDX-License-Identifier: Apache-2.0
"""Attention that is compared with plain torch's while the engine runs."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import make_checkpoint
from engine.harness import serve, start_core
from engine.test_generate import make_prompts
from flashinfer_backend.attention.contract import Prepared
from flashinfer_backend.core.sampling_params import SamplingParams


@pytest.mark.parametrize("wrong", [None, 1])
def test_errors_are_logged_by_layer(wrong: int | None, tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    """Of layers with and without a window; the second one's is wrong, or none's."""
    options = {"sliding_window": 21, "layer_types": ["sliding_attention", "full_attention"]}
    folder = make_checkpoint("qwen3", tmp_path / "model", use_sliding_window=True, **options)
    prompts, params = make_prompts(5), SamplingParams(max_tokens=4, temperature=0.0)
    plain = start_core(folder)
    with serve(plain, tmp_path / "plain") as client:
        expected = client.generate(prompts, params)
    core = start_core(folder, compare_attention=True)
    chosen = core.runner.state.attention._mixer

    class Broken:
        def __init__(self, prepared: Prepared) -> None:
            self._prepared = prepared

        def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
            self._prepared.run(layer, q, out)
            if layer == wrong:
                out.mul_(1.5)

    step = chosen.step
    monkeypatch.setattr(chosen, "step", lambda batch: Broken(step(batch)))
    with caplog.at_level(logging.INFO), serve(core, tmp_path / "compared") as client:
        found = client.generate(prompts, params)
    lines = [re.findall(r"by layer: (\S+) (\S+)", record.getMessage()) for record in caplog.records]
    errors = torch.tensor([[float(each) for each in line[0]] for line in lines if line])
    assert len(errors) and errors[:, 0].max() < 1e-6
    if wrong is None:
        assert errors.max() < 1e-6 and found == expected
    else:
        assert errors[:, 1].min() > 0.1
