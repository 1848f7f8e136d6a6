# SPDX-License-Identifier: Apache-2.0
"""When an engine is started again, when it counts as stable, and how it is ended; on stand-in processes."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from flashinfer_backend.core import progress
from flashinfer_backend.transport import endpoint, rundir, supervisor
from flashinfer_backend.transport.restarts import LONGEST_DELAY_S, STABLE_AFTER_S, Restarts, restart_delay
from flashinfer_backend.transport.supervisor import (
    EngineRecord,
    EngineStartError,
    Supervisor,
    read_record,
    stop,
)

ENDLESS = "import time\nprint('up', flush=True)\nwhile True: time.sleep(0.1)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + ENDLESS
# Ends with what it needs some time for, as an engine that writes its last words.
CAREFUL = (
    "import signal, sys, time\n"
    "def end(*_):\n    time.sleep(0.5)\n    print('ended well', flush=True)\n    sys.exit(0)\n"
    "signal.signal(signal.SIGTERM, end)\n" + ENDLESS
)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "runs" / f"{os.getpid()}-llm"


def hand(run_dir: Path, script: str = ENDLESS) -> Supervisor:
    return Supervisor(run_dir, os.getpid(), b"{}", [sys.executable, "-c", script])


def edit(run_dir: Path, **changes: float) -> None:
    record = read_record(run_dir)
    assert record is not None
    (run_dir / "engine.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(record, **changes)))


def kill(supervisor: Supervisor, record: EngineRecord) -> None:
    os.kill(record.pid, signal.SIGKILL)
    while record.alive:
        time.sleep(0.005)
    supervisor.reap()


def attach(supervisor: Supervisor) -> tuple[EngineRecord, bool]:
    record, replaced = supervisor.attach()
    assert record is not None
    return record, replaced


def test_the_first_restart_comes_at_once_and_the_next_ones_later_and_later(run_dir: Path) -> None:
    mine = hand(run_dir)
    record, replaced = attach(mine)
    assert not replaced and record.alive
    mine.mark_ready(record.pid)
    delays = []
    for failures in range(1, 9):
        kill(mine, record)
        found, _ = mine.attach()
        written = read_record(run_dir)
        assert written is not None and written.failures == failures
        if found is None:
            assert failures > 1, "the first restart should come at once"
            # Just before it is due nothing is started; from then on it is.
            delay = restart_delay(failures)
            edit(run_dir, died_at=time.monotonic() - delay + 0.5)
            assert mine.attach() == (None, False)
            edit(run_dir, died_at=time.monotonic() - delay)
            found, replaced = mine.attach()
            assert found is not None and replaced
            delays.append(delay)
        assert found.alive
        mine.mark_ready(found.pid)
        record = found
    assert delays == sorted(delays) and delays[0] < delays[2] and delays[-1] == LONGEST_DELAY_S
    mine.leave()


def test_what_dies_young_again_and_again_is_given_up() -> None:
    some, any_number = Restarts(3), Restarts(0)
    assert [some.after(0.0) for _ in range(2)] == [0.0, 0.5]
    assert some.after(STABLE_AFTER_S + 1.0) == 0.0, "a first time again"
    assert [some.after(5.0) for _ in range(4)] == [0.5, 1.0, None, None]
    assert [any_number.after(0.0) for _ in range(50)][-1] == LONGEST_DELAY_S


def test_an_engine_counts_as_stable_after_its_time_only(run_dir: Path) -> None:
    for lived, failures in ((STABLE_AFTER_S - 5.0, 4), (STABLE_AFTER_S + 5.0, 1)):
        mine = hand(run_dir)
        record, _ = attach(mine)
        mine.mark_ready(record.pid)
        edit(run_dir, failures=3, started_at=time.monotonic() - lived)
        kill(mine, record)
        mine.attach()
        written = read_record(run_dir)
        assert written is not None and written.failures == failures
        mine.leave()


def test_an_engine_that_was_never_ready_is_not_tried_again(run_dir: Path) -> None:
    mine = hand(run_dir, "print('no such model', flush=True)")
    record, _ = attach(mine)
    while record.alive:
        time.sleep(0.01)
    with pytest.raises(EngineStartError, match="ended before it was ready"):
        mine.attach()


def test_a_starting_engine_that_comes_no_further_is_ended(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Through the link, which waits for it."""
    monkeypatch.setattr(endpoint, "LOOK_MS", 10)
    command = [sys.executable, "-c", ENDLESS]
    mine = Supervisor(run_dir, os.getpid(), b"{}", command, stall_s=0.5)
    link = endpoint.Endpoint(mine)
    error = link.wait_known()
    link.close()
    words = (
        r"has come no further for 0.00833333 minutes while it starts, and is ended \(start_stall_minutes\)"
    )
    assert isinstance(error, EngineStartError) and re.search(words, str(error))
    assert re.search(words, capfd.readouterr().err)
    mine.leave()


@pytest.mark.parametrize("reason", ["progress", "ready", "no limit"])
def test_an_engine_that_comes_further_is_waited_for(run_dir: Path, reason: str) -> None:
    limit = 0.0 if reason == "no limit" else 60.0
    mine = Supervisor(run_dir, os.getpid(), b"{}", [sys.executable, "-c", ENDLESS], stall_s=limit)
    record, _ = attach(mine)
    edit(run_dir, started_at=time.monotonic() - 100.0, ready=reason == "ready")
    if reason == "progress":
        (run_dir / progress.FILE).write_text(f"{time.monotonic() - 20.0}")
    mine.end_stalled(record.pid)
    assert record.alive
    mine.leave()


def test_the_engine_is_given_time_to_end(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = hand(run_dir, CAREFUL)
    record, _ = attach(mine)
    log = run_dir / "engine.log"
    while "up" not in (log.read_text() if log.exists() else ""):
        time.sleep(0.01)
    stop(record)
    assert not record.alive
    while "ended well" not in log.read_text():  # a killed one would never say so
        time.sleep(0.01)

    monkeypatch.setattr(supervisor, "STOP_TIMEOUT_S", 0.3)
    rundir.remove(run_dir)
    mine = hand(run_dir, STUBBORN)
    record, _ = attach(mine)
    while "up" not in (log.read_text() if log.exists() else ""):
        time.sleep(0.01)
    mine.leave()
    assert not record.alive and not run_dir.exists()


def test_an_engine_that_stays_outlives_its_last_stub(run_dir: Path) -> None:
    mine = Supervisor(run_dir, os.getpid(), b"{}", [sys.executable, "-c", ENDLESS], stays=True)
    record, _ = attach(mine)
    mine.leave()
    assert record.alive and read_record(run_dir) == record
    stop(record)
    rundir.remove(run_dir)


def test_a_program_that_is_missing_is_named(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's log goes through tee."""
    monkeypatch.setenv("PATH", str(run_dir.parent))
    with pytest.raises(FileNotFoundError, match="tee"):
        Supervisor(run_dir, os.getpid(), b"{}").attach()


def test_a_place_for_run_directories_that_cannot_be_used_is_told_with_what_to_set(tmp_path: Path) -> None:
    """XDG_RUNTIME_DIR of another user, for one, which su leaves as it was."""
    (tmp_path / "file").touch()
    said = r"flashinfer-backend-0 cannot be made \(Not a directory\); set XDG_RUNTIME_DIR to another folder"
    with pytest.raises(OSError, match=said):
        rundir.claim(tmp_path / "file" / "flashinfer-backend-0" / "1-llm")


def test_servers_that_start_while_others_end_get_their_run_directories(tmp_path: Path) -> None:
    """Whoever ends last removes the user's folder, at any moment of another one's start."""
    errors: list[BaseException] = []

    def come_and_go(run_dir: Path, until: float) -> None:
        while time.monotonic() < until and not errors:
            try:
                with rundir.locked(run_dir):
                    rundir.remove(run_dir)
            except BaseException as error:
                errors.append(error)

    interval, until = sys.getswitchinterval(), time.monotonic() + 2
    sys.setswitchinterval(1e-5)
    try:
        threads = [
            threading.Thread(target=come_and_go, args=(tmp_path / "user" / f"{os.getpid()}-{n}", until))
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors, errors


def test_a_disk_without_room_for_what_processes_share_is_told_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    said = r"No space left on device; make room there, or set XDG_RUNTIME_DIR to another folder: '/.*/seen'"
    with pytest.raises(OSError, match=said):
        rundir.shared_array(tmp_path / "seen", "i8", (1,))


def test_a_process_may_have_any_name(run_dir: Path) -> None:
    """One that has the pid of a dead server, whose run directory is looked at, is anybody's."""
    code = "import ctypes; ctypes.CDLL(None).prctl(15, b'a) Z \\xff'); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1) as other:
        assert other.stdin is not None and other.stdout is not None
        other.stdout.readline()
        assert rundir.process_alive(other.pid) and not rundir.is_stopped(other.pid)
        assert rundir.parent_pid(other.pid) == os.getpid()
        (run_dir.parent / f"{other.pid}-llm").mkdir(parents=True)
        rundir.create(run_dir)
        other.stdin.close()
