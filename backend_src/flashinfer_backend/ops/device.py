# SPDX-License-Identifier: Apache-2.0
"""The tuned numbers of the GPU that this process runs on, and choices by them that are made once."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from flashinfer_backend.core import tuned
from flashinfer_backend.core.tuned import Tuned

logger = logging.getLogger(__name__)

SMS_OF_HOPPER, SHARED_MEMORY_OF_HOPPER = 132, 227 << 10  # stand for a GPU's where there is none
HOPPER = (9, 0)
LIKE = "NVIDIA H200"  # whose numbers other GPUs with its processor take

_active: list[Tuned] = []  # the last one counts
_caches: list[Callable[[], None]] = []
F = TypeVar("F", bound=Callable)


def active() -> Tuned:
    """The numbers of this device. Without any, and with a warning, those of an H200 on a GPU with the same
    processor (an H100 takes at most 1.3 % longer by them), otherwise the fallback."""
    if not _active:
        _active.append(_of_device())
    return _active[-1]


@contextmanager
def use(numbers: Tuned) -> Iterator[None]:
    """Choose by other numbers inside the block."""
    _active.append(numbers)
    _forget()
    try:
        yield
    finally:
        _active.pop()
        _forget()


def cached(function: F) -> F:
    """`function`, which chooses by active(), called once for each of its last 4096 arguments."""
    wrapped = functools.lru_cache(maxsize=4096)(function)
    _caches.append(wrapped.cache_clear)
    return wrapped  # type: ignore[return-value]


@functools.cache
def sms() -> int:
    """Streaming multiprocessors of this process's GPU."""
    if not torch.cuda.is_available():
        return SMS_OF_HOPPER
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


@functools.cache
def shared_memory() -> int:
    """Bytes of an SM's that a program on this process's GPU can have."""
    if not torch.cuda.is_available():
        return SHARED_MEMORY_OF_HOPPER
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return properties.shared_memory_per_block_optin  # type: ignore[attr-defined]


def _forget() -> None:
    for clear in _caches:
        clear()


def _of_device() -> Tuned:
    if not torch.cuda.is_available():
        return tuned.fallback()
    name = torch.cuda.get_device_name()
    numbers = tuned.load(name)
    if numbers is not None:
        return numbers
    same = torch.cuda.get_device_capability() == HOPPER and sms() == SMS_OF_HOPPER
    logger.warning(
        "no tuned values for %s: %s; python -m flashinfer_backend.tune measures it",
        name,
        f"using those of the {LIKE} (same chip)" if same else "using cuBLAS for products",
    )
    return (tuned.load(LIKE) if same else None) or tuned.fallback()
