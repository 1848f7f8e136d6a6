# SPDX-License-Identifier: Apache-2.0
"""What is looked at before a server is started."""

import contextlib
import ctypes
import errno
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from build_support import MODEL_REPO

from flashinfer_backend.config_tools import cli
from flashinfer_backend.launch import preflight
from flashinfer_backend.launch.preflight import FEWEST_FILES, Installation, ServeError

C_COMPILER = shutil.which("cc")


@pytest.fixture
def stub(tmp_path):
    """A program in the place of the wheel's stub that needs a library which no loader finds by itself, and
    that library's folder."""
    if C_COMPILER is None:
        pytest.skip("no C compiler")
    name, place = f"libpython{preflight.PYTHON}.so.1.0", tmp_path / "own"
    place.mkdir()
    (tmp_path / "library.c").write_text("int library_says(void) { return 0; }")
    (tmp_path / "program.c").write_text("int library_says(void); int main(void) { return library_says(); }")
    library = place / "libunknown-here.so.1.0"
    shared = f"-shared -fPIC -Wl,-soname,{library.name}"
    subprocess.run([C_COMPILER, *shared.split(), "-o", library, tmp_path / "library.c"], check=True)
    (place / name).write_bytes(b"")  # by which LIBDIR is known to be that of a shared Python
    folder = tmp_path / "backends/python"
    folder.mkdir(parents=True)
    program = folder / "triton_python_backend_stub"
    subprocess.run([C_COMPILER, "-o", program, tmp_path / "program.c", library], check=True)
    return program, place


def wheel(stub: Path) -> Installation:
    return Installation(stub, backends=stub.parents[1], libraries=stub.parent, version=(2, 51))


def test_the_stub_is_given_the_interpreters_own_library(stub, monkeypatch):
    """Although this process has the library loaded, by which its name is found here and not in the stub."""
    program, place = stub
    ctypes.CDLL(str(place / "libunknown-here.so.1.0"))
    monkeypatch.setattr(sysconfig, "get_config_var", {"LIBDIR": str(place)}.get)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/of/the/user")
    env = preflight.environment(wheel(program))
    assert env["LD_LIBRARY_PATH"] == f"{program.parent}:{place}:/of/the/user"
    assert subprocess.run([program], env=env, check=False).returncode == 0


def test_a_stub_without_its_libraries_is_refused(stub, monkeypatch):
    program, _ = stub
    monkeypatch.setattr(sysconfig, "get_config_var", {}.get)
    with pytest.raises(ServeError, match=r"libunknown-here\.so\.1\.0 is missing.*apt-get install libpython"):
        preflight.environment(wheel(program))


def test_the_real_stub_finds_its_libraries(tmp_path):
    server = preflight.find_server(tmp_path)
    assert not preflight.missing_libraries(server.stub, preflight.environment(server))


def test_the_backend_is_copied_to_the_cache_that_the_user_has_chosen(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    server = preflight.find_server(None)
    assert server.backends.is_relative_to(tmp_path / "cache" / "flashinfer-backend" / "backends")
    assert (server.backends / "python").is_dir() and not (tmp_path / "home").exists()


def test_a_user_without_a_place_for_the_backend_is_told_the_option(tmp_path, monkeypatch):
    def refused(option=None):
        with pytest.raises(
            ServeError, match=r"^no place for a copy .* --backends DIR, or in XDG_CACHE_HOME$"
        ) as why:
            preflight.find_server(option)
        return str(why.value)

    (tmp_path / "file").touch()
    assert "Not a directory" in refused(tmp_path / "file" / "below")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    assert "Not a directory" in refused()
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 4242424)  # as a container may be run
    assert "home" in refused()


def test_a_disk_that_is_full_is_told_and_keeps_no_half_copy(tmp_path, monkeypatch):
    def copy(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil.copytree, "__defaults__", (False, None, copy, False, False))
    with pytest.raises(ServeError, match=r"backend: \[Errno 28\] No space left on device; name"):
        preflight.find_server(tmp_path)
    assert not list(tmp_path.iterdir())


def test_numpy_2_is_refused_where_the_server_cannot_read_its_strings():
    for version, numpy in (((2, 51), "1.26.4"), ((2, 72), "2.4.0"), (None, "2.4.0")):
        preflight.check_numpy(Installation(Path("server"), version=version), numpy)
    with pytest.raises(ServeError, match=r"numpy 2\.0\.1 is installed.*2\.51.*pip install 'numpy<2'"):
        preflight.check_numpy(Installation(Path("server"), version=(2, 51)), "2.0.1")


@pytest.mark.parametrize(
    "version, swaps", [((2, 60), False), ((2, 61), True), ((2, 71), True), ((2, 72), False)]
)
def test_servers_that_swap_answers_take_one_postprocessing(version, swaps, tmp_path):
    server = Installation(Path("server"), version=version)
    for count in (1, 2):
        one = ["--set", f"postprocessing_instance_count={count}"]
        assert cli.main(MODEL_REPO, ["--output", str(tmp_path / str(count)), *one]) == 0
    preflight.check_ordering(server, tmp_path / "1")
    if swaps:
        with pytest.raises(ServeError, match=r"postprocessing has 2: .*postprocessing_instance_count=1"):
            preflight.check_ordering(server, tmp_path / "2")
    else:
        preflight.check_ordering(server, tmp_path / "2")


@pytest.mark.parametrize("model", ["llm", "postprocessing", "*"])
def test_sizes_of_batches_changed_by_hand(model, tmp_path):
    """As benchmark scripts do, with sed on max_batch_size."""
    repository = tmp_path / "repo"
    assert cli.main(MODEL_REPO, ["--output", str(repository), "--set", "preferred_batch_size=256"]) == 0
    preflight.check_batch_sizes(repository)
    for file in repository.glob(f"{model}/config.pbtxt"):
        file.write_text(file.read_text().replace("max_batch_size: 256", "max_batch_size: 64"))
    with pytest.raises(ServeError) as error:
        preflight.check_batch_sizes(repository)
    assert "config.pbtxt: max_batch_size is" in str(error.value)
    assert "build again with triton_max_batch_size=64" in str(error.value)


def test_a_step_of_an_ensemble_takes_its_batches(tmp_path):
    repository = tmp_path / "repo"
    assert cli.main(MODEL_REPO, ["--output", str(repository), "--set", "triton_max_batch_size=32"]) == 0
    file = repository / "ensemble" / "config.pbtxt"
    file.write_text(file.read_text().replace("max_batch_size: 32", "max_batch_size: 64"))
    with pytest.raises(ServeError, match=r"a step of it, has 32; .* triton_max_batch_size=32"):
        preflight.check_batch_sizes(repository)


def test_the_version_of_an_image(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_SERVER_VERSION", raising=False)
    assert preflight.image_version(tmp_path) is None
    monkeypatch.setenv("TRITON_SERVER_VERSION", "2.69.0")
    assert preflight.image_version(tmp_path) == (2, 69)
    (tmp_path / "TRITON_VERSION").write_text("2.72.0\n")
    assert preflight.image_version(tmp_path) == (2, 72)


def test_the_wheel_that_is_here_has_a_known_version(tmp_path):
    assert preflight.find_server(tmp_path).version in preflight.WHEEL_SERVERS.values()


def test_a_repository_that_is_served_is_not_replaced(tmp_path, capsys):
    arguments = ["--output", str(tmp_path / "served")]
    assert cli.main(MODEL_REPO, arguments) == 0
    before = (tmp_path / "served").stat().st_ino
    with preflight.serving(tmp_path / "served"), preflight.serving(tmp_path / "served"):
        assert cli.main(MODEL_REPO, [*arguments, "--set", "max_num_seqs=8"]) == 2
        assert "is being served" in capsys.readouterr().err
        assert cli.main(MODEL_REPO, [*arguments, "--set", "max_num_seqs=8", "--diff"]) == 0
    assert (tmp_path / "served").stat().st_ino == before
    assert cli.main(MODEL_REPO, [*arguments, "--set", "max_num_seqs=8"]) == 0


def test_a_check_needs_no_repository_and_refuses_what_serve_does(tmp_path):
    with contextlib.ExitStack() as stack:
        unused = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        http, grpc, metrics = (str(each.getsockname()[1]) for each in unused)

    def check(*more: str) -> tuple[int, str]:
        words = [sys.executable, "-m", "flashinfer_backend.serve", "--check", "--http-port", http, *more]
        words += ["--grpc-port", grpc, "--metrics-port", metrics, "--model-repository"]
        done = subprocess.run(
            [*words, str(tmp_path / more[-1] if more else tmp_path / "later")],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        )
        return done.returncode, done.stderr

    assert check() == (0, "")
    assert check("--host", "no.such.host.invalid")[0] == 1


@pytest.mark.parametrize("most", [FEWEST_FILES - 1, FEWEST_FILES])
def test_too_few_open_files_are_told(most: int) -> None:
    """In a process of its own, as a limit cannot be raised again."""
    code = f"""
import resource
from flashinfer_backend.launch.preflight import ServeError, check_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, ({most}, {most}))
try:
    check_open_files()
except ServeError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.startswith("a process may have only 127 files open here" if most < FEWEST_FILES else "")
    assert bool(said) == (most < FEWEST_FILES)
