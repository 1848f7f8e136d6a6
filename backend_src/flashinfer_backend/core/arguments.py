# SPDX-License-Identifier: Apache-2.0
"""Parsers of command lines. Types of options: each returns the value, or has the parser say what would be
right. And what programs for a GPU say without one."""

import math
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from typing import Any

from flashinfer_backend.core.values import INT32_MAX

LONGEST_S = 86400  # of a time to wait


def program(module: str, description: str | None, usage: str = "", **more: Any) -> ArgumentParser:
    """The parser of `python -m MODULE`. usage: what stands behind that; default: the options."""
    name = f"python -m {module}"
    of_usage = f"{name} {usage}" if usage else None
    return ArgumentParser(allow_abbrev=False, prog=name, usage=of_usage, description=description, **more)


def whole(low: int, high: int = INT32_MAX) -> Callable[[str], int]:
    """A whole number from low to high, both included."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise ArgumentTypeError(f"{text}: it should be a whole number from {low} to {high}")
        return value

    return convert


count = whole(0)
port_number = whole(1, 65535)
whole_seconds = whole(0, LONGEST_S)


def seconds(text: str) -> float:
    """A time to wait, which may be 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= LONGEST_S:
        raise ArgumentTypeError(f"{text}: it should be 0 to {LONGEST_S} seconds")
    return value


def some_seconds(text: str) -> float:
    """A time to wait, more than 0."""
    if not (value := seconds(text)):
        raise ArgumentTypeError(f"{text}: it should be more than 0 seconds")
    return value


def require_cuda(parser: ArgumentParser) -> None:
    """Ends the program with a sentence and status 1 where torch sees no CUDA device."""
    import torch

    if not torch.cuda.is_available():
        parser.exit(1, f"{parser.prog}: needs a CUDA device, and torch sees none\n")
