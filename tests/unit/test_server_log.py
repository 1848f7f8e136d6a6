# SPDX-License-Identifier: Apache-2.0
"""What serve learns from tritonserver's output, with stand-in processes for the server."""

import contextlib
import subprocess
import sys
import time

import pytest

from flashinfer_backend.launch import server_log

STAMP = "E1122 02:02:16.820177 3985 "
ENGINE = "[engine] ERROR cannot start: no weights"
REASON = rf"EngineStartError: the engine process ended before it was ready\n{ENGINE}\n\nAt:\n  x.py(1): f\n"
OTHER = r"KeyError: 'vocab'\n\nAt:\n  y.py(2): g\n"
TABLE = ["I1122 02:02:16.8 3985 server.cc:604] ", "+-----+", "| Model |", "+-----+", ""]


FOLLOW = """
import sys
from flashinfer_backend.launch.server_log import ServerLog
log = ServerLog()
{before}
child = log.popen([sys.executable, "-c", "import sys; print(sys.argv[1])", sys.argv[1]])
child.wait()
summary = log.summary()
sys.stdout.flush()
print("SUMMARY", summary)
"""


def lines_of_a_failed_load(reason):
    return [
        'I1122 02:02:12.3 3985 model_lifecycle.cc:472] "loading: llm:1"',
        *([ENGINE] if "engine" in reason else []),
        f'{STAMP}pb_stub.cc:366] "Failed to initialize Python stub: {reason}"',
        f'{STAMP}backend_model.cc:692] "ERROR: Failed to create instance: {reason}"',
        f"{STAMP}model_lifecycle.cc:642] \"failed to load 'llm' version 1: Internal: {reason}\"",
        f"{STAMP}model_lifecycle.cc:777] \"failed to load 'llm'\"",
        f"{STAMP}model_repository_manager.cc:703] \"Invalid argument: ensemble 'ensemble' depends {reason}\"",
        *TABLE,
        f'{STAMP}server.cc:345] "Timeout 4: Found 2 live models and 0 in-flight non-inference requests"',
        "error: creating server: Internal - failed to load all models",
    ]


def passed_on(lines, before="pass"):
    """(stdout, what the log says in the end) of a process that follows a server writing these lines."""
    code = FOLLOW.format(before=before)
    done = subprocess.run(
        [sys.executable, "-c", code, "\n".join(lines)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    output, _, summary = done.stdout.partition("SUMMARY ")
    return output.splitlines(), summary.strip()


def test_a_failed_load_is_summed_up_and_all_lines_pass():
    lines = lines_of_a_failed_load(REASON)
    assert passed_on(lines) == (lines, "llm did not load: [engine] ERROR cannot start: no weights")


def test_another_exception_of_a_model_keeps_its_traceback():
    _, summary = passed_on(lines_of_a_failed_load(OTHER))
    assert summary == "llm did not load: Internal: KeyError: 'vocab'\n\nAt:\n  y.py(2): g"


@pytest.mark.parametrize(
    "before, reason, said",
    [
        ([], "'max_batch_size' must be non-negative value for llm", ""),
        (
            ["[libprotobuf ERROR t.cc:337] Error parsing text-format inference.ModelConfig: 9:1: No."],
            "failed to read text proto from /r/llm/config.pbtxt",
            ": 9:1: No.",
        ),
    ],
)
def test_a_folder_that_is_no_model_is_named_with_its_reason(before, reason, said):
    lines = [
        *before,
        f"{STAMP}model_repository_manager.cc:1460] \"Poll failed for model directory 'llm': {reason}\"",
    ]
    follows = f'{STAMP}model_repository_manager.cc:703] "Invalid argument: ensemble ensemble contains models"'
    assert passed_on([*lines, follows, *TABLE])[1] == f"llm did not load: {reason}{said}"


def test_lines_of_a_server_that_has_started_sum_up_nothing():
    assert passed_on(lines_of_a_failed_load(REASON), "log.ready()")[1] == ""


def test_the_loaders_complaint_about_a_stub_is_fatal_at_once():
    complaint = "error while loading shared libraries: libpython3.12.so.1.0: cannot open"
    _, summary = passed_on([f"/x/triton_python_backend_stub: {complaint}"])
    assert summary == f"the server cannot start: {complaint}"


def test_a_stub_that_ended_and_is_not_collected_is_fatal(tmp_path):
    from flashinfer_backend.launch import server_log

    ended = "a process of the Python backend ended while it was starting"
    fatal, failed = "Fatal Python error: init_fs_encoding", "Failed to preinitialize Python stub: no model.py"
    reasons = {
        f"echo {fatal}": f"{ended}: {fatal}",
        f"echo {STAMP}pb_stub.cc:2105]  {failed}": f"{ended}: no model.py",
        "true": ended,
    }
    with contextlib.ExitStack() as stack:
        servers = []
        for number, script in enumerate(reasons):
            stub = tmp_path / str(number) / "triton_python_backend_stub"
            stub.parent.mkdir()
            stub.write_text(f"#!/bin/sh\n{script}\n")
            stub.chmod(0o755)
            server = f"import subprocess, time; stub = subprocess.Popen([{str(stub)!r}]); time.sleep(60)"
            log = server_log.ServerLog()
            child = log.popen([sys.executable, "-c", server])
            stack.callback(child.wait)
            stack.callback(child.kill)
            servers.append((log, child.pid))
        found = [""] * len(servers)
        deadline = time.monotonic() + 120
        while not all(found) and time.monotonic() < deadline:
            found = [log.cannot_start(pid) for log, pid in servers]
            time.sleep(0.05)
    assert found == [*reasons.values()]


@pytest.mark.parametrize(("target", "closed"), [(1, ">&-"), (2, "2>&-")])
def test_lines_for_an_output_that_was_closed_are_lost(tmp_path, target, closed):
    """The next file to be opened has its descriptor."""
    code = "import sys; from flashinfer_backend.core.output import say; file = open(sys.argv[1], 'w'); "
    code += f"say('x', {target})"
    path = tmp_path / "other"
    words = ["bash", "-c", f'exec "$@" {closed}', "bash", sys.executable, "-c", code, str(path)]
    assert subprocess.run(words).returncode == 0 and path.read_text() == ""


@pytest.mark.parametrize(("signal", "told"), [(6, True), (11, True), (15, False)])
def test_a_server_that_crashed_and_does_not_end_is_told(monkeypatch, signal, told):
    """Its handler of signals can wait forever; 15 is the signal of an orderly end."""
    monkeypatch.setattr(server_log, "CRASH_S", 0.2)
    log = server_log.ServerLog()
    said = f"import time; print('Signal ({signal}) received.', flush=True); time.sleep(60)"
    child = log.popen([sys.executable, "-c", said])
    try:
        log.ready()
        deadline = time.monotonic() + (10 if told else 1)
        while not log.crashed() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert log.crashed() == (f"tritonserver crashed (signal {signal}) and does not end" if told else "")
    finally:
        child.kill()
        child.wait()
