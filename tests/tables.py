# SPDX-License-Identifier: Apache-2.0
"""Tuned numbers, and entries of their tables."""

from typing import TypeVar

from flashinfer_backend.core import tuned
from flashinfer_backend.core.tuned import Entry, Role, Shape, Tuned

F = TypeVar("F")
LLAMA_8B: dict[Role, Shape] = {
    "qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336),
    "head": (128256, 4096),
}  # fmt: skip


def entries(*steps: tuple[int | None, F | None], shape: Shape | None = None) -> tuple[Entry[F], ...]:
    """One entry: for all shapes, or for one."""
    return (Entry(shape, steps),)


def measured(device: str = "NVIDIA H200") -> Tuned:
    """Those of a device that has a file."""
    numbers = tuned.load(device)
    assert numbers is not None
    return numbers
