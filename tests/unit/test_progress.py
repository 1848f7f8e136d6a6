# SPDX-License-Identifier: Apache-2.0
"""Lines that show that a start goes on."""

import logging
import threading
import time

import pytest

from flashinfer_backend.core import progress


def test_lines_come_while_one_call_takes_long_and_not_afterwards(caplog, monkeypatch) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(progress, "PROGRESS_S", 0.01)
    done = 0
    enough = threading.Event()

    def how_far() -> str:
        if len(caplog.records) > 3:
            enough.set()
        return f"read {done} of 7"

    with pytest.raises(ValueError, match="of the block"), progress.telling(how_far):
        done = 3
        assert enough.wait(120)
        raise ValueError("of the block")
    count = len(caplog.records)
    time.sleep(0.05)
    assert len(caplog.records) == count
    assert caplog.records[-1].message == "read 3 of 7"


def test_only_what_comes_further_counts_as_progress(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(progress, "PROGRESS_S", 0.005)
    monkeypatch.setattr(progress, "_file", None)
    assert progress.last_progress(tmp_path) == 0.0
    progress.note_in(tmp_path)
    done, looks = 0, 0

    def how_far() -> str:
        nonlocal looks
        looks += 1
        return f"read {done} of 7 in {looks} s"

    def after_looks() -> float:
        until = looks + 3
        while looks < until:
            time.sleep(0.001)
        return progress.last_progress(tmp_path)

    with progress.telling(how_far, lambda: done):
        began = after_looks()
        assert after_looks() == began, "time passes, and that is all"
        done = 3
        later = after_looks()
        assert began < later == after_looks()
    assert progress.last_progress(tmp_path) > later


def test_a_note_that_is_being_written_is_progress(tmp_path) -> None:
    (tmp_path / progress.FILE).touch()
    assert progress.last_progress(tmp_path) > 0.0
