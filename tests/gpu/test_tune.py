# SPDX-License-Identifier: Apache-2.0
"""The command that measures tuned numbers, on the GPU that it is for."""

from __future__ import annotations

import pytest
import torch

from checkpoints import make_checkpoint
from flashinfer_backend.core import tuned
from flashinfer_backend.tune import __main__ as command

pytestmark = pytest.mark.gpu

SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "head_dim": 128}


@pytest.mark.parametrize("format", [[], ["--fp8"]])
def test_the_products_of_a_rank_are_measured(format, tmp_path, capsys):
    pytest.importorskip("flashinfer")
    model = str(make_checkpoint("llama", tmp_path / "model", **SIZES))
    output = tmp_path / "numbers.json"
    arguments = ["--model", model, "--output", str(output), "--quick", "--tokens", "8,32", *format]
    assert command.main([*arguments, "--layers", "1", "--tensor-parallel-size", "2", "--seconds", "120"]) == 0
    found = tuned.read(output)
    assert found.device == torch.cuda.get_device_name()
    assert found.measured["shape"].endswith("model on each of 2 GPUs")
    products = found.fp8_products if format else found.products
    for role, shape in {"o": (1024, 512), "down": (1024, 2048), "gate_up": (4096, 1024)}.items():
        (own,) = [product for product in products[role] if product.shape == shape]
        assert {8, 32} <= {step.tokens for step in own.steps}
    said = capsys.readouterr().out
    assert "out of time" not in said and "step inf us" not in said
