# SPDX-License-Identifier: Apache-2.0
"""What CUPTI's callbacks are read as, from structures like its own."""

from __future__ import annotations

import ctypes
from typing import Any

import module_loads
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
