# SPDX-License-Identifier: Apache-2.0
"""What is installed comes as wheels, for every Python that pyproject.toml admits."""

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).parents[2]
PROJECT = msgspec.toml.decode((ROOT / "pyproject.toml").read_bytes())["project"]
UNREACHABLE = re.compile(
    r"error sending request|Failed to fetch|Request failed|dns error|timed out", re.IGNORECASE
)


def advertised_pythons() -> list[str]:
    low, high = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups()
    return [f"3.{minor}" for minor in range(int(low), int(high))]


@pytest.fixture(scope="module")
def resolutions(tmp_path_factory):
    """By version of Python, uv that resolves every extra at once: they wait for the index at the same time.
    torch is left out: its index depends on the machine."""
    overrides = tmp_path_factory.mktemp("requirements") / "overrides.txt"
    overrides.write_text('torch; python_version < "3"\n')
    words = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-build", "--no-python-downloads"]
    words += ["--python-platform", "x86_64-manylinux_2_35", "--override", str(overrides)]
    words += ["--constraint", "requirements/constraints.txt", "--all-extras", "pyproject.toml"]
    words += ["requirements/kernels-cpu.txt", "--python-version"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("UV_")}
    options = {"cwd": ROOT, "env": env | {"UV_HTTP_TIMEOUT": "20"}, "text": True}
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = {
        python: subprocess.Popen([*words, python], **options, **piped) for python in advertised_pythons()
    }
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


@pytest.mark.parametrize("python", advertised_pythons())
def test_every_python_gets_wheels_only(python, resolutions):
    out, err = resolutions[python].communicate()
    if resolutions[python].returncode and UNREACHABLE.search(err):
        pytest.skip(f"the package index cannot be reached: {err.splitlines()[0]}")
    assert resolutions[python].returncode == 0, err
    assert "nvidia-pytriton==0.7.0" in out and "\ntriton==3.6.0" in out and "\ntorch==" not in out


def test_the_advertised_pythons_are_those_of_the_pages():
    low, *_, high = advertised_pythons()
    for page in ("README.md", "CONTRIBUTING.md"):
        assert f"Python {low} to {high}" in (ROOT / page).read_text(encoding="utf-8"), page
