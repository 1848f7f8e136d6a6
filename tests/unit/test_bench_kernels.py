# SPDX-License-Identifier: Apache-2.0
"""perf_configs/kernels/ without a GPU: what each says, and what a step's floor counts."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flashinfer_backend.core.paths import resolve_model_dir
from flashinfer_backend.models.hf import read_spec
from flashinfer_backend.models.transformer import Transformer
from flashinfer_backend.ops import torch_ops
from perf_configs import floor
from perf_configs.kernels import bench_step

KERNELS = sorted(path.stem for path in Path(bench_step.__file__).parent.glob("bench_*.py"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="is for machines without a GPU")
@pytest.mark.parametrize("name", KERNELS)
def test_without_a_gpu_it_says_so(name, monkeypatch, capsys):
    module = importlib.import_module(f"perf_configs.kernels.{name}")
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *(["nowhere"] if name == "bench_step" else [])])
    with pytest.raises(SystemExit) as end:
        module.main()
    said = f"{name}.py: needs a CUDA device, and torch sees none\n"
    assert (end.value.code, capsys.readouterr().err) == (1, said)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is for machines without a GPU")
def test_the_machines_floor_says_so_too(capsys):
    with pytest.raises(SystemExit) as end:
        floor.main(["--device", "cuda"])
    assert end.value.code == 1 and "needs a CUDA device, and torch sees none" in capsys.readouterr().err


def test_the_floor_of_a_step_counts_weights_as_they_are_stored():
    folder = resolve_model_dir("bundled")
    cpu = torch.device("cpu")
    plain = replace(read_spec(folder), tie_word_embeddings=False)

    def counted(config):
        model = Transformer(config, torch_ops, torch.bfloat16, cpu, 256)
        return bench_step.weight_bytes(model), model

    dense, model = counted(plain)
    norms = sum(p.nbytes for name, p in model.named_parameters() if "norm" in name)
    assert dense == floor.bytes_of_a_step(Path(folder) / "config.json", 0, 0) + norms
    assert counted(replace(plain, tie_word_embeddings=True))[0] == dense
    fp8, model = counted(plain.quantised_on_load())
    weights = [w for layer in model.layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    assert dense - fp8 == sum(w.shape[0] * w.shape[1] - w.scale.nbytes for w in weights)
