# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism over GPUs of one host: kernels, graphs and collectives against float32."""

import contextlib
import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from test_broken_device import Answer
from test_engine import SETTINGS, SIZES, TOLERANCE, make_prompts, shortfalls

from checkpoints import make_checkpoint
from engine.harness import serve, start_core
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.serving.engines import Engines
from flashinfer_backend.transport.endpoint import ENGINE_LOST
from flashinfer_backend.transport.keeper_handle import KeeperHandle

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"),
    pytest.mark.timeout(150),  # a rank that waits alone would wait for ever
]
SIZE = 4 if GPUS >= 4 else 2  # of 4 ranks, two have the same key and value head
PROMPT = np.arange(5, 15, dtype="<i4").tobytes()


@pytest.mark.parametrize(
    ("kind", "graphs", "groups"),
    [
        ("llama3-rope", "auto", 1),
        ("qwen2", "none", 1),
        ("qwen3-moe", "auto", 1),
        ("qwen3-moe", "auto", 2),
        ("qwen3-moe", "none", SIZE),
    ],
)
def test_greedy_tokens_are_the_best_or_nearly(kind, graphs, groups, tmp_path: Path) -> None:
    """groups: of ranks that share the experts."""
    sizes = SIZES | ({"moe_intermediate_size": 256} if kind == "qwen3-moe" else {})
    folder = make_checkpoint(kind, tmp_path / "model", **sizes)
    several = {"tensor_parallel_size": SIZE, "expert_parallel_size": groups}
    core = start_core(folder, **SETTINGS, **several, cuda_graph_batch_sizes=graphs)
    plain = SamplingParams(max_tokens=32, temperature=0.0)
    asking = SamplingParams(max_tokens=32, temperature=0.0, log_probs=True, repetition_penalty=1.0001)
    drawn = SamplingParams(max_tokens=8, temperature=0.8, seed=3)
    with serve(core, tmp_path / "run") as client:
        produced = client.generate(make_prompts(12), [plain] * 6 + [asking] * 6)
        again = client.generate(make_prompts(12)[:1] * 2, drawn)
    core.close()
    del core
    gc.collect()  # NCCL waits for the end of the graphs that use it
    dist.destroy_process_group()
    short = shortfalls(folder, produced)
    assert (short == 0).float().mean() > 0.9, f"{(short > 0).sum()} of {len(short)} tokens are not the best"
    assert short.max() < TOLERANCE, f"a token is {short.max():.2f} below the best logit"
    assert again[0] == again[1]


@contextlib.contextmanager
def in_the_middle_of_steps(tmp_path: Path) -> Iterator[tuple[psutil.Process, psutil.Process]]:
    """An engine of two ranks, and its other rank. What then happens ends the engine and its request."""
    model = make_checkpoint("mistral", tmp_path / "model", **SIZES)
    knobs = {"model_dir": str(model), "max_tokens_in_paged_kv_cache": "8192", "max_num_seqs": "4"}
    config = EngineConfig.from_parameters({**knobs, "tensor_parallel_size": "2"})
    run_dir = tmp_path / "runs" / f"{os.getpid()}-llm"
    link = Engines(run_dir, 1, KeeperHandle(run_dir, os.getpid(), config))
    try:
        engine = psutil.Process(link.wait_ready().pid)
        answer = Answer()
        link.submit(answer, PROMPT, SamplingParams(max_tokens=500, temperature=0.0))
        (rank,) = engine.children()
        time.sleep(0.1)
        yield engine, rank
        assert answer.ended.wait(10) and answer.end == ENGINE_LOST, answer.end
        psutil.wait_procs([engine, rank], timeout=5)
        assert not rank.is_running()
    finally:
        link.close()


def test_an_engine_ends_in_order_in_the_middle_of_steps(tmp_path: Path, capfd: Any) -> None:
    """With graphs that use NCCL, whose own end would wait for theirs."""
    with in_the_middle_of_steps(tmp_path) as (engine, _):
        engine.terminate()
        engine.wait(15)
    said = "".join(capfd.readouterr())
    assert "INFO ended after " in said and "killed" not in said and "ending where it is" not in said, said


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_loses_a_rank_ends(number: signal.Signals, tmp_path: Path) -> None:
    """In the middle of steps, which wait for the rank on the device for ever."""
    with in_the_middle_of_steps(tmp_path) as (_, rank):
        os.kill(rank.pid, number)
