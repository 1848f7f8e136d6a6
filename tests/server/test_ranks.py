# SPDX-License-Identifier: Apache-2.0
"""A server whose model is spread over two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest
from contract import decode, greedy
from running import build_repository, running
from test_generate import PROMPT
from test_recovery import WORDED, start_streams, wait_again, wait_gone


@pytest.mark.timeout(300)
def test_a_rank_that_ends_is_replaced_with_its_engine(tmp_path: Path) -> None:
    repository = build_repository(tmp_path, "tensor_parallel_size=2")
    with running(repository, tmp_path) as server:
        expected = decode(greedy(PROMPT, 16))
        assert server.text(PROMPT, 16) == expected
        (rank,) = server.matching("flashinfer_backend.worker")
        assert psutil.Process(server.engine_pid()).children() == [rank]
        assert re.search(r"^\[engine rank 1\] INFO read ", server.log, re.M), (
            "how a start goes on can be seen"
        )
        streams = start_streams(server, 6)
        rank.kill()
        for events in streams.join():
            assert re.search(WORDED, str(events)), events
        wait_again(server, 1)
        assert server.text(PROMPT, 16) == expected
        (new,) = server.matching("flashinfer_backend.worker")
        assert new.pid != rank.pid and "rank 1 has ended" in server.log
        assert server.interrupt() == 0
        wait_gone(server)
