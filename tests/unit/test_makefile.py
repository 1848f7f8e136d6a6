# SPDX-License-Identifier: Apache-2.0
"""What the Makefile runs, without running it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKE = shutil.which("make") or "make"
pytestmark = pytest.mark.skipif(shutil.which(MAKE) is None, reason="no make")


def make(*arguments: str, cwd: Path = ROOT, **environment: str) -> tuple[int, str]:
    """Status and output of make, which is told of nothing by the make that may run these tests."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS")
    }
    done = subprocess.run(
        [MAKE, *arguments], cwd=cwd, env=env | environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_bare_make_prints_help_of_every_target_and_variable():
    status, text = make()
    assert status == 0
    makefile = (ROOT / "Makefile").read_text()
    targets = re.search(r"^\.PHONY: help (.*)", makefile, re.MULTILINE)[1].split()
    variables = re.search(r"^variables := (.*)", makefile, re.MULTILINE)[1].split()
    assert [name for name in targets if f"make {name} " not in text] == []
    assert [name for name in variables if not re.search(rf"\b{name}\b", text, re.IGNORECASE)] == []
    assert sorted(re.findall(r"^(\w+) \?=", makefile, re.MULTILINE)) == sorted(variables)


@pytest.mark.parametrize("target", ["help", "serve", "test"])
def test_unknown_variables_are_refused(target):
    status, text = make("-n", target, "KNOB=max_num_seqs=8")
    assert status != 0 and "unknown variable KNOB; known are PYTHON" in text


def test_known_variables_are_taken_and_checks_come_before_writing():
    status, text = make(
        "-n", "serve", "KNOBS=max_num_seqs=8 max_queue_size=4", "HTTP_PORT=8700", "UV=", "PIP_ARGS=",
        "PROFILE=a b.toml", "LLM_NAME=tensorrt_llm",
        "SERVE_ARGS=--openai-workers 2 --drain-seconds 9",
    )  # fmt: skip
    assert status == 0
    serve, build = ".venv/bin/python -m flashinfer_backend.serve", ".venv/bin/python build.py"
    order = [text.index(f"{serve} --check"), text.index(build), text.index(f"exec {serve} --model")]
    assert order == sorted(order)
    assert text.count("--openai-workers 2 --drain-seconds 9") == 2
    assert text.count("--http-port 8700") == 2 and "--set max_num_seqs=8 max_queue_size=4" in text
    assert "--profile 'a b.toml' --llm-name 'tensorrt_llm'" in text


@pytest.mark.parametrize(("uv", "program"), [("", r"python -m pip"), ("/bin/uv", r"/bin/uv pip")])
@pytest.mark.parametrize("target", ["serve", "test"])
def test_installing_is_announced_and_shows_progress(uv, program, target):
    """pip's lines about large downloads; uv draws its own bars, which -q would hide."""
    status, text = make("-n", "-B", target, f"UV={uv}", "PIP_ARGS=")
    assert status == 0
    installs = re.findall(rf"{program} install .*", text)
    assert installs and text.index("installing into .venv") < text.index(installs[0])
    for install in " ".join(installs).split(" && "):
        assert " -q" not in install and ("| sed -un '/Downloading" in install) == (not uv)


@pytest.mark.parametrize("target", ["serve", "test"])
def test_uv_on_the_path_installs_unless_pip_was_told_something(tmp_path, target):
    uv = tmp_path / "uv"
    uv.touch(mode=0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    told_nothing = {"PIP_INDEX_URL": "", "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": ""}
    text = make("-n", "-B", target, PATH=path, PIP_ARGS="", **told_nothing)[1]
    assert "installing into .venv with uv" in text and f"{uv} pip install --python" in text
    text = make("-n", "-B", target, PATH=path, PIP_ARGS="", **told_nothing | {"PIP_FIND_LINKS": "/wheels"})[1]
    assert "installing into .venv with pip" in text and "python -m pip install" in text


@pytest.mark.parametrize("uv", ["", "/bin/uv"])
def test_pytorch_can_come_without_cuda(uv):
    index = "https://download.pytorch.org/whl/cpu"
    announced = make("-n", "-B", "serve", f"UV={uv}", "PIP_ARGS=")[1]
    _, text = make("-n", "-B", "serve", f"UV={uv}", "PIP_ARGS=", f"TORCH_INDEX={index}")
    assert f"--extra-index-url {index}" not in announced
    assert f"--extra-index-url {index}" in text and "leaves out" not in text
    assert ("--index-strategy unsafe-best-match" in text) == bool(uv)  # else uv takes all from that index


FAKE = f"""#!/bin/sh
# A Python of another version: python VERSION... as its folder says it.
version=$(cat "$0.version") || exit 127
case "$1" in
-c) exec {sys.executable} -c "import sys; sys.version_info = ($version, 0); exec(sys.argv[1])" "$2" ;;
-m) [ -e "$0.broken" ] && {{ mkdir -p "$3/bin"; exit 1; }}
    mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "$0.version" "$3/bin/python.version" ;;
esac
"""


@pytest.fixture
def machine(tmp_path):
    """machine(python3="3, 13", ...) makes these the Pythons on PATH; machine.make runs the Makefile there."""
    project, programs = tmp_path / "project", tmp_path / "bin"
    project.mkdir()
    programs.mkdir()
    shutil.copy(ROOT / "Makefile", project)
    for name in ("sh", "bash", "sed", "rm", "mkdir", "cp", "cat", "grep", "echo"):
        (programs / name).symlink_to(shutil.which(name))

    def run(*arguments: str, **pythons: str) -> tuple[int, str]:
        for name, version in pythons.items():
            file = programs / name.replace("_", ".")
            file.write_text(FAKE)
            file.chmod(0o755)
            file.with_name(file.name + ".version").write_text(version)
        return make(*arguments, "PIP_ARGS=", cwd=project, PATH=str(programs))

    run.project, run.programs = project, programs
    return run


def venv_version(machine) -> str:
    return (machine.project / ".venv/bin/python.version").read_text()


def test_a_usable_python_is_found_beside_a_newer_one(machine):
    status, text = machine(".venv/bin/python", "UV=", python3="3, 13", python3_11="3, 11")
    assert status == 0, text
    assert venv_version(machine) == "3, 11"


def test_without_a_usable_python_one_line_says_what_to_do(machine):
    status, text = machine(".venv/bin/python", "UV=", python3="3, 13")
    assert status != 0 and not (machine.project / ".venv").exists()
    told = [line for line in text.splitlines() if not line.startswith("make: ***")]
    assert len(told) == 1 and "Python 3.10 to 3.12 is needed" in told[0] and "PYTHON=" in told[0]
    status, text = machine(".venv/bin/python", "UV=", "PYTHON=python3")
    assert status != 0 and "PYTHON=python3 is none: name another" in text


def test_uv_is_asked_for_a_python(machine):
    _, text = machine("-n", ".venv/bin/python", "UV=/bin/uv", python3="3, 13")
    assert "/bin/uv venv --seed --python '>=3.10,<3.13' .venv" in text


def test_a_venv_of_another_python_is_made_anew(machine):
    assert machine(".venv/bin/python", "UV=", python3="3, 12", python3_10="3, 10")[0] == 0
    kept = machine.project / ".venv" / "kept"
    kept.touch()
    assert machine(".venv/bin/python", "UV=")[0] == 0 and kept.exists()
    assert machine(".venv/bin/python", "UV=", "PYTHON=python3")[0] == 0 and kept.exists()
    assert machine(".venv/bin/python", "UV=", "PYTHON=python3.10")[0] == 0 and not kept.exists()
    assert venv_version(machine) == "3, 10"
    (machine.project / ".venv/bin/python.version").write_text("3, 13")  # its Python was upgraded
    assert machine(".venv/bin/python", "UV=")[0] == 0 and venv_version(machine) == "3, 12"


def test_a_venv_that_failed_does_not_stay(machine):
    (machine.programs / "python3.broken").touch()
    status, _ = machine(".venv/bin/python", "UV=", python3="3, 12")
    assert status != 0 and not (machine.project / ".venv").exists()
