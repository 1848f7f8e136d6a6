# SPDX-License-Identifier: Apache-2.0
"""Entries of core.tuned's tables."""

from __future__ import annotations

from typing import TypeVar

from flashinfer_backend.core.tuned import Entry, Shape

F = TypeVar("F")


def entries(*steps: tuple[int | None, F | None], shape: Shape | None = None) -> tuple[Entry[F], ...]:
    """One entry: for all shapes, or for one."""
    return (Entry(shape, steps),)
