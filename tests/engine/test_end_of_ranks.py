# SPDX-License-Identifier: Apache-2.0
"""An engine ends in bounded time and leaves nothing behind, whatever its ranks do."""

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil

from engine.harness import Client
from flashinfer_backend.core import progress
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.engine import __main__ as engine
from flashinfer_backend.transport import rundir
from flashinfer_backend.transport.records import STOP_S, ProcessRecord, stop
from waiting import wait_for

TIMEOUT_S = 120


@contextlib.contextmanager
def answering(
    tmp_path: Path,
    module: Sequence[str] = ("-m", "flashinfer_backend.engine"),
    max_tokens: int = 2000,
    **options: Any,
) -> Iterator[tuple[psutil.Popen, psutil.Process, Path, Client]]:
    """A real engine in the middle of an answer, or behind one of a single token; the process of its rank 1,
    its run directory, and its client. It logs to tmp_path / "log"."""
    run_dir, config_path = tmp_path / f"{os.getpid()}-llm", tmp_path / "config"
    config = EngineConfig(
        model_dir="bundled", device="cpu", max_tokens_in_paged_kv_cache=4096, tensor_parallel_size=2
    )
    config_path.write_bytes(msgspec.json.encode(config))
    rundir.create(run_dir)
    command = [sys.executable, *module, "--run-dir", str(run_dir), "--config", str(config_path)]
    with (tmp_path / "log").open("w") as log:
        process = psutil.Popen([*command, "--parent-pid", str(os.getpid())], stderr=log, **options)
    try:
        wait_for(lambda: (run_dir / "engine.sock").exists() or process.poll())
        (rank,) = process.children()
        client = Client(run_dir, None)  # type: ignore[arg-type]
        client.submit([5, 6, 7], SamplingParams(max_tokens=max_tokens))
        wait_for(lambda: client.receive(100) or client.tokens[1])
        yield process, rank, run_dir, client
        client.close()
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


TELLS_OF_STEPS = """
import sys
from flashinfer_backend.engine import __main__ as engine
from flashinfer_backend.worker import ranks
send = ranks.OtherRanks.send
def telling(others, plan):
    send(others, plan)
    print("a step begins", file=sys.stderr, flush=True)
ranks.OtherRanks.send = telling
sys.exit(engine.main())
"""


def test_an_engine_whose_step_waits_for_a_rank_that_hangs_is_not_killed(tmp_path: Path) -> None:
    """Killed, it could not end its ranks and clean up."""
    assert engine.GRACE_S + engine.LAST_S < STOP_S

    def steps() -> int:
        return (tmp_path / "log").read_text().count("a step begins")

    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    module = ("-c", TELLS_OF_STEPS)
    with answering(tmp_path, module, max_tokens=1, env=environment) as (process, rank, run_dir, client):
        rank.suspend()
        before = steps()
        client.submit([5, 6, 7], SamplingParams(max_tokens=1))
        wait_for(lambda: steps() > before, "a step that the rank does not run")
        ticks = rundir.start_ticks(process.pid)
        assert ticks is not None
        stop(ProcessRecord(process.pid, ticks), within_s=TIMEOUT_S)
        assert process.wait(TIMEOUT_S) == 1, "0: no step waited; -9: it was killed"
    psutil.wait_procs([rank], timeout=TIMEOUT_S)
    assert not rank.is_running()
    goes_with_the_folder = ("stubs", "engine.sock", progress.FILE)
    assert not [path.name for path in run_dir.iterdir() if path.name not in goes_with_the_folder]
    assert not list(temporary.iterdir())


def test_an_engine_that_is_told_to_end_ends_in_order_with_its_ranks(tmp_path: Path) -> None:
    """Rank 1 is told when the device of rank 0 needs it no more, and nothing is killed."""
    with answering(tmp_path) as (process, rank, *_):
        process.terminate()
        assert process.wait(TIMEOUT_S) == 0
        assert not rank.is_running()
    said = (tmp_path / "log").read_text()
    assert said.splitlines()[-1].startswith("[engine] INFO ended after "), said
    assert "killed" not in said


def test_the_end_of_an_engine_tells_which_rank_it_waits_for(tmp_path: Path) -> None:
    with answering(tmp_path, max_tokens=1) as (process, rank, *_):
        rank.suspend()
        process.terminate()
        assert process.wait(TIMEOUT_S) == 0
        psutil.wait_procs([rank], timeout=TIMEOUT_S)
        assert not rank.is_running()
    said, name = (tmp_path / "log").read_text(), f"rank 1 (process {rank.pid})"
    assert f"INFO ending: waiting for {name}\n" in said
    assert f"WARNING not ended within 2.0 s: {name}; the other ranks are killed\n" in said


KEEPS_THE_LOCK = """
import ctypes, sys, time
from flashinfer_backend.engine import __main__ as engine
engine.GRACE_S, engine.LAST_S = 0.8, 0.2
run = engine.EngineLoop.run
def keeping(loop):
    run(loop)
    time.sleep(0.5)
    ctypes.PyDLL(None).sleep(600)
engine.EngineLoop.run = keeping
sys.exit(engine.main())
"""


def test_a_library_that_keeps_the_interpreters_lock_does_not_keep_the_engine(tmp_path: Path) -> None:
    with answering(tmp_path, ("-c", KEEPS_THE_LOCK)) as (process, rank, *_):
        process.terminate()
        assert process.wait(TIMEOUT_S) == 1
        psutil.wait_procs([rank], timeout=TIMEOUT_S)
        assert not rank.is_running()
    assert "in keeping" in (tmp_path / "log").read_text()


SLOW_TO_SEE = """
import sys, time
from flashinfer_backend.engine import __main__ as engine
from flashinfer_backend.worker import ranks
received = ranks._received
def slowly(other):
    got = received(other)
    if not got:
        time.sleep(0.3)
    return got
ranks._received = slowly
sys.exit(engine.main())
"""


def test_a_step_that_fails_first_does_not_hide_that_a_rank_has_ended(tmp_path: Path) -> None:
    """The collective sees it at once; the thread that can say whose fault it is may come later."""
    with answering(tmp_path, ("-c", SLOW_TO_SEE)) as (process, rank, *_):
        rank.kill()
        assert process.wait(TIMEOUT_S) == 1
    assert "CRITICAL rank 1 has ended; this process ends" in (tmp_path / "log").read_text()


def test_when_the_parent_has_gone_a_thread_ends_what_the_loop_does_not(monkeypatch) -> None:
    ended = threading.Event()
    done: list[Any] = []
    parent = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(engine, "GRACE_S", 0.1)
    monkeypatch.setattr(engine.os, "_exit", lambda code: (done.append(code), ended.set()))
    before = signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)
    try:
        core: Any = SimpleNamespace(kill=lambda: done.append("ranks"))
        engine._End(parent.pid).of(core, SimpleNamespace())  # type: ignore[arg-type]
        parent.kill()
        parent.wait()
        assert ended.wait(TIMEOUT_S)
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGTERM, before[0])
        signal.set_wakeup_fd(before[1])
    assert done == ["ranks", 1]
