# SPDX-License-Identifier: Apache-2.0
"""When an engine is started again, when it counts as stable, and how it is ended; on stand-in processes."""

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from flashinfer_backend.core import progress
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.launch import keeper as keeping
from flashinfer_backend.launch.keeper import KeptEngine
from flashinfer_backend.serving.engines import Engines
from flashinfer_backend.transport import records, restarts, rundir
from flashinfer_backend.transport.keeper_handle import EngineStartError, KeeperHandle
from flashinfer_backend.transport.peers import PeerSocket, tell_all
from flashinfer_backend.transport.protocol import SOCKET
from flashinfer_backend.transport.records import EngineRecord, read_engine, read_keeper, stop
from flashinfer_backend.transport.restarts import LONGEST_DELAY_S, STABLE_AFTER_S, Restarts
from waiting import wait_for

TIMEOUT_S = 120
ENDLESS = "import time\nprint('up', flush=True)\nwhile True: time.sleep(0.1)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + ENDLESS
# Ends with what it needs some time for, as an engine that writes its last words.
CAREFUL = (
    "import signal, sys, time\n"
    "def end(*_):\n    time.sleep(0.5)\n    print('ended well', flush=True)\n    sys.exit(0)\n"
    "signal.signal(signal.SIGTERM, end)\n" + ENDLESS
)
CONFIG = EngineConfig(model_dir="bundled", device="cpu")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "runs" / f"{os.getpid()}-llm"


@pytest.fixture
def kept(run_dir: Path) -> Iterator[Callable[..., KeptEngine]]:
    """Makes engines of a script each, which end with the test."""
    made: list[KeptEngine] = []

    def make(script: str = ENDLESS, stall_s: float = 0.0) -> KeptEngine:
        made.append(KeptEngine("engine", run_dir, [sys.executable, "-c", script], None, stall_s))
        return made[-1]

    yield make
    stop(*(engine.record for engine in made))


def becomes_ready(engine: KeptEngine, run_dir: Path) -> EngineRecord:
    """Its process is started, and binds its socket."""
    engine.look()
    (run_dir / SOCKET).touch()
    engine.look()
    assert engine.record.ready and engine.record.alive
    return engine.record


def kill(record: EngineRecord) -> None:
    os.kill(record.pid, signal.SIGKILL)
    wait_for(lambda: not record.alive)


def test_the_first_restart_comes_at_once_and_the_next_ones_later_and_later(
    run_dir: Path, kept: Callable[..., KeptEngine], capfd: pytest.CaptureFixture[str]
) -> None:
    """Once it has ever been ready: the second of these never is."""
    engine = kept()
    first = becomes_ready(engine, run_dir)
    assert read_engine(run_dir) == first
    kill(first)
    engine.look()
    engine.look()
    second = engine.record
    assert second.alive and second.pid != first.pid and (second.ready, second.ever_ready) == (False, True)
    assert not (run_dir / SOCKET).exists(), "it was the first one's"
    kill(second)
    engine.look()
    before = time.monotonic()
    wait_for(lambda: engine.look() or engine.record.alive)
    assert time.monotonic() - before > 0.3
    said = capfd.readouterr().err
    assert f"engine (process {first.pid}) ended with signal 9; the next one is started\n" in said
    assert f"engine (process {second.pid}) ended with signal 9; the next one is started in 0.5 s" in said


def test_an_engine_that_has_lived_long_is_started_again_at_once(
    run_dir: Path, kept: Callable[..., KeptEngine], capfd: pytest.CaptureFixture[str]
) -> None:
    engine = kept()
    for lived_s in (0.0, STABLE_AFTER_S + 5.0):
        kill(becomes_ready(engine, run_dir))
        engine._ready_at -= lived_s
        engine.look()
        engine.look()
        assert engine.record.alive
    said = capfd.readouterr().err
    assert said.count("the next one is started\n") == 2 and "engine is ready again" in said


def test_what_dies_young_again_and_again_waits_longer_and_longer_or_is_given_up() -> None:
    some, any_number = Restarts(3), Restarts(0)
    assert [some.after(0.0) for _ in range(2)] == [0.0, 0.5]
    assert some.after(STABLE_AFTER_S + 1.0) == 0.0, "a first time again"
    assert [some.after(5.0) for _ in range(4)] == [0.5, 1.0, None, None]
    assert [any_number.after(0.0) for _ in range(50)][-1] == LONGEST_DELAY_S


def test_an_engine_that_was_never_ready_is_not_tried_again(
    run_dir: Path, kept: Callable[..., KeptEngine]
) -> None:
    engine = kept("print('no such model', flush=True)")
    wait_for(lambda: engine.look() or engine.record.error)
    words = "the engine process ended with status 0 before it was ready\nno such model"
    assert engine.record.error == words and read_engine(run_dir) == engine.record
    engine.look()
    assert not engine.record.alive


def test_what_was_ever_ready_is_tried_again_by_the_next_keeper(
    run_dir: Path, kept: Callable[..., KeptEngine]
) -> None:
    """Which ends what is left of it first."""
    left = becomes_ready(kept(), run_dir)
    engine = kept("raise SystemExit(3)")
    assert not left.alive
    engine.look()
    first = engine.record
    wait_for(lambda: engine.look() or engine.record.pid != first.pid)
    assert not engine.record.error


def test_a_start_without_room_for_a_process_is_tried_again(
    run_dir: Path, kept: Callable[..., KeptEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = kept()
    kill(becomes_ready(engine, run_dir))
    left, start = iter(range(2)), subprocess.Popen

    def popen(*words: Any, **options: Any) -> Any:
        if next(left, None) is not None:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        return start(*words, **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    wait_for(lambda: engine.look() or engine.record.alive)
    assert next(left, None) is None


def test_a_starting_engine_that_comes_no_further_is_ended(
    run_dir: Path, kept: Callable[..., KeptEngine], capfd: pytest.CaptureFixture[str]
) -> None:
    engine = kept(stall_s=0.5)
    wait_for(lambda: engine.look() or engine.record.error)
    words = r"made no progress for 0.00833333 minutes during startup; stopping it \(start_stall_minutes\)"
    assert re.search(words, engine.record.error) and re.search(words, capfd.readouterr().err)


@pytest.mark.parametrize("reason", ["progress", "ready", "no limit"])
def test_an_engine_that_comes_further_is_waited_for(
    run_dir: Path, kept: Callable[..., KeptEngine], reason: str
) -> None:
    engine = kept(stall_s=0.0 if reason == "no limit" else 60.0)
    engine.look()
    engine._started_at -= 100.0
    if reason == "ready":
        (run_dir / SOCKET).touch()
    if reason == "progress":
        (run_dir / progress.FILE).write_text(f"{time.monotonic() - 20.0}")
    engine.look()
    engine.look()
    assert engine.record.alive and engine.record.ready is (reason == "ready")


@pytest.mark.parametrize(("script", "ends_well"), [(CAREFUL, True), (STUBBORN, False)])
def test_the_engine_is_given_time_to_end(
    run_dir: Path,
    kept: Callable[..., KeptEngine],
    script: str,
    ends_well: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(keeping, "SAY_AFTER_S", 0.1)
    engine = kept(script)
    engine.look()
    wait_for(lambda: "up" in engine._tail)
    keeping.end_kept([engine], 30.0 if ends_well else 0.3)
    assert not engine.record.alive
    assert ("ended well" in engine._tail) is ends_well  # a killed one would never say so
    said, name = capfd.readouterr().err, f"engine (process {engine.record.pid})"
    assert f"waiting for the end of {name}\n" in said
    assert (f"{name} did not end within 0.3 s; it got SIGKILL\n" in said) is not ends_well


def test_what_does_not_end_in_time_is_killed() -> None:
    started = [subprocess.Popen([sys.executable, "-c", each], stdout=-1) for each in (ENDLESS, STUBBORN)]
    asked = []
    for process in started:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        asked.append(records.ProcessRecord(process.pid, rundir.start_ticks(process.pid) or 0))
    assert stop(*asked, within_s=1.0) == asked[1:]
    assert [process.wait() for process in started] == [-signal.SIGTERM, -signal.SIGKILL]
    assert stop(*asked, within_s=TIMEOUT_S) == []
    for process in started:
        process.communicate()


def test_a_process_that_is_stopped_for_long_counts_as_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """For longer each time that it goes on meanwhile."""
    monkeypatch.setattr(restarts, "STOPPED_S", 0.5)
    stopped = restarts.Stopped()
    with subprocess.Popen(["sleep", "60"]) as process:
        ticks = rundir.start_ticks(process.pid)
        for _ in range(2):
            process.send_signal(signal.SIGSTOP)
            wait_for(lambda: rundir.is_stopped(process.pid))
            assert not stopped.for_long(process.pid, ticks) and not stopped.for_long(process.pid, 1)
            began = time.monotonic()
            wait_for(lambda: stopped.for_long(process.pid, ticks))
            assert time.monotonic() - began > 0.4
            process.send_signal(signal.SIGCONT)
            wait_for(lambda: not stopped.for_long(process.pid, ticks))
        process.kill()


def test_a_process_has_not_ended_while_threads_of_it_are_left() -> None:
    """Its first thread has; one that frees a device's memory takes longer."""
    script = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)"
    )
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        wait_for(lambda: " Z " in Path(f"/proc/{process.pid}/stat").read_text())
        try:
            assert rundir.start_ticks(process.pid) is not None
        finally:
            process.kill()
        wait_for(lambda: rundir.start_ticks(process.pid) is None)


def test_memory_of_a_process_is_its_private_one() -> None:
    process = psutil.Process()
    info = process.memory_info()
    assert abs(rundir.memory_bytes(process.pid) - (info.rss - info.shared)) < 1 << 20
    with subprocess.Popen(["true"]) as ended:
        ended.wait(TIMEOUT_S)
    assert rundir.memory_bytes(ended.pid) == 0


def test_the_keeper_runs_with_the_python_that_is_found(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stub embeds Python: its own program is another, or none."""
    assert KeeperHandle(run_dir, os.getpid(), CONFIG)._command[0] == sys.executable
    python = tmp_path / "python3"
    python.symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    for program in ("", "/opt/triton_python_backend_stub"):
        monkeypatch.setattr(sys, "executable", program)
        assert KeeperHandle(run_dir, os.getpid(), CONFIG)._command[0] == str(python)
    python.unlink()
    with pytest.raises(EngineStartError, match="no python3 on PATH"):
        KeeperHandle(run_dir, os.getpid(), CONFIG)


def test_a_model_whose_engines_have_no_gpu_is_told_at_once(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    with pytest.raises(EngineStartError, match="replicas=2 needs 2 GPUs, and CUDA_VISIBLE_DEVICES=4 shows 1"):
        KeeperHandle(run_dir, os.getpid(), EngineConfig(model_dir="bundled", replicas=2))


class Stub:
    """This process as a stub of a model whose engine is a script, with a real keeper."""

    def __init__(self, run_dir: Path, owner: int, script: str = ENDLESS, stays: bool = False) -> None:
        with rundir.locked(run_dir):
            self.peers = PeerSocket(run_dir)
        self.hand = KeeperHandle(run_dir, owner, CONFIG, stays, [sys.executable, "-c", script])
        self.run_dir = run_dir

    def engine(self) -> EngineRecord:
        self.hand.ensure()
        wait_for(lambda: (record := read_engine(self.run_dir)) is not None and record.alive)
        found = read_engine(self.run_dir)
        assert found is not None
        return found

    def leave(self) -> None:
        self.peers.close()
        self.hand.leave()


def test_a_model_has_one_keeper_which_goes_with_the_last_stub(run_dir: Path) -> None:
    stub = Stub(run_dir, os.getpid())
    engine, keeper = stub.engine(), read_keeper(run_dir)
    other = KeeperHandle(run_dir, os.getpid(), CONFIG, engine=[sys.executable, "-c", "1"])
    other.ensure()
    other.leave()  # the first stub is still there
    assert read_keeper(run_dir) == keeper and keeper is not None and keeper.alive and engine.alive
    assert "--stay" not in psutil.Process(keeper.pid).cmdline()  # should the stub be killed
    stub.leave()
    assert not keeper.alive and not engine.alive and not run_dir.parent.exists()


def test_engines_that_stay_outlive_the_last_stub_and_end_with_their_owner(run_dir: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as owner:
        stub = Stub(run_dir, owner.pid, stays=True)
        engine, keeper = stub.engine(), read_keeper(run_dir)
        stub.leave()
        assert engine.alive and keeper is not None and keeper.alive
        assert "--stay" in psutil.Process(keeper.pid).cmdline()  # should they look for stubs
        owner.kill()
    wait_for(lambda: not keeper.alive)
    assert not engine.alive and not run_dir.exists()


def test_engines_without_a_stub_end_and_until_then_their_folder_stays_young(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stub that was killed does not leave. Cleaners of /tmp remove what nobody has touched for long."""
    monkeypatch.setattr(keeping, "LOOK_S", 0.1)
    monkeypatch.setattr(keeping, "TICK_S", 0.02)
    monkeypatch.setattr(keeping, "TOUCH_S", 0.2)
    with rundir.locked(run_dir):
        peers = PeerSocket(run_dir)
    engines = keeping.Engines(run_dir, os.getpid(), CONFIG, False, [sys.executable, "-c", ENDLESS])
    read, write = os.pipe()
    thread = threading.Thread(target=engines.run, args=(read,))
    thread.start()
    wait_for((run_dir / records.ENGINE).exists)
    kept = [run_dir.parent, run_dir, *run_dir.rglob("*")]
    for path in kept:
        os.utime(path, (0, 0))
    wait_for(lambda: all(path.stat().st_atime and path.stat().st_mtime for path in kept))
    assert thread.is_alive()
    peers.close()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive() and not run_dir.exists()
    os.close(read)
    os.close(write)


def test_a_killed_keeper_is_replaced_and_a_wrong_model_fails_at_once(run_dir: Path) -> None:
    stub = Stub(run_dir, os.getpid(), "print('no such model', flush=True)")
    keepers = []
    for _ in range(2):
        with pytest.raises(EngineStartError, match="before it was ready\nno such model"):
            wait_for(stub.hand.ensure)
        keeper = read_keeper(run_dir)
        assert keeper is not None and keeper.alive
        keepers.append(keeper)
        os.kill(keeper.pid, signal.SIGKILL)
        wait_for(lambda keeper=keeper: not keeper.alive)
    assert keepers[0] != keepers[1]
    stub.leave()
    assert not run_dir.exists()


def test_a_keeper_that_cannot_begin_is_told(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    hand = KeeperHandle(run_dir, os.getpid(), CONFIG)
    with pytest.raises(EngineStartError, match="keeper ended with status 1"):
        wait_for(hand.ensure)


def test_a_link_waits_for_the_engine_and_says_why_there_is_none(run_dir: Path) -> None:
    hand = KeeperHandle(run_dir, os.getpid(), CONFIG, engine=[sys.executable, "-c", "print('no such model')"])
    link = Engines(run_dir, 1, hand)
    with pytest.raises(EngineStartError, match="no such model"):
        link.wait_ready()
    link.close()
    assert not run_dir.exists()


def test_a_place_for_run_directories_that_cannot_be_used_is_told_with_what_to_set(tmp_path: Path) -> None:
    """XDG_RUNTIME_DIR of another user, for one, which su leaves as it was."""
    (tmp_path / "file").touch()
    said = r"flashinfer-backend-0 cannot be made \(Not a directory\); set XDG_RUNTIME_DIR to another folder"
    with pytest.raises(OSError, match=said):
        rundir.claim(tmp_path / "file" / "flashinfer-backend-0" / "1-llm")


def test_a_run_directory_is_no_longer_than_a_sockets_address_allows() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        longest = Path(folder, "runs", f"{os.getpid()}-").as_posix()
        longest += "m" * (88 - len(longest))
        rundir.create(Path(longest))
        with socket.socket(socket.AF_UNIX) as stub:
            stub.bind(f"{longest}/stubs/4194304.sock")
        with pytest.raises(ValueError, match=r"longer than 88 characters, .*; set XDG_RUNTIME_DIR"):
            rundir.create(Path(longest + "m"))


def test_servers_that_start_while_others_end_get_their_run_directories(tmp_path: Path) -> None:
    """Whoever ends last removes the user's folder, at any moment of another one's start."""
    errors: list[BaseException] = []
    descriptors = len(os.listdir("/proc/self/fd"))

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
    assert len(os.listdir("/proc/self/fd")) == descriptors


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


def test_a_stub_that_takes_no_messages_keeps_none_from_the_others(tmp_path: Path) -> None:
    (tmp_path / "stubs").mkdir()
    peers = PeerSocket(tmp_path)
    peers._sender.settimeout(0.05)
    deaf = [socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(4)]
    try:
        for number, each in enumerate(deaf):  # some of them are listed before this process
            each.bind(str(tmp_path / f"stubs/{number}.sock"))
        with pytest.raises(TimeoutError):
            while True:
                peers.tell_all(b"Sone")
                assert peers.receive() == [b"Sone"]
        peers.receive()
        with pytest.raises(TimeoutError, match=r"process \d and \d and \d and \d of the model takes no"):
            peers.tell_all(b"Stwo")
        assert peers.receive() == [b"Stwo"]
        tell_all(tmp_path, b"Fend")
        assert peers.receive() == [b"Fend"]
    finally:
        peers.close()
        for each in deaf:
            each.close()
