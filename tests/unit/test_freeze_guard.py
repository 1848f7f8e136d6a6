# SPDX-License-Identifier: Apache-2.0
"""Processes that stand still, alone or with others; real ones, stopped by signals."""

import contextlib
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashinfer_backend.transport import rundir
from flashinfer_backend.triton_server.freeze_guard import FreezeGuard
from waiting import wait_for

LOOK_AGAIN_S = 0.5  # of the children, which look for others more often
CHILD = f"""
import ctypes
import sys
from pathlib import Path
from flashinfer_backend.triton_server import freeze_guard
freeze_guard.LOOK_AGAIN_S = {LOOK_AGAIN_S}
guard = freeze_guard.FreezeGuard(Path(sys.argv[1]))
for line in sys.stdin:
    if line == "count\\n":
        print(max([0, *guard._counts.values()]), flush=True)
        continue
    if line == "waits before\\n":
        ctypes.PyDLL(None).usleep(1_200_000)  # and no other thread of Python runs
    with guard.watched():
        if line == "waits\\n":
            ctypes.PyDLL(None).usleep(1_200_000)
        if line == "busy\\n":
            sum(range(60_000_000))  # one call, so no other thread of Python runs
    print("handled", flush=True)
guard.close()
"""


class Child:
    """A process with a guard, which handles what it is told to."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.file = folder / f"beat-{self.process.pid}"

    def ask(self, what: str) -> str:
        """Its answer, empty where it ended."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def sees_another(self) -> bool:
        return int(self.ask("count")) > 0


@contextlib.contextmanager
def two(folder: Path) -> Iterator[tuple[Child, Child]]:
    children = Child(folder / "runs" / "processes"), Child(folder / "runs" / "processes")
    try:
        for child in children:
            wait_for(child.sees_another, "the processes to know each other")
        yield children
    finally:
        for child in children:
            child.process.send_signal(signal.SIGCONT)
            child.process.kill()
            child.process.__exit__(None, None, None)  # closes its pipes, waits for it


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Child, Child]]:
    with two(tmp_path) as children:
        yield children


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Child, Child]]:
    """For tests after which both go on."""
    with two(tmp_path_factory.mktemp("lasting")) as children:
        yield children


def stand_still(*children: Child) -> None:
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for child in children:
            child.process.send_signal(number)
        time.sleep(1.2 if number == signal.SIGSTOP else 0)


def test_a_process_that_stood_still_alone_handles_nothing_more(pair):
    stopped, other = pair
    stand_still(stopped)
    assert stopped.ask("something") == ""
    assert stopped.process.wait(120) == 1
    assert "this process stood still for 1." in stopped.process.stderr.read()
    assert not stopped.file.exists()
    assert other.ask("something") == "handled"


def test_processes_that_stood_still_together_go_on(lasting):
    stand_still(*lasting)
    assert [child.ask("something") for child in lasting] == ["handled", "handled"]


def test_what_arrives_long_after_a_freeze_is_handled(lasting):
    stopped, _ = lasting
    stand_still(stopped)
    time.sleep(1.5)  # so nothing had waited
    assert stopped.ask("something") == "handled"


def test_a_process_that_only_computes_goes_on(lasting):
    busy, _ = lasting
    assert busy.ask("busy") == "handled"
    assert busy.ask("something") == "handled"


@pytest.mark.parametrize("when", ["waits before", "waits"])
def test_a_process_that_waits_for_a_busy_server_goes_on(pair, when):
    """tritonserver's part of a stub keeps Python's lock while it waits: after initialize, for a metric."""
    waiting, _ = pair
    assert waiting.ask(when) == "handled"
    assert waiting.ask("something") == "handled"
    stand_still(waiting)
    assert waiting.ask("something") == ""


def test_a_process_that_had_no_descriptors_for_a_while_goes_on(lasting):
    first, _ = lasting
    limits = resource.prlimit(first.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(first.process.pid, resource.RLIMIT_NOFILE, (0, limits[1]))
    time.sleep(LOOK_AGAIN_S + 0.5)  # in which it looks for others
    resource.prlimit(first.process.pid, resource.RLIMIT_NOFILE, limits)
    time.sleep(1.2)
    assert first.ask("work") == "handled"


def test_files_that_were_removed_are_made_again(pair):
    stopped, other = pair
    shutil.rmtree(stopped.file.parent.parent)
    wait_for(lambda: stopped.file.exists() and other.file.exists(), "the files to be made again")
    time.sleep(LOOK_AGAIN_S + 0.5)  # so each has looked which others there are
    stand_still(stopped)
    assert stopped.ask("something") == ""
    assert other.ask("something") == "handled"


def test_nothing_is_left_when_all_have_ended(pair):
    for child in pair:
        child.process.stdin.close()
        assert child.process.wait(120) == 0
    assert not pair[0].file.parent.parent.exists()


def test_a_folder_that_vanishes_while_it_is_made_is_made_again(tmp_path, monkeypatch):
    folder, claim, tries = tmp_path / "runs" / "processes", rundir.claim, []

    def vanishing(run_dir: Path) -> None:
        tries.append(run_dir)
        if len(tries) == 1:  # another server's last process has just removed the user's folder
            raise FileNotFoundError(run_dir.parent)
        claim(run_dir)

    monkeypatch.setattr(rundir, "claim", vanishing)
    guard = FreezeGuard(folder)
    assert len(list(folder.iterdir())) == 1
    guard.close()


def test_a_place_where_no_folder_can_be_made_is_said():
    with pytest.raises(OSError, match="/proc/nowhere"):
        FreezeGuard(Path("/proc/nowhere/processes"))
