# SPDX-License-Identifier: Apache-2.0
"""Engines that start together on the same GPUs share their memory as kv_cache_free_gpu_mem_fraction says."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_no_compilation import SIZES

from checkpoints import make_checkpoint
from flashinfer_backend.worker.memory import GROWTH_BYTES

pytestmark = pytest.mark.gpu

SETTINGS = {
    "device": "cuda",
    "tokenizer_dir": "bundled",
    "max_num_seqs": 8,
    "max_num_tokens": 512,
    "max_num_tokens_while_decoding": 512,
    "max_seq_len": 1024,
    "cuda_graph_batch_sizes": [1, 8],
}
ENGINE = """
import json, sys
from pathlib import Path
import torch
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.engine.start import start
if __name__ == "__main__":
    core = start(EngineConfig(**json.loads(sys.argv[2])), Path(sys.argv[1]))
    tensors = [tensor for cache in core.runner.state.caches for pair in cache.layers for tensor in pair]
    print(json.dumps(sum(tensor.nbytes for tensor in tensors)), flush=True)
    sys.stdin.read()
    core.close()
"""


def start_engine(run_dir: Path, **settings: Any) -> subprocess.Popen[str]:
    run_dir.mkdir(exist_ok=True)
    config = json.dumps(SETTINGS | settings)
    return subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(run_dir), config],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def cache_bytes(engine: subprocess.Popen[str]) -> int:
    assert engine.stdout is not None
    line = engine.stdout.readline()
    assert line, "the engine has ended"
    return int(line)


@pytest.mark.parametrize("gpus", [1, 2])
def test_engines_that_start_together_get_their_shares(tmp_path: Path, gpus: int) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    model = str(make_checkpoint("llama", tmp_path / "model", **SIZES))
    shares = {"chat": 0.3, "code": 0.2, "late": 0.4}
    engines: dict[str, subprocess.Popen[str]] = {}

    def begin(name: str) -> None:
        engines[name] = start_engine(
            tmp_path / f"1-{name}",
            model_dir=model,
            tensor_parallel_size=gpus,
            kv_cache_free_gpu_mem_fraction=shares[name],
        )

    try:
        begin("chat")
        begin("code")
        found = {name: cache_bytes(engine) for name, engine in engines.items()}
        begin("late")
        found["late"] = cache_bytes(engines["late"])
        # Each share is of nearly the same memory: what one engine's graphs and workspaces take differs from
        # what is left for them.
        wholes = [found[name] / shares[name] for name in shares]
        assert max(wholes) - min(wholes) < 3 * GROWTH_BYTES, found
        assert max(wholes) > 0.5 * torch.cuda.mem_get_info()[1], found
        # One that is started again gets what it had: the others' caches are not taken for its neighbours'.
        engines["code"].kill()
        engines["code"].wait()
        begin("code")
        assert abs(cache_bytes(engines["code"]) - found["code"]) < shares["code"] * 2 * GROWTH_BYTES
    finally:
        for engine in engines.values():
            engine.kill()
            engine.wait()
