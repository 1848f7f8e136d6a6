# SPDX-License-Identifier: Apache-2.0
"""The link between stubs and a real engine process: who starts it, and what happens when it dies."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.serving.engines import Engines
from flashinfer_backend.transport import protocol, records, rundir
from flashinfer_backend.transport.endpoint import EngineDown
from flashinfer_backend.transport.keeper_handle import KeeperHandle
from flashinfer_backend.transport.records import EngineRecord
from waiting import wait_for

TIMEOUT_S = 120
# The engine's program, with which the second engine of a model ends at once.
THE_FIRST_ALONE = """
import runpy, sys
if sys.argv[sys.argv.index("--replica") + 1] == "1":
    sys.exit(3)
runpy.run_module("flashinfer_backend.engine", run_name="__main__", alter_sys=True)
"""
PROMPT = np.arange(5, 15, dtype="<i4").tobytes()


class Answer:
    """Collects one sequence."""

    def __init__(self) -> None:
        self.handle = 0
        self.tokens: list[int] = []
        self.code = protocol.RUNNING
        self.failure: tuple[str, bool] | None = None
        self.started, self.ended = threading.Event(), threading.Event()

    def on_token(self, token: int, code: int, report: protocol.RowReport | None) -> None:
        if token != protocol.NO_TOKEN:
            self.tokens.append(token)
        self.code = code
        self.started.set()
        if code != protocol.RUNNING:
            self.ended.set()

    def on_failure(self, message: str, refused: bool) -> None:
        self.failure = (message, refused)
        self.ended.set()


def connect(
    run_dir: Path, on_stop: Any = lambda request_id: None, program: Sequence[str] = (), **knobs: str
) -> Engines:
    """As a stub's link, to one engine or several. program: another one for the engine."""
    bundled = {"model_dir": "bundled", "device": "cpu", "max_tokens_in_paged_kv_cache": "8192"}
    config = EngineConfig.from_parameters({**bundled, **knobs})
    keeper = KeeperHandle(run_dir, os.getpid(), config, engine=program)
    return Engines(run_dir, config.replicas, keeper, on_stop=on_stop)


def submit(endpoint: Engines, max_tokens: int = 8) -> Answer:
    answer = Answer()
    endpoint.submit(answer, PROMPT, SamplingParams(max_tokens=max_tokens, temperature=0.0))
    return answer


def complete(endpoint: Engines, max_tokens: int = 8) -> list[int]:
    answer = submit(endpoint, max_tokens)
    assert answer.ended.wait(TIMEOUT_S) and answer.code == protocol.FINISHED_LENGTH
    return answer.tokens


def engines(run_dir: Path) -> list[int]:
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        line = process.info["cmdline"] or []
        if "--parent-pid" in line and str(run_dir) in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.info["pid"])
    return found


@contextlib.contextmanager
def new_run_dir() -> Iterator[Path]:
    """Short: unix sockets take no long paths."""
    with tempfile.TemporaryDirectory(prefix="runs-", ignore_cleanup_errors=True) as folder:
        yield Path(folder) / "runs" / f"{os.getpid()}-llm"


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with new_run_dir() as made:
        yield made


class Shared:
    """A link and its engine, for tests that leave them able to answer. `told`: the stop requests that came;
    one called "broken" cannot be handled."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.told = run_dir, list[str]()
        self.link = connect(run_dir, self._stop)

    def _stop(self, request_id: str) -> None:
        self.told.append(request_id)
        if request_id == "broken":
            raise RuntimeError(request_id)

    @property
    def status(self) -> protocol.Status:
        assert self.link.status is not None
        return self.link.status


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    with new_run_dir() as run_dir:
        made = Shared(run_dir)
        try:
            made.link.wait_ready()
            yield made
        finally:
            made.link.close()
        assert not run_dir.exists() and not run_dir.parent.exists()


def test_a_stop_request_that_cannot_be_handled_harms_nothing(shared: Shared) -> None:
    shared.link.tell_stop("broken")
    shared.link.tell_stop("second")
    wait_for(lambda: shared.told == ["broken", "second"])
    assert len(complete(shared.link)) == 8


@pytest.mark.parametrize("victim", ["engine", "keeper"])
def test_a_killed_engine_fails_open_requests_and_is_replaced(shared: Shared, victim: str) -> None:
    """An engine whose keeper is killed ends as well; the link starts the next keeper."""
    link, pid = shared.link, shared.status.pid
    expected = complete(link)
    answer = submit(link, max_tokens=400)
    assert answer.started.wait(TIMEOUT_S)
    keeper = records.read_keeper(shared.run_dir)
    assert keeper is not None
    os.kill(pid if victim == "engine" else keeper.pid, signal.SIGKILL)
    assert answer.ended.wait(TIMEOUT_S)
    assert answer.failure is not None and not answer.failure[1]
    assert "ended unexpectedly" in answer.failure[0]
    with contextlib.suppress(EngineDown):
        late = submit(link)  # where it is accepted, it is answered
        assert late.ended.wait(TIMEOUT_S)
    wait_for(lambda: link.up and shared.status.pid != pid)
    assert complete(link) == expected and len(engines(shared.run_dir)) == 1


def test_a_process_without_descriptors_finds_the_next_engine_when_it_has_some(shared: Shared) -> None:
    link, pid, taken = shared.link, shared.status.pid, list[int]()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    os.kill(pid, signal.SIGKILL)
    try:
        until = time.monotonic() + 1.0
        while link.up or time.monotonic() < until:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.open(os.devnull, os.O_RDONLY))
            time.sleep(0.001)
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    wait_for(lambda: link.up and shared.status.pid != pid)
    assert len(complete(link)) == 8


def test_generates_and_leaves_nothing_though_a_request_is_open(run_dir: Path) -> None:
    link = connect(run_dir)
    pid = link.wait_ready().pid
    first = complete(link)
    assert len(first) == 8 and complete(link) == first
    answer = submit(link, 4000)
    assert answer.started.wait(TIMEOUT_S)
    link.close()
    assert answer.ended.wait(TIMEOUT_S) and answer.failure is not None
    link.cancel(answer.handle)  # does nothing
    assert not rundir.process_alive(pid)
    assert not run_dir.exists() and not run_dir.parent.exists()


def test_an_engine_that_is_started_again_holds_up_no_other(run_dir: Path) -> None:
    """A stub that comes while one of two engines, which has run before, does not become ready."""
    second = run_dir.with_name(f"{run_dir.name}@1")
    rundir.create(second)
    records.write(second / records.ENGINE, EngineRecord(ever_ready=True))
    link = connect(run_dir, program=[sys.executable, "-c", THE_FIRST_ALONE], replicas="2")
    try:
        status = link.wait_ready()
        assert link.statuses[1] is None and link.status == status
        answers = [submit(link) for _ in range(4)]
        for answer in answers:
            assert answer.ended.wait(TIMEOUT_S) and answer.code == protocol.FINISHED_LENGTH
        # A handle tells its engine: nothing that the other one is sent can end these.
        assert {protocol.split_handle(answer.handle)[1] % 2 for answer in answers} == {0}
    finally:
        link.close()
    assert not run_dir.exists() and not second.exists()


def test_run_directories_of_dead_servers_are_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    stale = tmp_path / f"{ended.pid}-llm"
    (stale / "stubs").mkdir(parents=True)
    rundir.create(tmp_path / f"{os.getpid()}-llm")
    assert not stale.exists() and (tmp_path / f"{os.getpid()}-llm").exists()
