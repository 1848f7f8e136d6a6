# SPDX-License-Identifier: Apache-2.0
"""When the OpenAI API's supervisor replaces a process and when it ends, on stand-in processes."""

import contextlib
import ipaddress
import os
import socket
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import pytest

from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.openai import supervisor
from flashinfer_backend.openai.model import Model, WorkerOptions
from flashinfer_backend.transport import restarts as restarting

LOOPBACK = ipaddress.ip_address("127.0.0.1")
# A process that notes its start, says that it is ready or does not, and ends.
STAND_IN = """
import json, os, signal, sys
options = json.load(sys.stdin)
open(options["metrics_dir"] + "-starts", "a").write("x")
if {ready}:
    os.write(options["notify"], b"+%d\\n" % os.getpid())
{end}
"""
ENDS, IS_KILLED = "sys.exit(7)", "os.kill(os.getpid(), signal.SIGKILL)"


def options(folder: Path) -> WorkerOptions:
    return WorkerOptions(
        models=[Model(["bundled"], EngineConfig(model_dir="bundled"), str(folder / "run"))],
        max_body_bytes=1,
        receive_s=60,
        drain_s=0,
        metrics_dir=str(folder / "metrics"),
        apis=str(folder),
    )


@pytest.mark.parametrize(
    ("ready", "end", "restarts", "starts", "said"),
    [
        (False, ENDS, 5, 1, ["with status 7 before it could serve; what it said stands above"]),
        (False, IS_KILLED, 1, 2, ["by signal 9; another takes its place", "by signal 9; that is once too"]),
        (
            *(True, ENDS, 2, 3),
            [
                "with status 7; another takes its place",
                "takes its place in 0.5 s",
                "with status 7; that is once",
            ],
        ),
    ],
)
def test_processes_are_replaced_so_often_and_no_more(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    ready: bool,
    end: str,
    restarts: int,
    starts: int,
    said: list[str],
) -> None:
    monkeypatch.setattr(supervisor, "WORKER", [sys.executable, "-c", STAND_IN.format(ready=ready, end=end)])
    monkeypatch.setattr(supervisor, "POLL_S", 0.01)
    running = supervisor.Supervisor(options(tmp_path), LOOPBACK, 0, 1, stalled_s=0, restarts=restarts)
    assert running.run() == 1
    assert len((tmp_path / "metrics-starts").read_text()) == starts
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("openai: a process")]
    assert len(lines) == len(said)
    for line, words in zip(lines, said, strict=True):
        assert words in line


STOPS = "os.kill(os.getpid(), signal.SIGSTOP)"
HANGS = "import time; time.sleep(60)"


@pytest.mark.parametrize(
    ("end", "said"), [(STOPS, "has been stopped for"), (HANGS, "has not come to its event loop for")]
)
def test_a_process_that_is_stopped_or_hangs_is_killed_and_a_maintenance_server_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], end: str, said: str
) -> None:
    """The first and the second; then one is waited for, and connections are answered meanwhile."""
    monkeypatch.setattr(supervisor, "WORKER", [sys.executable, "-c", STAND_IN.format(ready=True, end=end)])
    monkeypatch.setattr(supervisor, "POLL_S", 0.01)
    monkeypatch.setattr(restarting, "STOPPED_S", 0.1)
    monkeypatch.setattr(supervisor, "SILENT_S", 0.1 if end == HANGS else 60.0)
    running = supervisor.Supervisor(options(tmp_path), LOOPBACK, 0, 2, stalled_s=0)
    seen: list[tuple[bool, int]] = []
    answers: list[tuple[int, str]] = []

    def told(up: bool, replaced: int) -> None:
        seen.append((up, replaced))
        if replaced >= 4 and len(running._again) == 2 and not answers:
            url = f"http://127.0.0.1:{running._port}/health"
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(url, timeout=120)
            answers.append((caught.value.code, caught.value.read().decode()))
        if replaced >= 6:
            running.stop()

    assert running.run(told) == 0
    assert answers[0][0] == 503 and "being started again" in answers[0][1]
    assert (True, 0) in seen and (False, 4) in seen and seen[-1][0] is False
    lines = capfd.readouterr().err.splitlines()
    assert sum(said in line for line in lines) >= 6
    assert sum("takes its place in 0.5 s" in line for line in lines) >= 2


STAYS = "signal.signal(signal.SIGTERM, signal.SIG_IGN); import time; time.sleep(60)"


def test_the_end_tells_what_it_waits_for_and_refuses_connections_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    begin = "import time; os.close(options['listener']); os.write(options['notify'], b'+%d\\n' % os.getpid())"
    end = STAYS.replace("import time", begin)
    monkeypatch.setattr(supervisor, "WORKER", [sys.executable, "-c", STAND_IN.format(ready=False, end=end)])
    monkeypatch.setattr(supervisor, "SAY_AFTER_S", 0.1)
    running = supervisor.Supervisor(options(tmp_path), LOOPBACK, 0, 1, stalled_s=0)
    statuses: list[int | None] = []  # of the process, when the first connection was refused

    def connect() -> None:
        (process,) = running._running.values()
        with contextlib.suppress(ConnectionRefusedError):
            while True:
                with contextlib.suppress(ConnectionResetError):  # it waited when the socket was closed
                    socket.create_connection(("127.0.0.1", running._port), timeout=60).close()
        statuses.append(process.poll())

    connecting = threading.Thread(target=connect)

    def told(up: bool, _: int) -> None:
        if up:
            connecting.start()
            running.stop()

    assert running.run(told) == 0
    connecting.join()
    assert statuses == [None]
    said = capfd.readouterr().err
    assert "openai: waiting for open requests, up to 1 s more\n" in said
    assert "did not end within 1 s and is killed\n" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_a_folder_that_another_user_prepared_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process, which gets the keys, is started before that is seen."""
    end = STAND_IN.format(ready=False, end=ENDS)
    monkeypatch.setattr(supervisor, "WORKER", [sys.executable, "-c", end])
    folder = tmp_path / "others"
    folder.mkdir(0o777)
    os.chown(folder, 65534, 65534)
    given = msgspec.structs.replace(options(tmp_path), metrics_dir=str(folder / "metrics"))
    with pytest.raises(PermissionError, match="is no folder of this user"):
        supervisor.Supervisor(given, LOOPBACK, 0, 1, stalled_s=0).run()
    assert not list(folder.iterdir())


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="one socket takes one version of IP here")
def test_clients_of_ipv4_reach_all_addresses_of_ipv6_and_are_cut_when_they_stall(tmp_path: Path) -> None:
    listening = supervisor.Supervisor(options(tmp_path), ipaddress.ip_address("::"), 0, 1, stalled_s=7)
    listening._listen(0)
    with (
        contextlib.closing(listening._listeners[0]) as listener,
        socket.create_connection(("127.0.0.1", listening._port), timeout=60),
        listener.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7000
