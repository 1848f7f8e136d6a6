# SPDX-License-Identifier: Apache-2.0
"""Ports that a server of a test may listen on."""

import itertools
import os
import random
import re
import socket

# Below those that the system gives to connections (32768 on): these may be taken before the server listens.
FIRST, END = 20_000, 32_000
WORKERS = 16  # processes of one run of the tests that never try the same ports


def _candidates() -> list[int]:
    worker = re.search(r"\d+$", os.environ.get("PYTEST_XDIST_WORKER", ""))
    of_worker = range(FIRST + (int(worker[0]) if worker else 0) % WORKERS, END, WORKERS)
    return random.SystemRandom().sample(of_worker, len(of_worker))


_next = itertools.cycle(_candidates())


def free_ports(count: int) -> list[int]:
    """Ports on which nothing listens. They come again only after all others have."""
    found: list[int] = []
    while len(found) < count:
        port = next(_next)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
    return found
