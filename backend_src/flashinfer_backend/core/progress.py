# SPDX-License-Identifier: Apache-2.0
"""Lines in the log by which a start that takes minutes shows that it goes on, and when it last did."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

PROGRESS_S = 5.0  # between two lines; serve passes on lines only, so there is no bar
FILE = "progress"
_file: Path | None = None  # where this process notes its progress


def note_in(folder: Path) -> None:
    """From now on the time of this process's latest progress stands in a file there, for last_progress."""
    global _file
    _file = folder / FILE
    _came_further()


def last_progress(folder: Path) -> float:
    """time.monotonic() of the latest progress that processes note in this folder; 0.0 where there is none."""
    try:
        text = (folder / FILE).read_text()
    except OSError:
        return 0.0
    return float(text) if text else time.monotonic()  # it is being written


def _came_further() -> None:
    if _file is not None:
        with contextlib.suppress(OSError):  # a start does not fail for want of its note
            _file.write_text(f"{time.monotonic():.3f}")


@contextmanager
def telling(how_far: Callable[[], str], done: Callable[[], object] | None = None) -> Iterator[None]:
    """Log what how_far returns every PROGRESS_S until the block is left: from a thread, so that a single long
    call in it is no silence. done: what changes with progress alone, where the text does without."""
    left = threading.Event()
    measure = done or how_far
    _came_further()
    before = measure()

    def tell() -> None:
        nonlocal before
        while not left.wait(PROGRESS_S):
            if (now := measure()) != before:
                before = now
                _came_further()
            log.info("%s", how_far())

    thread = threading.Thread(target=tell, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join()
        _came_further()
