# SPDX-License-Identifier: Apache-2.0
"""Log lines of a process that must go on when its output is closed or the disk is full."""

import os
import sys
from functools import cache


def write(target: int, data: bytes) -> None:
    """Writes to standard output (1) or standard error (2); what cannot be written is lost."""
    stream = sys.stdout if target == 1 else sys.stderr
    if stream is None:  # it was closed at the start, and the descriptor may be another file's
        return
    try:
        stream.flush()
        while data:
            data = data[os.write(target, data) :]
    except OSError:
        return


def say(text: str, target: int = 2) -> None:
    write(target, f"{text}\n".encode(errors="backslashreplace"))


@cache
def say_once(text: str) -> None:
    """Once in a process. To be called with few texts."""
    say(text)
