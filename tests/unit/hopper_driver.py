# SPDX-License-Identifier: Apache-2.0
"""What Triton's compiler asks a driver, answered as an H200's would where there is no GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch


class Hopper:
    """As much of Triton's driver as its compiler asks for."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def use_hopper(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Needs Triton. cache: folder of what is compiled."""
    if not torch.cuda.is_available():
        from triton.runtime import driver

        monkeypatch.setattr(driver, "_active", Hopper())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
