# SPDX-License-Identifier: Apache-2.0
"""A server whose model is spread over two ranks."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from contract import decode, greedy
from running import build_repository, running, wait_for
from test_generate import PROMPT
from test_recovery import WORDED, start_streams, wait_again, wait_gone


@pytest.mark.timeout(300)
def test_a_rank_that_hangs_is_replaced_with_its_engine(tmp_path: Path) -> None:
    repository = build_repository(tmp_path, "tensor_parallel_size=2")
    with running(repository, tmp_path) as server:
        expected = decode(greedy(PROMPT, 16))
        assert server.text(PROMPT, 16) == expected
        (rank,) = server.matching("flashinfer_backend.worker")
        assert psutil.Process(server.engine_pid()).children() == [rank]
        streams = start_streams(server, 6)
        os.kill(rank.pid, signal.SIGSTOP)
        began = time.monotonic()
        for events in streams.join():
            assert re.search(WORDED, str(events)), events
        assert time.monotonic() - began < 20  # 8 s without a sign of life, on a calm machine
        wait_again(server, 1)
        assert server.text(PROMPT, 16) == expected
        (new,) = server.matching("flashinfer_backend.worker")
        assert new.pid != rank.pid and "rank 1 has shown no life" in server.log
        wait_for(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE, "the rank's end")
        assert server.interrupt() == 0
        wait_gone(server)
