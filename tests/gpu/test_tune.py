# SPDX-License-Identifier: Apache-2.0
"""The command that measures tuned numbers, on the GPU that it is for."""

import pytest
import torch

from checkpoints import make_checkpoint
from flashinfer_backend.core import tuned
from flashinfer_backend.tune import __main__ as command
from int4_checkpoints import make_int4

pytestmark = pytest.mark.gpu

SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "head_dim": 128}


def run(model: str, output, capsys, *more: str) -> tuned.Tuned:
    pytest.importorskip("flashinfer")
    arguments = ["--model", model, "--output", str(output), "--quick", "--layers", "1", "--seconds", "120"]
    assert command.main([*arguments, *more]) == 0
    said = capsys.readouterr().out
    print(said)
    assert not any(part in said for part in ("out of time", "step inf us", "nothing runs", "WRONG"))
    found = tuned.read(output)
    assert found.device == torch.cuda.get_device_name()
    return found


@pytest.mark.parametrize("format", [[], ["--fp8"]])
def test_the_products_of_a_rank_are_measured(format, tmp_path, capsys):
    """For sizes that no device's gated kernel takes."""
    model = str(make_checkpoint("llama", tmp_path / "model", **SIZES))
    ranks = ["--tokens", "8,32", "--tensor-parallel-size", "2"]
    found = run(model, tmp_path / "numbers.json", capsys, *ranks, *format)
    assert found.measured["shape"].endswith("model on each of 2 GPUs")
    table = found.linear_fp8 if format else found.linear
    for role, shape in {"o": (1024, 512), "down": (1024, 2048), "gate_up": (4096, 1024)}.items():
        assert {8, 32} <= {tokens for tokens, _ in tuned.steps(table, role, shape)}


@pytest.mark.parametrize("kind", ["blocks", "int4", "experts", "16 bits", "e4m3"])
def test_the_other_kernels_are_measured(kind, tmp_path, capsys):
    folder, more = tmp_path / "model", []
    if kind == "int4":
        model = str(make_int4("awq", "llama", folder, **SIZES).folder)
    elif kind == "experts":
        moe = SIZES | {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
        model = str(make_checkpoint("qwen3-moe", folder, **moe))
    else:
        model = str(make_checkpoint("llama", folder, **SIZES))
        more = ["--fp8-blocks"] if kind == "blocks" else ["--decode-attention", kind]
    found = run(model, tmp_path / "numbers.json", capsys, *more)
    steps = {
        "blocks": lambda: tuned.steps(found.blocks_fp8, "down"),
        "int4": lambda: tuned.steps(found.int4, "down", (1024, 4096)),
        "experts": lambda: tuned.steps(found.experts, "none"),
    }.get(kind, lambda: tuned.steps(found.decode_attention, kind))()
    assert steps[0][1] is not None and (steps[-1][0] is None) == (kind != "int4")
