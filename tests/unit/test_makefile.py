# SPDX-License-Identifier: Apache-2.0
"""What the Makefile runs, without running it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make")


def make(*arguments: str) -> tuple[int, str]:
    """Status and output of make, which is told of nothing by the make that may run these tests."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS")
    }
    done = subprocess.run(
        ["make", *arguments], cwd=ROOT, env=env, capture_output=True, text=True, check=False
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
    assert status != 0 and "unknown variable KNOB: there are PYTHON" in text


def test_known_variables_are_taken_and_checks_come_before_writing():
    status, text = make(
        "-n", "serve", "KNOBS=max_num_seqs=8 max_queue_size=4", "HTTP_PORT=8700", "UV=", "PIP_ARGS=",
        "SERVE_ARGS=--openai-workers 2 --drain-seconds 9",
    )  # fmt: skip
    assert status == 0
    serve, build = ".venv/bin/python -m flashinfer_backend.serve", ".venv/bin/python build.py"
    order = [text.index(f"{serve} --check"), text.index(build), text.index(f"exec {serve} --model")]
    assert order == sorted(order)
    assert text.count("--openai-workers 2 --drain-seconds 9") == 2
    assert text.count("--http-port 8700") == 2 and "--set max_num_seqs=8 max_queue_size=4" in text


@pytest.mark.parametrize(("uv", "program"), [("", r"python -m pip"), ("/bin/uv", r"/bin/uv pip")])
@pytest.mark.parametrize("target", ["serve", "test"])
def test_installing_is_announced_and_then_quiet(uv, program, target):
    status, text = make("-n", "-B", target, f"UV={uv}", "PIP_ARGS=")
    assert status == 0
    announced, installs = (
        text.index("installing into .venv"),
        list(re.finditer(rf"{program} install( -q)?", text)),
    )
    assert installs and all(found[1] and found.start() > announced for found in installs)
