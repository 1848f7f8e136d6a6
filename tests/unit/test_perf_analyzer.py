# SPDX-License-Identifier: Apache-2.0
"""The command that runs perf_analyzer: what it runs, and what it says when something is missing."""

import sys
from pathlib import Path

import pytest

from client import perf_analyzer
from client.perf_analyzer import LIBRARIES, find_libraries, find_program, main

SHOWS = "import os, shutil; print(os.environ['LD_LIBRARY_PATH'].split(':')[0], shutil.which('perf_analyzer'))"


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"tritonclient\[all\]==2.50.0"):
        find_program(tmp_path)
    monkeypatch.setattr(perf_analyzer, "LIBRARIES", {"libnothing-of-that-name.so.9": "libnothing-*"})
    with pytest.raises(FileNotFoundError, match="pip install nvidia-pytriton"):
        find_libraries(tmp_path)
    (tmp_path / "nvidia_pytriton.libs").mkdir()
    copy = tmp_path / "nvidia_pytriton.libs/libnothing-123.so.9"
    copy.touch()
    assert find_libraries(tmp_path) == {"libnothing-of-that-name.so.9": copy}


def test_another_program_finds_perf_analyzer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "perf_analyzer"
    program.write_text("#!/bin/sh\necho ran $*\n")
    program.chmod(0o755)
    monkeypatch.setattr(perf_analyzer, "find_program", lambda: program)
    monkeypatch.setattr(perf_analyzer, "find_libraries", lambda: {name: program for name in LIBRARIES})
    assert main(["-m", "ensemble"]) == 0 and capfd.readouterr().out == "ran -m ensemble\n"
    assert main(["--with", sys.executable, "-c", SHOWS]) == 0
    folder, found = capfd.readouterr().out.split()
    assert found == str(program) and not Path(folder).exists(), "the links are gone when it has ended"
    for arguments in (["--with"], ["--with", "no-program-of-that-name"]):
        assert main(arguments) == 2 and "client.perf_analyzer: " in capfd.readouterr().err
    assert main(["--with", "false"]) == 1
