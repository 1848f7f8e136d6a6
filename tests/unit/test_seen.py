# SPDX-License-Identifier: Apache-2.0
"""Tables of stubs that end, and of those that come after them."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashinfer_backend.transport import seen
from flashinfer_backend.transport.protocol import make_handle
from flashinfer_backend.transport.seen import SeenMarker, SeenTable

PID = 4321


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks for stubs that are gone does so at every chunk."""
    monkeypatch.setattr(seen, "LOOK_AGAIN_NS", -1)


def mapped(folder: Path) -> list[str]:
    """Files in a folder that this process has mapped, those that were removed among them."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split(f"{folder}/")[1] for line in lines if f"{folder}/seen-" in line]


def test_tables_of_stubs_that_ended_are_not_kept(tmp_path: Path) -> None:
    marker = SeenMarker(tmp_path)
    for pid in range(PID, PID + 5):
        table = SeenTable(tmp_path, pid)
        marker.mark(make_handle(pid, 1), 1)
        assert table.last(make_handle(pid, 1))
        table.close()
        del table
    marker.mark(make_handle(PID + 9, 1), 1)
    assert mapped(tmp_path) == []


@pytest.mark.parametrize("killed", [True, False])
def test_a_stub_with_the_pid_of_another_is_marked(tmp_path: Path, killed: bool) -> None:
    handle, marker = make_handle(PID, 1), SeenMarker(tmp_path)
    old = SeenTable(tmp_path, PID)
    marker.mark(handle, 1)
    if not killed:
        old.close()
    new = SeenTable(tmp_path, PID)
    assert new.last(handle) == 0
    marker.mark(handle, 2)
    assert new.last(handle) and (old.newest(handle), new.newest(handle)) == (1, 2)


def test_a_table_that_comes_later_is_found(tmp_path: Path) -> None:
    handle, marker = make_handle(PID, 1), SeenMarker(tmp_path)
    marker.mark(handle, 1)
    table = SeenTable(tmp_path, PID)
    marker.mark(handle, 2)
    assert table.newest(handle) == 2
