# SPDX-License-Identifier: Apache-2.0
"""Notes what Triton and FlashInfer compile, and what CUDA loads."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from module_loads import watch_modules


@dataclass
class Compilations:
    """triton: variants of kernels that were compiled or loaded from Triton's cache; compiled: those of them
    that were not in the cache; loaded: modules that FlashInfer loaded; built: modules that it compiled or let
    ninja look at; modules, kernels: what CUDA loaded and looked up for the first time (module_loads.py)."""

    triton: list[str] = field(default_factory=list)
    compiled: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    built: list[str] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    ready: bool = False  # the start is over: from then on modules have the names of their kernels

    def clear(self) -> None:
        for each in (self.triton, self.compiled, self.loaded, self.built, self.modules, self.kernels):
            each.clear()
        self.ready = True


@contextmanager
def watch() -> Iterator[Compilations]:
    """What is compiled in this process inside the block, in all of its threads."""
    knobs = pytest.importorskip("triton.knobs")
    core = pytest.importorskip("flashinfer.jit.core")
    found = Compilations()

    def on_triton(**what: Any) -> None:
        found.triton.append(f"{what['repr']} {what['compile']['signature']} {what['compile']['configs']}")

    def on_compiler(src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            found.compiled.append(src.name)

    load, build, run_ninja = core.JitSpec.build_and_load, core.JitSpecNvcc.build, core.run_ninja

    def loading(spec: Any) -> Any:
        found.loaded.append(spec.name)
        return load(spec)

    def building(spec: Any, *arguments: Any, **options: Any) -> None:
        found.built.append(spec.name)
        build(spec, *arguments, **options)

    def running(workdir: Any, *arguments: Any, **options: Any) -> None:
        found.built.append(str(workdir))
        run_ninja(workdir, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        if torch.cuda.is_available():
            stack.enter_context(watch_modules(found.modules, found.kernels, lambda: found.ready))
        patch.setattr(knobs.runtime, "jit_post_compile_hook", on_triton)
        patch.setattr(knobs.compilation, "listener", on_compiler)
        patch.setattr(core.JitSpec, "build_and_load", loading)
        patch.setattr(core.JitSpecNvcc, "build", building)
        patch.setattr(core, "run_ninja", running)
        yield found
