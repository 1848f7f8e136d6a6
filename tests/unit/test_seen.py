# SPDX-License-Identifier: Apache-2.0
"""Tables of stubs that end, and of those that come after them."""

from __future__ import annotations

import subprocess
import sys
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


FULL = """
mount -t tmpfs -o size=256k tmpfs "$1" || exit 77
exec "$2" -c "
import sys; from pathlib import Path; from flashinfer_backend.transport.seen import ENTRIES, SeenTable
try:
    table = SeenTable(Path(sys.argv[1]), 1)
except OSError as error:
    sys.exit(error.strerror)
for number in range(0, ENTRIES, 512):
    table.begin(number, 1)" "$1"
"""


def test_a_full_disk_is_said_when_the_table_is_made(tmp_path: Path) -> None:
    command = ["unshare", "-rm", "bash", "-c", FULL, "bash", str(tmp_path), sys.executable]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except FileNotFoundError:
        pytest.skip("this system has no unshare")
    if ended.returncode == 77 or "unshare failed" in ended.stderr:
        pytest.skip("this system lets users mount nothing")
    assert ended.returncode == 1 and ended.stderr.startswith("No space left on device; make room there")
