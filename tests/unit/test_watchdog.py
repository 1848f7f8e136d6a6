# SPDX-License-Identifier: Apache-2.0
"""What serve takes for a server that is ready, on stand-in processes, and for a postprocessing that hangs."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from answering import answering, response
from flashinfer_backend.core.paths import processes_dir, run_dir
from flashinfer_backend.launch import server_run
from flashinfer_backend.launch.local_http import ask
from flashinfer_backend.launch.postprocessing_watch import PostprocessingWatch
from flashinfer_backend.transport import records, restarts, rundir
from flashinfer_backend.transport.api_states import ApiState, read_api_states
from flashinfer_backend.transport.records import EngineRecord
from flashinfer_backend.transport.stub_processes import Stub
from ports import free_ports
from waiting import wait_for

TABLE = {
    "/v2/health/ready": "",
    "/v2/repository/index": json.dumps([{"name": "llm"}]),
    "/v2/models/llm/config": json.dumps({"backend": "python", "instance_group": [{"count": 2}]}),
}
SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
# Takes MIB more with each SIGUSR1, and with the SIGTERM that asks a server to end.
MIB = 24
GROWS = f"""
import mmap, os, signal, sys, time
kept = []
def grow(*_):
    kept.append(mmap.mmap(-1, {MIB} << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    kept[-1].write(bytes(len(kept[-1])))
signal.signal(signal.SIGUSR1, grow)
signal.signal(signal.SIGTERM, grow)
open(sys.argv[1], "w").close()
while True:
    time.sleep(60)
"""


MISSING = {"bytes": 0}  # at the end of each answer


@pytest.fixture
def url() -> Iterator[str]:
    """Of a server that says it is ready, with a model of two processes."""

    def answer(path: str, _: bytes) -> bytes:
        return response(200 if path in TABLE else 404, TABLE.get(path, ""), MISSING["bytes"])

    with answering(answer) as url:
        yield url


def stub(folder: Path, server_pid: int) -> subprocess.Popen[bytes]:
    """A process with the command line of a stub."""
    model = folder / "llm" / "1" / "model.py"
    model.parent.mkdir(parents=True, exist_ok=True)
    model.write_text("import time; time.sleep(60)")
    words = ["/triton_python_backend_stub", str(model), "region-of-no-stub", "1", "1", str(server_pid)]
    return subprocess.Popen(words, executable=sys.executable)


def test_a_server_without_one_of_its_processes_is_never_ready(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # that nobody listens at
    monkeypatch.delenv("no_proxy", raising=False)
    run = server_run.ServerRun(SLEEP, {}, url, server_run.Policy())
    processes = [stub(tmp_path, run._child.pid)]
    try:
        assert [run.look_ready() for _ in range(3)] == [False] * 3
        assert "ended while it was loaded" in run.problem()
        processes.append(stub(tmp_path, run._child.pid))
        monkeypatch.setitem(MISSING, "bytes", 1)
        assert not run.look_ready(), "it may have died while it answered"
        monkeypatch.setitem(MISSING, "bytes", 0)
        wait_for(run.look_ready)  # as serve asks: one answer may be too late
    finally:
        run.end()
        for process in processes:
            process.wait()


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("what", ["engine", "stub"])
def test_a_pid_that_is_used_again_is_another_process(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, same: bool
) -> None:
    """The process that has the pid now is stopped: a reason to start the server again, or to kill it."""
    monkeypatch.setattr(restarts, "STOPPED_S", -1.0)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(server_run, "_answers", lambda *_: True)
    run = server_run.ServerRun(SLEEP, {}, url, server_run.Policy())
    other = stub(tmp_path, 4194305)
    try:
        ticks = rundir.start_ticks(other.pid)
        assert ticks is not None
        other.send_signal(signal.SIGSTOP)
        while not rundir.is_stopped(other.pid):
            time.sleep(0.01)
        ticks -= not same
        run.ready_at = run._answered_at = time.monotonic()
        if what == "stub":
            run._seen.add(Stub(other.pid, "4194305", "region-of-no-stub", "llm", ticks))
            assert ("stopped" in run.problem()) is same
        else:
            folder = run_dir(os.getpid(), "llm")
            folder.mkdir(parents=True)
            records.write(folder / records.ENGINE, EngineRecord(other.pid, ticks, ready=True))
            assert run._engines.begin() is same
            assert run.problem() == ("" if same else "the last engine of llm ended")
            assert not same or other.wait(120) == -signal.SIGKILL, "what is taken for dead has to be"
            assert same or rundir.is_stopped(other.pid)
    finally:
        run.end()
        other.kill()
        other.wait()


@pytest.mark.parametrize("times", [1, 2])
def test_a_server_that_grows_to_twice_the_limit_is_ended_at_once(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Beyond the limit what is open has its time, here without end, unless the memory grows on meanwhile."""
    monkeypatch.setitem(TABLE, "/v2/repository/index", "[]")
    begun = tmp_path / "begun"
    policy = server_run.Policy(growth_mib=MIB * 4 // 5, drain_s=1e6)
    run = server_run.ServerRun([sys.executable, "-c", GROWS, str(begun)], {}, url, policy)
    try:
        while not begun.exists():
            time.sleep(0.01)
        assert run.look_ready() and run.problem() == ""
        for taken in range(1, times + 1):  # two signals at a time may come as one
            run._child.send_signal(signal.SIGUSR1)
            while (grown := run._grown_mib()) < MIB * taken:
                time.sleep(0.01)
        problem = run.problem()
        assert f"{grown:.0f} MiB, more than {policy.growth_mib}" in problem
        assert (run.grown, problem.endswith(", and grows on")) == (
            (True, False) if times == 1 else (False, True)
        )
        if run.grown:
            run.stop(time.monotonic(), "It grew.")
            assert run._child.returncode == -signal.SIGKILL
    finally:
        run.end()


class Server:
    """Answers with a status once it may."""

    def __init__(self) -> None:
        self.status, self.asked, self.may = 200, 0, threading.Event()

    def answer(self, path: str, body: bytes) -> bytes:
        assert path == "/v2/models/postprocessing/infer" and len(json.loads(body)["inputs"]) == 2
        self.asked += 1
        self.may.wait()
        return response(self.status)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    with answering(made.answer) as made.url:  # type: ignore[attr-defined]
        yield made
        made.may.set()


@pytest.mark.parametrize("status", [200, 400, 503])
def test_any_answer_will_do(server, status):
    server.status = status
    server.may.set()
    watch = PostprocessingWatch(server.url, answer_s=30.0, every_s=0.01)
    wait_for(lambda: server.asked > 3)
    assert not watch.stuck
    watch.close()


def test_no_answer_is_noticed_and_stays(server):
    watch = PostprocessingWatch(server.url, answer_s=0.2, every_s=0.01)
    wait_for(lambda: watch.stuck)
    time.sleep(1.5)  # its own patience is over by then
    assert watch.stuck and server.asked == 1
    watch.close()


def test_a_server_that_has_gone_is_not_stuck():
    watch = PostprocessingWatch("http://127.0.0.1:9", answer_s=0.05, every_s=0.2)
    time.sleep(0.3)
    assert not watch.stuck
    watch.close()


STAND_IN = f"""#!{sys.executable}
import http.server, socket, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b"[]"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    do_POST = do_GET
server = http.server.HTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
server.server_address = ("127.0.0.1", int(sys.argv[1]))
server.server_bind()
server.server_activate()
server.serve_forever()
"""
SERVES = """
import sys
from flashinfer_backend.launch import launcher, watchdog
from flashinfer_backend.launch.openai_api import OpenAiApi
from flashinfer_backend.launch.server_run import Policy
from flashinfer_backend.transport.addresses import resolve
address, port = resolve("127.0.0.1"), int(sys.argv[2])
api = OpenAiApi(launcher._parser().parse_args(["--model-repository", "."]), address)
args = [sys.argv[1], sys.argv[2]]
sys.exit(watchdog.Watchdog(args, {}, address, port, Policy(drain_s=0), api, []).run())
"""


def test_a_server_that_cannot_be_started_for_a_while_is_started_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its API is said to be down meanwhile."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    program, (port,), log = tmp_path / "tritonserver", free_ports(1), tmp_path / "log"

    def status() -> int:
        try:
            return ask(f"http://127.0.0.1:{port}/v2/health/ready")[0]
        except OSError:
            return 0

    def serving() -> subprocess.Popen[bytes]:
        with log.open("wb") as file:
            command = [sys.executable, "-c", SERVES, str(program), str(port)]
            return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)

    with serving() as serve:  # there is no such program
        assert serve.wait(120) == 1
    assert "Traceback" not in log.read_text() and "tritonserver cannot be started" in log.read_text()
    program.write_text(STAND_IN)
    program.chmod(0o700)
    with serving() as serve:
        try:
            wait_for(lambda: "Ready" in log.read_text())
            apis = processes_dir(serve.pid)
            assert read_api_states(apis) == {"triton": ApiState(up=True)}
            (server,) = psutil.Process(serve.pid).children()
            program.rename(tmp_path / "away")
            server.kill()
            wait_for(lambda: serve.poll() is not None or "cannot be started" in log.read_text())
            while log.read_text().count("cannot be started") < 3:
                assert status() == 503
                time.sleep(0.01)
            assert read_api_states(apis) == {"triton": ApiState(up=False, restarts=1)}
            (tmp_path / "away").rename(program)
            wait_for(lambda: status() == 200)
            wait_for(lambda: read_api_states(apis) == {"triton": ApiState(up=True, restarts=1)})
        finally:
            serve.terminate()
        assert serve.wait(120) == 0
    assert not apis.exists() and read_api_states(apis) == {}
    assert "Traceback" not in log.read_text()
