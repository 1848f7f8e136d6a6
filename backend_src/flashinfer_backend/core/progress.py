# SPDX-License-Identifier: Apache-2.0
"""Lines in the log by which a start that takes minutes shows that it goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

PROGRESS_S = 5.0  # between two lines; serve passes on lines only, so there is no bar


@contextmanager
def telling(how_far: Callable[[], str]) -> Iterator[None]:
    """Log what how_far returns every PROGRESS_S until the block is left: from a thread, so that a single long
    call in it is no silence."""
    left = threading.Event()

    def tell() -> None:
        while not left.wait(PROGRESS_S):
            log.info("%s", how_far())

    thread = threading.Thread(target=tell, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join()
