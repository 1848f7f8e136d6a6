# SPDX-License-Identifier: Apache-2.0
"""What other users of the machine put into the folders that everybody can write to."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from flashinfer_backend.launch import environments
from flashinfer_backend.launch.launcher import _parser
from flashinfer_backend.transport import rundir, stub_processes
from waiting import wait_for

OTHER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_only_regular_files_of_this_user_in_shared_memory_are_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A folder made each restart fail, and the file that a link names was closed to others."""
    shm = tmp_path / "shm"
    shm.mkdir()
    monkeypatch.setattr(stub_processes, "SHARED_MEMORY", shm)
    precious = tmp_path / "precious"
    for file in (precious, shm / "x_own", shm / "another", tmp_path / "linked"):
        file.write_text("text")
        file.chmod(0o644)
    (shm / "x_folder").mkdir(0o755)
    (shm / "x_link").symlink_to(precious)
    os.link(tmp_path / "linked", shm / "x_hard")
    os.mkfifo(shm / "x_fifo", 0o644)
    if os.geteuid() == 0:
        (shm / "x_others").write_text("text")
        (shm / "x_others").chmod(0o644)
        os.chown(shm / "x_others", OTHER, OTHER)
    names, descriptors = stub_processes.regions_of("x_"), len(os.listdir("/proc/self/fd"))
    left = sorted(set(names) - {"x_own"})
    assert "another" not in names and len(left) >= 4
    stub_processes.close_regions(names)
    assert mode(shm / "x_own") == 0o600
    stub_processes.remove_regions([*names, "../precious", "x_gone"])
    assert sorted(path.name for path in shm.iterdir()) == ["another", *left]
    assert (mode(precious), mode(tmp_path / "linked")) == (0o644, 0o644)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    said = capfd.readouterr().err
    assert [said.count(f"{shm / name} is left as it is") for name in (*left, "x_own")] == [1] * len(left) + [
        0
    ]
    assert stub_processes.regions_of("") == []


@as_root
def test_a_process_of_another_user_is_no_stub() -> None:
    """Its command line named any file as its shared memory, to be removed."""
    line = ["/backends/triton_python_backend_stub", "/1/model.py", "region", "1", "1", "4194305"]
    for user, found in ((OTHER, False), (0, True)):
        # `yes` takes any arguments, and stands still once the pipe is full.
        with subprocess.Popen(line, executable="/usr/bin/yes", user=user, stdout=subprocess.PIPE) as process:
            try:
                told = Path(f"/proc/{process.pid}/cmdline")
                wait_for(lambda told=told: b"region" in told.read_bytes(), "its command line")
                assert (stub_processes.find_stub(process.pid) is not None) == found
                assert process.poll() is None
            finally:
                process.kill()


def test_a_folder_that_others_prepared_is_refused(tmp_path: Path) -> None:
    """Through a link, root closed a folder of others and removed what was in it."""
    target = tmp_path / "target"
    (target / "4194305-data").mkdir(parents=True)
    target.chmod(0o755)
    prepared = [tmp_path / "link", tmp_path / "file"]
    prepared[0].symlink_to(target)
    prepared[1].touch()
    if os.geteuid() == 0:
        prepared.append(tmp_path / "others")
        prepared[-1].mkdir()
        os.chown(prepared[-1], OTHER, OTHER)
    for place in prepared:
        with pytest.raises(OSError, match=r"no folder of this user|cannot be made .*set XDG_RUNTIME_DIR"):
            rundir.claim(place / "1-llm")
    (target / "beat-4194305").touch()
    rundir.forget_processes([prepared[0] / "4194305-processes"])
    assert mode(target) == 0o755 and len(list(target.iterdir())) == 2


def test_run_directories_are_for_this_user_alone(tmp_path: Path) -> None:
    run_dir, before = tmp_path / "user" / "1-llm", os.umask(0)
    try:
        with rundir.locked(run_dir):
            rundir.shared_array(run_dir / "shared", "i8", (2,))
    finally:
        os.umask(before)
    folders, files = (run_dir.parent, run_dir, run_dir / "stubs"), (run_dir / "lock", run_dir / "shared")
    assert [mode(path) for path in (*folders, *files)] == [0o700] * 3 + [0o600] * 2
    assert files[1].stat().st_size == 16


def test_what_killed_servers_leave_in_tmp_is_removed_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "PLACE", tmp_path)
    started = time.time() - 100
    monkeypatch.setattr(environments, "_servers_started", lambda: [started])
    for name in ("old", "new", "full", "others"):
        (tmp_path / f"python_env_{name}").mkdir()
    (tmp_path / "python_env_full" / "bin").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "python_env_link").symlink_to(tmp_path / "elsewhere")
    for name in ("old", "full", "others"):
        os.utime(tmp_path / f"python_env_{name}", (started - 1, started - 1))
    os.utime(tmp_path / "elsewhere", (started - 1, started - 1))
    gone = {"python_env_old"}
    if os.geteuid() == 0:
        os.chown(tmp_path / "python_env_others", OTHER, OTHER)
    else:
        gone.add("python_env_others")
    before = {path.name for path in tmp_path.iterdir()}
    environments.remove_environments()
    assert before - {path.name for path in tmp_path.iterdir()} == gone


def test_names_of_shared_memory_cannot_be_guessed() -> None:
    names = {_parser().parse_args(["--model-repository", "r"]).shm_prefix for _ in range(2)}
    assert len(names) == 2 and all(len(name) > 30 for name in names)
