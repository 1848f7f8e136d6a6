# SPDX-License-Identifier: Apache-2.0
"""What notes compilations and loaded modules in tests/gpu: with modules in FlashInfer's place, and structures
like CUPTI's own."""

import ctypes
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import module_loads
import pytest
from compilations import watch
from module_loads import (
    DRIVER_API,
    ENTER,
    GET_KERNEL,
    MODULE_LOADED,
    RESOURCE,
    Call,
    Lookup,
    Module,
    Resource,
)


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


CUBIN = b"\x7fELF\0.text._Z4gemmPf\0.nv.info._Z4gemmPf\0.text._Z4normPf\0.rel.text._Z4normPf\0"


def loaded(callback: Any) -> None:
    cubin = ctypes.create_string_buffer(CUBIN, len(CUBIN))
    module = Module(7, len(CUBIN), ctypes.addressof(cubin))
    resource = Resource(None, None, ctypes.addressof(module))
    callback(None, RESOURCE, MODULE_LOADED, ctypes.addressof(resource))


def looked_up(callback: Any, site: int) -> None:
    lookup = Lookup(None, None, b"_Z4gemmPf")
    call = Call(site, b"cuLibraryGetKernel", ctypes.addressof(lookup))
    callback(None, DRIVER_API, GET_KERNEL, ctypes.addressof(call))


def test_modules_and_kernels_have_names() -> None:
    modules: list[str] = []
    kernels: list[str] = []
    ready = False
    callback = module_loads.noting(modules, kernels, lambda: ready)
    loaded(callback)
    ready = True
    loaded(callback)
    for site in (ENTER, ENTER + 1):
        looked_up(callback, site)
    assert modules == ["7", f"{len(CUBIN)} bytes: _Z4gemmPf, _Z4normPf"]
    assert kernels == ["_Z4gemmPf"], "each call is told twice, at its beginning and at its end"
