# SPDX-License-Identifier: Apache-2.0
"""What notes compilations in tests/gpu hands on what FlashInfer calls it with; with modules in its place."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from compilations import watch


def test_calls_are_handed_on_with_all_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    build, run_ninja = MagicMock(), MagicMock()

    class JitSpecNvcc:
        name = "norm"

        def build_and_load(self) -> str:
            return "module"

        def build(self, *arguments: Any, **options: Any) -> None:
            build(*arguments, **options)

    core: Any = ModuleType("flashinfer.jit.core")
    core.JitSpec = core.JitSpecNvcc = JitSpecNvcc
    core.run_ninja = run_ninja
    knobs: Any = ModuleType("triton.knobs")
    knobs.runtime = SimpleNamespace(jit_post_compile_hook=None)
    knobs.compilation = SimpleNamespace(listener=None)
    for name in ("flashinfer", "flashinfer.jit", "triton"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "flashinfer.jit.core", core)
    monkeypatch.setitem(sys.modules, "triton.knobs", knobs)
    with watch() as found:
        assert JitSpecNvcc().build_and_load() == "module"
        JitSpecNvcc().build(False, need_lock=True)
        core.run_ninja("folder", "file", False, max_jobs=2)  # of FlashInfer 0.7; before, no options
    assert (found.loaded, found.built) == (["norm"], ["norm", "folder"])
    build.assert_called_once_with(False, need_lock=True)
    run_ninja.assert_called_once_with("folder", "file", False, max_jobs=2)
    assert core.run_ninja is run_ninja
