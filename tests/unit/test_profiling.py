# SPDX-License-Identifier: Apache-2.0
"""How much a trace may hold, and how long it may take."""

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashinfer_backend.core.config import EngineConfig, resolve_limits
from flashinfer_backend.engine import profiling
from flashinfer_backend.engine.profiling import Profiling
from flashinfer_backend.transport.protocol import Profile, Profiled
from flashinfer_backend.worker import trace
from flashinfer_backend.worker.trace import StepTrace
from perf_configs import read_trace


class Engine:
    """What a Profiling has around it. fails: why a trace cannot be written; cannot_start: the same."""

    def __init__(self, folder: Path | str, fails: str = "", cannot_start: str = "") -> None:
        self.answers: list[Profiled] = []
        self.written = 0
        self._fails, self._cannot_start = fails, cannot_start
        config = EngineConfig(model_dir="bundled", profile_dir=str(folder))
        runner: Any = SimpleNamespace(start_trace=self._start, write_trace=self._write)
        self.profiling = Profiling(config, runner, 0, self.answers.append)

    def _start(self, stem: str) -> list[str]:
        if self._cannot_start:
            raise RuntimeError(self._cannot_start)
        return [stem]

    def _write(self) -> None:
        if self._fails:
            raise OSError(self._fails)
        self.written += 1

    def ask(self, steps: int) -> Profiled:
        self.profiling.asked(Profile(7, steps))
        return self.answers.pop()


def test_a_trace_is_written_when_its_steps_or_its_time_are_over(tmp_path: Path, monkeypatch: Any) -> None:
    engine = Engine(tmp_path)
    assert engine.ask(2).files
    for step in range(2):
        engine.profiling.advance()
        assert engine.written == 0, step
        engine.profiling.step_read()
    engine.profiling.advance()
    assert engine.written == 1
    monkeypatch.setattr(profiling, "MOST_S", -1.0)
    assert engine.ask(2).files
    engine.profiling.advance()
    assert engine.written == 2
    assert engine.ask(0) == Profiled(7, engine.profiling._files)


@pytest.mark.parametrize(
    ("steps", "files", "words"),
    [
        (101, 0, "a trace should have at most 100 steps"),
        (1, 64, "has 64 traces, and may have 64: move some away"),
        (0, 0, "no trace was started"),
    ],
)
def test_what_is_refused(tmp_path: Path, steps: int, files: int, words: str) -> None:
    for number in range(files):
        (tmp_path / f"{number}.json").touch()
    answer = Engine(tmp_path).ask(steps)
    assert answer.refused and words in answer.error


def test_an_engine_without_a_folder_traces_nothing() -> None:
    answer = Engine("none").ask(1)
    assert answer.refused and "start the server with the knob profile_dir=FOLDER" in answer.error


def test_a_folder_is_named_by_an_absolute_path() -> None:
    config = EngineConfig(model_dir="bundled", profile_dir="traces")
    with pytest.raises(ValueError, match="profile_dir=traces should be an absolute path, or none"):
        resolve_limits(config, 1024)


def test_a_trace_that_cannot_be_written_harms_no_step(tmp_path: Path) -> None:
    engine = Engine(tmp_path, "no space left")
    engine.ask(1)
    engine.profiling.step_read()
    engine.profiling.advance()
    answer = engine.ask(0)
    assert answer.error == "the trace could not be written: no space left" and not answer.refused
    assert engine.ask(1).files, "the next one may be"


def test_a_trace_that_cannot_start_harms_no_step(tmp_path: Path) -> None:
    engine = Engine(tmp_path, cannot_start="already running")
    answer = engine.ask(1)
    assert answer.error == "the trace could not be started: already running" and not answer.refused
    engine.profiling.step_read()
    engine.profiling.advance()
    assert engine.written == 0
    assert engine.ask(0).error == "no trace was started: POST /start_profile"


def test_a_file_that_is_too_large_does_not_stay(tmp_path: Path, monkeypatch: Any) -> None:
    made = StepTrace(torch.device("cpu"), tmp_path / "a.json")
    torch.ones(2)
    monkeypatch.setattr(trace, "MOST_BYTES", 10)
    with pytest.raises(ValueError, match=r"MiB, and may have 0: ask for fewer steps"):
        made.write()
    assert not list(tmp_path.iterdir())


def test_a_written_trace_keeps_no_memory(tmp_path: Path) -> None:
    made = StepTrace(torch.device("cpu"), tmp_path / "a.json")
    torch.ones(2)
    kept = weakref.ref(made._profile.profiler)
    gc.disable()
    try:
        made.write()
    finally:
        gc.enable()
    assert kept() is None


def test_what_is_no_trace_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(SystemExit):
        read_trace.main([str(tmp_path / "a.json")])
    assert "a.json: it should be a Chrome trace, an object with traceEvents" in capsys.readouterr().err


def test_a_kernel_that_waits_for_the_one_before_adds_what_is_behind_it() -> None:
    """b runs from the middle of a, and ends 1 ms after it; c is part of a's time; 2 ms later a runs again."""
    times = [("a", 0, 4000), ("c", 1000, 2000), ("b", 2000, 3000), ("a", 7000, 1000)]
    lines = read_trace.report([{"name": name, "ts": ts, "dur": dur} for name, ts, dur in times])
    assert lines[0].startswith("span 8.00 ms, busy 6.00 ms, 4 kernels")
    rows = [line.split() for line in lines[2:5]]
    assert rows == [
        ["5.000", "5.000", "2", "2500.0", "a"],
        ["1.000", "3.000", "1", "3000.0", "b"],
        ["0.000", "2.000", "1", "2000.0", "c"],
    ]
    assert lines[-1].split() == ["2.000", "1", "2000.0", "idle:", "b", "->", "a"]
