# SPDX-License-Identifier: Apache-2.0
"""What is compiled ahead is all that a start needs."""

import json
import os
import subprocess
import sys

import pytest
import torch

from checkpoints import make_checkpoint

pytestmark = pytest.mark.gpu

SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 128}

# In a process of its own, as FlashInfer keeps what it has loaded.
START = """
import json, logging, sys
sys.path[:0] = sys.argv[2:]
from compilations import watch
from engine.harness import start_core
logging.basicConfig(level=logging.INFO)
with watch() as found:
    start_core(sys.argv[1], device="cuda", max_num_seqs=16)
print(json.dumps(vars(found)))
"""


def start(model: str, environment: dict[str, str]) -> dict[str, list[str]]:
    """What a start of the engine compiles and loads."""
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    command = [sys.executable, "-c", START, model, tests, f"{tests}/gpu"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.timeout(1500)
def test_starting_compiles_nothing_after_prebuild(tmp_path):
    """Of FlashInfer's modules. The second start finds Triton's variants in the cache, too."""
    pytest.importorskip("flashinfer")
    model = str(make_checkpoint("llama", tmp_path / "model", **SIZES))
    major, minor = torch.cuda.get_device_capability()
    command = [sys.executable, "-m", "flashinfer_backend.prebuild", "--model", model]
    command += ["--arch", f"sm_{major}{minor}"]
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "triton")}
    ahead = environment | {"CUDA_VISIBLE_DEVICES": ""}  # as where an image is built
    result = subprocess.run(command, env=ahead, capture_output=True, text=True, timeout=1200)
    assert result.returncode == 0, result.stderr
    again = subprocess.run(command, env=ahead, capture_output=True, text=True, timeout=300)
    assert "nothing to compile" in again.stdout
    no_compiler = environment | {"FLASHINFER_NVCC": "/nowhere/nvcc"}
    first = start(model, no_compiler)
    assert first["built"] == []
    assert {"sampling", "norm"} <= set(first["loaded"])
    second = start(model, no_compiler)
    assert second["built"] == second["compiled"] == []
    assert second["triton"], "nothing was watched"
