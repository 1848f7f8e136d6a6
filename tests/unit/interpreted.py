# SPDX-License-Identifier: Apache-2.0
"""Kernels in Triton's interpreter, without a GPU."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def interpreted(file: str) -> None:
    """Run a test file as a program, in a process of its own: what is interpreted is decided when Triton is
    imported."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, __file__, file], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def patch_once_a_launch() -> None:
    """Triton's interpreter replaces all of the language at each call of a function in a kernel, tl.sum
    included: a third of the time. Once a launch is enough for the functions of a module."""
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()

    def patch_lang(function: Any) -> Any:
        if (module := id(function.__globals__)) in patched:
            return None
        patched.add(module)
        return patch(function)

    def launched(*args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch(*args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_lang, launched


if __name__ == "__main__":
    patch_once_a_launch()
    runpy.run_path(sys.argv[1], run_name="__main__")
