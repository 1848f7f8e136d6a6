# SPDX-License-Identifier: Apache-2.0
"""Notes which modules CUDA loads and which kernels are looked up in them, by CUPTI's callbacks.

With lazy loading, CUDA's default, a module is loaded when its first kernel runs, and each kernel is looked up
when it first runs, whoever brings it: PyTorch, cuBLAS, FlashInfer, Triton. CUPTI takes one subscriber, so no
profiler can run meanwhile.
"""

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

# From cupti_callbacks.h and cupti_driver_cbid.h.
DRIVER_API, RESOURCE = 1, 3
MODULE_LOADED = 6  # of RESOURCE
GET_FUNCTION, GET_KERNEL = 23, 681  # of DRIVER_API: cuModuleGetFunction, cuLibraryGetKernel
ENTER = 0  # the site of a call
MOST_NAMES = 5  # of a module's kernels
_SECTION = re.compile(rb"\.text\.([A-Za-z0-9_$.]+)\0")


class Resource(ctypes.Structure):
    """CUpti_ResourceData"""

    _fields_ = (("context", ctypes.c_void_p), ("stream", ctypes.c_void_p), ("descriptor", ctypes.c_void_p))


class Module(ctypes.Structure):
    """CUpti_ModuleResourceData"""

    _fields_ = (("id", ctypes.c_uint32), ("size", ctypes.c_size_t), ("cubin", ctypes.c_void_p))


class Call(ctypes.Structure):
    """The beginning of CUpti_CallbackData."""

    _fields_ = (("site", ctypes.c_int), ("function", ctypes.c_char_p), ("parameters", ctypes.c_void_p))


class Lookup(ctypes.Structure):
    """cuModuleGetFunction_params and cuLibraryGetKernel_params"""

    _fields_ = (("result", ctypes.c_void_p), ("owner", ctypes.c_void_p), ("name", ctypes.c_char_p))


CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)


def module_name(cubin: bytes) -> str:
    """A module by the kernels in it."""
    names = list(dict.fromkeys(name.decode() for name in _SECTION.findall(cubin)))
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{len(cubin)} bytes: {', '.join(names[:MOST_NAMES])}{more}"


def noting(modules: list[str], kernels: list[str], named: Callable[[], bool]) -> Any:
    """A callback for cuptiSubscribe that adds to the lists. named: whether to read modules, which are large,
    for names; else they have numbers."""

    def on_event(user: Any, domain: int, kind: int, data: int) -> None:
        if domain == RESOURCE:
            resource = Resource.from_address(data)
            module = Module.from_address(resource.descriptor)
            modules.append(
                module_name(ctypes.string_at(module.cubin, module.size)) if named() else str(module.id)
            )
        elif Call.from_address(data).site == ENTER:
            name = Lookup.from_address(Call.from_address(data).parameters).name
            kernels.append((name or b"").decode())

    return CALLBACK(on_event)


@contextmanager
def watch_modules(modules: list[str], kernels: list[str], named: Callable[[], bool]) -> Iterator[None]:
    """See noting(); inside the block, of all threads."""
    cupti = ctypes.CDLL(str(_library()))
    subscriber, callback = ctypes.c_void_p(), noting(modules, kernels, named)
    status = cupti.cuptiSubscribe(ctypes.byref(subscriber), callback, None)
    if status:
        raise RuntimeError(f"cuptiSubscribe: status {status}; 39: another profiler has subscribed")
    try:
        for domain, kind in ((RESOURCE, MODULE_LOADED), (DRIVER_API, GET_FUNCTION), (DRIVER_API, GET_KERNEL)):
            if status := cupti.cuptiEnableCallback(1, subscriber, domain, kind):
                raise RuntimeError(f"cuptiEnableCallback({domain}, {kind}): status {status}")
        yield
    finally:
        cupti.cuptiUnsubscribe(subscriber)


def _library() -> Path:
    """PyTorch's CUPTI, which it has loaded."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = {line.split()[-1] for line in lines if "libcupti.so" in line}
    found |= set(map(str, Path(torch.__file__).parents[1].glob("nvidia/**/libcupti.so.*")))
    if not found:
        raise RuntimeError("no libcupti.so, which PyTorch for CUDA brings")
    return Path(sorted(found)[0])
