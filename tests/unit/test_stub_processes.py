# SPDX-License-Identifier: Apache-2.0
"""Shared memory that stubs leave behind, on stand-in processes."""

import argparse
import ipaddress
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from flashinfer_backend.core.paths import SERVE_PID, processes_dir, run_dir
from flashinfer_backend.launch import openai_api
from flashinfer_backend.launch.watchdog import Policy, Watchdog
from flashinfer_backend.transport import rundir, stub_processes
from waiting import wait_for

SERVER = 4194305 + 2 * os.getpid()  # no process has it, and no other run of these tests
OTHER = SERVER + 1
NAME = "/backends/python/triton_python_backend_stub"
ENDLESS = "while :; do sleep 0.1; done"
Start = Callable[[str, int, str], "subprocess.Popen[bytes]"]


@pytest.fixture
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(stub_processes, "SHARED_MEMORY", folder)
    return folder


@pytest.fixture
def start(shm: Path, tmp_path: Path) -> Iterator[Start]:
    started = []

    def start(region: str, server: int, script: str) -> subprocess.Popen[bytes]:
        """A stub of a server, with a region of shared memory that it does not remove."""
        (shm / region).touch()
        (tmp_path / "model.py").write_text('eval "$6"')
        line = [NAME, str(tmp_path / "model.py"), region, "1", "1", str(server), "python", script]
        started.append(subprocess.Popen(line, executable="/bin/bash"))
        while stub_processes.find_stub(started[-1].pid) is None:
            time.sleep(0.001)
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
    # A child of theirs has the same command line until it has become its program.
    wait_for(lambda: not [*stub_processes.stubs_of(SERVER), *stub_processes.stubs_of(OTHER)])


def test_memory_of_a_stub_that_ends_by_itself_is_removed(shm: Path, start: Start) -> None:
    start("ends", SERVER, "sleep 2")
    start("others", OTHER, ENDLESS)
    (shm / "gone").write_bytes(b"memory")
    assert stub_processes.Stub(SERVER, str(SERVER), "gone").memory_bytes() == 6
    stub_processes.end_orphans(SERVER, [stub_processes.Stub(SERVER, str(SERVER), "gone")])
    assert [path.name for path in shm.iterdir()] == ["others"]


def test_a_stub_that_does_not_end_is_killed(shm: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stub_processes, "GRACE_S", 0.3)
    stub = start("hangs", SERVER, ENDLESS)
    other = start("others", OTHER, ENDLESS)
    stub_processes.end_orphans(SERVER)
    assert stub.wait(120) == -signal.SIGKILL and other.poll() is None
    assert [path.name for path in shm.iterdir()] == ["others"]


def test_a_stub_that_starts_a_program_counts_once(start: Start, tmp_path: Path) -> None:
    """Until its child has become the program, it has the stub's command line. A server was given up that had
    lost no stub: the child had been counted as one."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    stub = start("forks", SERVER, f"(read line < {fifo}) & wait; {ENDLESS}")
    (child,) = wait_for(
        lambda: [c for c in psutil.Process(stub.pid).children() if stub_processes.find_stub(c.pid)]
    )
    ticks = rundir.start_ticks(child.pid)
    copy = stub_processes.find_stub(stub.pid)._replace(pid=child.pid, start_ticks=ticks)
    assert stub_processes.find_stub(child.pid) == copy
    assert [found.pid for found in stub_processes.stubs_of(SERVER)] == [stub.pid]
    fifo.write_text("go on\n")
    wait_for(lambda: not child.is_running())
    assert [found.pid for found in stub_processes.stubs_of(SERVER)] == [stub.pid]


def test_a_process_that_only_looks_like_a_stub_ends_no_server() -> None:
    """serve looks at all processes; one whose second word was no model's path ended it."""
    line = [NAME, "-c", "input()", "1", "1", str(SERVER)]
    with subprocess.Popen(line, executable=sys.executable, stdin=subprocess.PIPE) as process:
        wait_for(lambda: stub_processes.find_stub(process.pid) is not None)
        assert [stub.model for stub in stub_processes.stubs_of(SERVER)] == [""]
        process.communicate(b"\n")


def test_a_stub_whose_server_has_ended_takes_nobody_else_for_it() -> None:
    """Its parent is another process then; an engine of that one would live as long as it."""
    code = "from flashinfer_backend.core.paths import owner_pid; print(owner_pid())"
    package = Path(rundir.__file__).parents[2]  # by that name Python does not find what is installed
    env = {**os.environ, "PYTHONPATH": str(package)}
    asked = []
    for server in (os.getpid(), SERVER):
        line = [NAME, "-c", code, "1", "1", str(server)]
        asked.append(subprocess.run(line, executable=sys.executable, env=env, capture_output=True, text=True))
    assert asked[0].stdout == f"{os.getpid()}\n"
    assert f"tritonserver (process {SERVER}) has ended" in asked[1].stderr and not asked[1].stdout


def test_the_files_of_processes_that_are_gone_or_killed_are_removed(
    shm: Path, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    stub, other = start("left", SERVER, ENDLESS), start("others", OTHER, ENDLESS)
    folders = [processes_dir(SERVER), processes_dir(OTHER)]
    for folder in folders:
        folder.mkdir(parents=True)
    (folders[0] / f"beat-{stub.pid}").touch()
    (folders[0] / f"beat-{SERVER}").touch()  # of one that has ended before
    (folders[1] / f"beat-{other.pid}").touch()
    stub_processes.end_orphans(SERVER, grace_s=0)
    assert not folders[0].exists()
    assert [path.name for path in folders[1].iterdir()] == [f"beat-{other.pid}"]
    run, left = tmp_path / "run", ("stubs/{}.sock", "marks-{}", "load-1-{}")
    (run / "stubs").mkdir(parents=True)
    for name in left:
        (run / name.format(SERVER)).touch()
        (run / name.format(other.pid)).touch()
    rundir.forget_stubs(run)
    found = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    assert found == {name.format(other.pid) for name in left}


def test_serve_removes_what_a_stub_left_that_ended_before_the_server(
    shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shm / "left").touch()
    (shm / "others").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "model.py").write_text(f"touch $5; {ENDLESS}")
    ready, runs = tmp_path / "ready", run_dir(0, "").parent
    (tmp_path / "server").write_text(
        f"mkdir -p {runs}/${SERVE_PID}-llm {runs}/${{{SERVE_PID}}}0-llm\n"
        f"(exec -a {NAME} bash {tmp_path}/model.py left 1 1 $$ {ready}) & stub=$!\n"
        f"ls {runs}/${SERVE_PID}-processes > {tmp_path}/counting\n"
        "trap 'kill -9 $stub; wait $stub; exit 0' TERM\n"
        "wait; wait"
    )

    def stop() -> None:
        deadline = time.monotonic() + 120
        while not ready.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # Handlers of our own first: the signal must not end the tests where the watchdog has ended before.
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    parser = argparse.ArgumentParser(allow_abbrev=False)
    openai_api.add_arguments(parser)
    host = ipaddress.ip_address("127.0.0.1")
    api = openai_api.OpenAiApi(parser.parse_args([]), host)
    watchdog = Watchdog(["bash", str(tmp_path / "server")], dict(os.environ), host, 9, Policy(), api, [])
    stopping = threading.Thread(target=stop)
    stopping.start()
    try:
        assert watchdog.run() == 0
    finally:
        stopping.join()
        for number, handler in before.items():
            signal.signal(number, handler)
    assert [path.name for path in shm.iterdir()] == ["others"]
    assert f"beat-{os.getpid()}\n" in (tmp_path / "counting").read_text()  # serve, for single stubs
    (others,) = runs.iterdir()
    assert others.name.endswith("0-llm")
