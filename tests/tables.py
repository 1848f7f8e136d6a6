# SPDX-License-Identifier: Apache-2.0
"""Tuned numbers, and entries of their tables."""

from __future__ import annotations

from typing import TypeVar

from flashinfer_backend.core import tuned
from flashinfer_backend.core.tuned import Entry, Shape, Tuned

F = TypeVar("F")


def entries(*steps: tuple[int | None, F | None], shape: Shape | None = None) -> tuple[Entry[F], ...]:
    """One entry: for all shapes, or for one."""
    return (Entry(shape, steps),)


def measured(device: str = "NVIDIA H200") -> Tuned:
    """Those of a device that has a file."""
    numbers = tuned.load(device)
    assert numbers is not None
    return numbers
