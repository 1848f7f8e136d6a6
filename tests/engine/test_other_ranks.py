# SPDX-License-Identifier: Apache-2.0
"""Rank 0's hand on the other ranks, which are scripts here."""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.transport.rundir import process_alive
from flashinfer_backend.worker import ranks
from flashinfer_backend.worker.ranks import OtherRanks, RanksLostError
from flashinfer_backend.worker.warm_up import prompt_plan
from waiting import wait_for

ENDS = "sleep 0.5; exit 1"
READY = r"printf '\1\0\0\0!' >&$8; "  # the socket is the eighth argument
BEATS = READY + r"while printf '\1\0\0\0.' >&$8; do sleep 0.2; done"
REAL_EXECUTABLE = sys.executable
HANGS = READY + "exec sleep 60"


@pytest.fixture
def start(tmp_path: Path, monkeypatch: Any) -> Callable[..., OtherRanks]:
    def start(
        script: str, on_loss: Callable[[str], None] | None, folder: Path | None = tmp_path
    ) -> OtherRanks:
        program = tmp_path / "rank"
        program.write_text(f"#!/bin/bash\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(ranks.sys, "executable", str(program))
        monkeypatch.setattr(ranks, "END_S", 0.5)
        return OtherRanks(EngineConfig(model_dir="", tensor_parallel_size=2), folder, on_loss)

    return start


def test_a_process_that_does_not_ask_ends_with_a_rank(start, monkeypatch):
    """It may be waiting for that rank to load, or on the device, and nothing else would end this."""
    ended: list[int] = []
    monkeypatch.setattr(ranks.os, "_exit", ended.append)
    others = start(ENDS, None)
    with pytest.raises(RanksLostError, match="rank 1 has ended"):
        others.serve(limits_steps=False)
    wait_for(lambda: ended)
    assert ended == [1]
    others.close()


def test_time_in_which_rank_0_stood_still_is_not_a_steps(start, monkeypatch):
    lost: list[str] = []
    away = 0.0
    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + away))
    others = start(BEATS, lost.append)
    others.serve(limits_steps=True)
    others.send(prompt_plan(slot=0, length=1))
    away = 100.0  # it was stopped, say
    time.sleep(1.5)
    assert not lost
    others.step_read()
    others.close()


@pytest.mark.parametrize(
    ("script", "limit", "why"),
    [
        (HANGS, "SILENT_S", "rank 1 has shown no life for 1 s"),
        (BEATS, "STEP_S", "a step has not ended within 1 s: a rank hangs"),
    ],
)
def test_a_rank_that_hangs_is_noticed(start, monkeypatch, script, limit, why):
    """Its process, or the step that waits for it on the device."""
    monkeypatch.setattr(ranks, limit, 1.0)
    lost: list[str] = []
    others = start(script, lost.append)
    others.serve(limits_steps=True)
    others.send(prompt_plan(slot=0, length=1))
    wait_for(lambda: lost)
    assert lost == [why]
    others.close()


def test_a_rank_that_hangs_does_not_keep_rank_0_from_ending(start):
    others = start(HANGS, None)
    others.serve(limits_steps=False)
    (other,) = others._sockets.values()
    other.setblocking(False)
    with pytest.raises(BlockingIOError):
        while True:
            other.send(bytes(1 << 16))
    with pytest.raises(BlockingIOError):
        while True:
            other.send(b".")
    other.setblocking(True)
    closing = threading.Thread(target=others.close, daemon=True)
    closing.start()
    closing.join(120)
    assert not closing.is_alive()


def test_ranks_that_hang_have_the_time_once_in_which_rank_0_leaves(start, monkeypatch):
    away = 0.0

    def leave() -> None:
        nonlocal away
        away = 100.0

    others = start(HANGS, None)
    others.serve(limits_steps=False)
    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + away))
    monkeypatch.setattr(ranks, "END_S", 90.0)
    closing = threading.Thread(target=others.close, args=(leave,), daemon=True)
    closing.start()
    closing.join(120)
    assert not closing.is_alive()


DIES = """
import os, signal, sys
from pathlib import Path
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.worker.ranks import OtherRanks
sys.executable = sys.argv[1]
others = OtherRanks(EngineConfig(model_dir="", tensor_parallel_size=2), Path(sys.argv[2]), None)
print(others._processes[1].pid, flush=True)  # the rank keeps the pipe open
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_rank_that_hangs_before_it_has_begun_ends_with_rank_0(start, tmp_path):
    start(HANGS, None).close()  # for its program
    command = [REAL_EXECUTABLE, "-c", DIES, str(tmp_path / "rank"), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        rank = int(process.stdout.readline())
        process.wait(120)
    wait_for(lambda: not process_alive(rank))


def test_a_process_that_ends_with_a_rank_leaves_no_folder(start, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    left: list[list[Path]] = []
    monkeypatch.setattr(ranks.os, "_exit", lambda _: left.append(list((tmp_path / "tmp").iterdir())))
    others = start(ENDS, None, folder=None)
    assert Path(others.rendezvous).parent.parent == tmp_path / "tmp"
    wait_for(lambda: left)
    assert left == [[]]


def test_what_a_killed_engine_of_the_same_pid_left_is_not_read(start, tmp_path):
    left = tmp_path / f"ranks-{os.getpid()}"
    left.write_bytes(b"addresses of then")
    others = start(ENDS, None)
    assert not left.exists()
    others.close()
