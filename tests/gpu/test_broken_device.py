# SPDX-License-Identifier: Apache-2.0
"""A kernel that fails leaves the process's CUDA context useless for good: the engine process is replaced."""

import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from checkpoints import make_checkpoint
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.serving.engines import Engines
from flashinfer_backend.transport import protocol
from flashinfer_backend.transport.endpoint import ENGINE_LOST
from flashinfer_backend.transport.keeper_handle import KeeperHandle

pytestmark = pytest.mark.gpu

START_S = 100
SIZES = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128}
PROMPT = np.arange(5, 15, dtype="<i4").tobytes()
# The engine's own program. Until the file is there, the first prompt of 10 tokens brings an assertion that
# fails on the device, as an index out of range would.
ENGINE = """
import runpy, sys
from pathlib import Path
import torch
from flashinfer_backend.worker.device_state import DeviceState

marker, update = Path(sys.argv.pop(1)), DeviceState.update_block_table

def update_or_break(self, plan):
    update(self, plan)
    if plan.lengths.tolist() == [10] and not marker.exists():
        marker.touch()
        torch._assert_async(torch.zeros(1, device="cuda"))

DeviceState.update_block_table = update_or_break
runpy.run_module("flashinfer_backend.engine", run_name="__main__", alter_sys=True)
"""


class Answer:
    """Waits for one sequence's end: its finish code, or why it failed."""

    handle = 0

    def __init__(self) -> None:
        self.end: int | str | None = None
        self.ended = threading.Event()

    def on_token(self, token: int, code: int, report: protocol.RowReport | None) -> None:
        if code != protocol.RUNNING:
            self.end = code
            self.ended.set()

    def on_failure(self, message: str, refused: bool) -> None:
        self.end = message
        self.ended.set()


@pytest.mark.timeout(300)
def test_an_engine_whose_device_context_is_broken_is_replaced(tmp_path: Path) -> None:
    model = make_checkpoint("mistral", tmp_path / "model", **SIZES)
    knobs = {"model_dir": str(model), "device": "cuda", "max_tokens_in_paged_kv_cache": "8192"}
    config = EngineConfig.from_parameters({**knobs, "cuda_graph_batch_sizes": "none"})
    command = [sys.executable, "-c", ENGINE, str(tmp_path / "broken")]
    run_dir = tmp_path / "runs" / f"{os.getpid()}-llm"
    link = Engines(run_dir, 1, KeeperHandle(run_dir, os.getpid(), config, engine=command))
    try:
        first = link.wait_ready().pid
        params = SamplingParams(max_tokens=4, temperature=0.0)
        lost, answered = Answer(), Answer()
        link.submit(lost, PROMPT, params)
        assert lost.ended.wait(30) and lost.end == ENGINE_LOST, lost.end
        deadline = time.monotonic() + START_S
        while not (link.up and link.status and link.status.pid != first) and time.monotonic() < deadline:
            time.sleep(0.1)
        link.submit(answered, PROMPT, params)
        assert answered.ended.wait(30) and answered.end == protocol.FINISHED_LENGTH, answered.end
        assert link.status is not None and link.status.pid != first
    finally:
        link.close()
