# SPDX-License-Identifier: Apache-2.0
"""Settings every test shares."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent))  # helpers: checkpoints.py, engine/harness.py
sys.path.insert(0, str(Path(__file__).parent.parent))  # build.py, client/


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Small models are slower with more threads, and results do not depend on the machine's cores."""
    import torch

    torch.set_num_threads(1)
