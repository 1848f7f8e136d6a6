# SPDX-License-Identifier: Apache-2.0
"""Waiting for what another process or thread does."""

import time
from collections.abc import Callable
from typing import Any

TIMEOUT_S = 120


def wait_for(condition: Callable[[], Any], what: str = "it", timeout_s: float = TIMEOUT_S) -> Any:
    """The first true value of condition()."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"timed out waiting for {what}"
        time.sleep(0.01)
    return value
