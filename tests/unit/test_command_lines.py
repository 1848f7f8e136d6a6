# SPDX-License-Identifier: Apache-2.0
"""What all command lines have in common."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("backend_src", "client", "perf_configs", "tests", "tools")


def test_options_may_not_be_cut_short():
    """An option that comes later could change what a short form means."""
    parsers = []
    for file in (file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")):
        if "ArgumentParser" not in (text := file.read_text()):
            continue
        for call in ast.walk(ast.parse(text)):
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("ArgumentParser"):
                named = {word.arg: ast.unparse(word.value) for word in call.keywords}
                parsers.append((str(file), named.get("allow_abbrev")))
    assert len(parsers) > 10 and [file for file, taken in parsers if taken != "False"] == []


@pytest.mark.parametrize(
    "command",
    [
        "-m client --help",
        "-m client bench --help",
        "-m flashinfer_backend.models.where bundled",
        "build.py --list-knobs",
    ],
)
def test_a_reader_that_goes_early_gets_no_traceback(command):
    words = f"{sys.executable} {command} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", words], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stderr == "" and done.stdout.splitlines()[-1] in ("0", "141")


def test_a_generation_needs_neither_triton_nor_torch() -> None:
    code = (
        "import sys, flashinfer_backend.serving.generation\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "print(*sorted(loaded & {'torch', 'tritonclient', 'flashinfer', 'transformers', 'triton'}))\n"
        "print(*[name for name in sys.modules if name.startswith('flashinfer_backend.triton_server')])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout.split()) == (0, []), ran.stderr
