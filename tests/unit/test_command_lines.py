# SPDX-License-Identifier: Apache-2.0
"""What all command lines have in common."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A program -> an option of it, cut short.
PROGRAMS = {
    "build.py": "--out=x",
    "-m client generate": "--max-tok=1",
    "-m client chat": "--max-tok=1",
    "-m client bench": "--num-prom=1",
    "-m client report": "--titl=x",
    "-m flashinfer_backend.serve": "--model-repo=x",
    "-m flashinfer_backend.launch.probe": "--mod=x",
    "-m flashinfer_backend.prebuild": "--model-repo=x",
    "-m flashinfer_backend.tune": "--outp=x",
    "-m flashinfer_backend.openai": "--por=1",
    "-m flashinfer_backend.engine": "--run=x",
    "-m flashinfer_backend.worker": "--ran=1",
    "-m perf_configs.run": "--model-d=x",
    "-m perf_configs.floor": "--dev=cpu",
    "-m perf_configs.bench_openai": "--work=1",
}


def run(command: str, *more: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, *command.split(), *more]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize("program", PROGRAMS)
def test_options_may_not_be_cut_short(program):
    """An option that comes later could change what a short form means."""
    done = run(program, PROGRAMS[program])
    assert done.returncode == 2
    assert "unrecognized arguments" in done.stderr or "required" in done.stderr, done.stderr
    assert "expected" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["-m client --help", "-m client bench --help", "build.py --list-knobs"])
def test_a_reader_that_goes_early_gets_no_traceback(command):
    words = f"{sys.executable} {command} | head -n 1; echo ${{PIPESTATUS[0]}}"
    for _ in range(3):  # whether the pipe is closed in time is a matter of chance
        done = subprocess.run(["bash", "-c", words], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.stderr == "" and done.stdout.splitlines()[-1] in ("0", "141")
