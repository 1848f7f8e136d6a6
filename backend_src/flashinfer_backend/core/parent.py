# SPDX-License-Identifier: Apache-2.0
"""A process that ends with the one that started it, however that ends."""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl  # looked up here: a child between fork and exec should not load anything


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Called in the child: it gets this signal when the thread that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, number)
