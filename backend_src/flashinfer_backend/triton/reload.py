# SPDX-License-Identifier: Apache-2.0
"""Has Triton reload the model while its engine is restarted, so that it reports not ready meanwhile.

Servers of 2026 ask is_ready(). Older ones know no other way than a model that is not loaded. The model
control mode must be explicit for that: asked in another mode, tritonserver 2.51 answers with an error
and then crashes at some later request (docs/triton-notes.md).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DRAIN_S = 5.0  # how long errors of open requests may take to be sent


def reload(pb_utils: Any, model_name: str, server_pid: int, has_open_requests: Callable[[], bool]) -> None:
    """Unloads the model of this stub and loads it again; returns when the new instances are ready, which
    wait for the new engine. Without explicit model control it only says what follows from that."""
    log = pb_utils.Logger
    if not has_explicit_model_control(server_pid):
        log.log_warn(
            f"the engine of {model_name} is restarted in place; the model refuses requests meanwhile, but"
            " reports ready to servers that do not ask is_ready(), unless they run with"
            " --model-control-mode=explicit"
        )
        return
    try:
        pb_utils.unload_model(model_name)
        # load_model() keeps the interpreter to itself until it returns.
        deadline = time.monotonic() + DRAIN_S
        while has_open_requests() and time.monotonic() < deadline:
            time.sleep(0.01)
        pb_utils.load_model(model_name)
    except Exception as error:
        log.log_error(f"{model_name} cannot be loaded again after its engine ended: {error}")


def has_explicit_model_control(server_pid: int) -> bool:
    """Whether the server's command line asks for explicit model control."""
    words = Path(f"/proc/{server_pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    name, value = "--model-control-mode", "explicit"
    return f"{name}={value}" in words or (name, value) in itertools.pairwise(words)
