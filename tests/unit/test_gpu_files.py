# SPDX-License-Identifier: Apache-2.0
"""The files of tests/gpu, on a machine that cannot run them."""

import importlib.util
from pathlib import Path

GPU = Path(__file__).parents[1] / "gpu"


def test_files_that_need_a_gpu_can_be_imported() -> None:
    """Without one they are not collected (tests/conftest.py), and names that they use may change."""
    files = sorted(GPU.glob("test_*.py"))
    for file in files:
        spec = importlib.util.spec_from_file_location(f"gpu_{file.stem}", file)
        assert spec and spec.loader
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert files
