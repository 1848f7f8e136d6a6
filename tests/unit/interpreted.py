# SPDX-License-Identifier: Apache-2.0
"""Kernels in Triton's interpreter, without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def interpreted(file: str) -> None:
    """Run a test file as a program, in a process of its own: what is interpreted is decided when Triton is
    imported."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, file], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
