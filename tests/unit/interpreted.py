# SPDX-License-Identifier: Apache-2.0
"""Kernels in Triton's interpreter, without a GPU."""

import functools
import json
import math
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import pytest


def interpreted(file: str) -> None:
    """Run a test file as a program, in a process of its own."""
    pytest.importorskip("triton")
    process = parent()
    assert process.stdin is not None and process.stdout is not None
    try:
        print(file, file=process.stdin, flush=True)
        status, errors = json.loads(process.stdout.readline())
    except BaseException:  # a time limit, or the parent has ended: another test must not read this answer
        parent.cache_clear()
        process.kill()
        raise
    assert status == 0, errors


@functools.cache
def parent() -> subprocess.Popen[str]:
    """The parent of these processes, which imports what takes them seconds. Triton decides what it interprets
    when it is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, __file__]
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def run_forked(file: str) -> tuple[int, str]:
    """Status and errors of the file as a program."""
    with tempfile.TemporaryFile("w+") as errors:
        pid = os.fork()
        if not pid:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(errors.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            try:
                runpy.run_path(file, run_name="__main__")
                status = 0
            except BaseException:
                traceback.print_exc()
                status = 1
            sys.stdout.flush()
            os._exit(status)
        status = os.waitpid(pid, 0)[1]
        errors.seek(0)
        return status, errors.read()


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


def remember_types() -> None:
    """At each operation the interpreter makes the type and the shape of its result, and writes out their
    names."""
    from triton.language import core
    from triton.runtime import interpreter

    @functools.cache
    def shape_of(*sizes: int) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_of(*type.shape.values) if type.is_block() else shape_of()

    make_block, blocks = core.block_type.__init__, {}

    def make_block_type(self: Any, element: Any, shape: Any) -> None:
        values = shape.values if isinstance(shape, core.tuple) else core._unwrap_if_constexpr(shape)
        key = element.name, *[size.value if isinstance(size, core.constexpr) else size for size in values]
        if key not in blocks:
            make_block(self, element, shape)
            blocks[key] = dict(self.__dict__)
        self.__dict__.update(blocks[key])

    numpy_type, numpy_types = interpreter._get_np_dtype, {}

    def get_numpy_type(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(kind)
        return numpy_types[name]

    core.tensor.__init__, core.block_type.__init__ = make_tensor, make_block_type
    interpreter._get_np_dtype = get_numpy_type


def check_overflow() -> None:
    """The interpreter computes whether signed integers overflow, by ten operations of its own, and then
    ignores it. Here it raises."""
    import numpy as np
    from triton.language.semantic import TritonSemantic

    def check(self: Any, lhs: Any, rhs: Any, operation: Any) -> None:
        kind, name = lhs.type.scalar, operation.__name__
        if kind.int_bitwidth < 64 and kind.is_int_signed():
            wide = (side.handle.data.astype(np.int64) for side in (lhs, rhs))
            result = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[name](*wide)
            inside = (result >= kind.get_int_min_value()) & (result <= kind.get_int_max_value())
            assert inside.all(), f"a result of {name} does not fit {kind}"

    assert hasattr(TritonSemantic, "binary_op_sanitize_overflow_impl")
    TritonSemantic.binary_op_sanitize_overflow_impl = check


if __name__ == "__main__":
    import torch.testing._comparison

    torch.testing._comparison._HAS_DTENSOR = False  # or the first assert_close imports much more of torch
    patch_once_a_launch()
    remember_types()
    check_overflow()
    for line in sys.stdin:
        print(json.dumps(run_forked(line.rstrip("\n"))), flush=True)
