# SPDX-License-Identifier: Apache-2.0
"""How the Hopper kernels in cuda/ are compiled and loaded: by FlashInfer's build tools, once per machine."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

CUDA = Path(__file__).parent / "cuda"


def spec(kernel: str, variant: str, defines: Sequence[str]) -> Any:
    """FlashInfer's description of how a variant of cuda/<kernel>.cu is built; its name changes with the
    source. defines: NAME=VALUE of the compiler's."""
    from flashinfer.jit import gen_jit_spec

    source = CUDA / f"{kernel}.cu"
    digest = hashlib.sha256("".join(_texts(source, set())).encode()).hexdigest()[:8]
    return gen_jit_spec(
        f"flashinfer_backend_{kernel}_{variant}_{digest}",
        [source],
        extra_cuda_cflags=["-gencode=arch=compute_90a,code=sm_90a", *(f"-D{define}" for define in defines)],
    )


def _texts(file: Path, seen: set[Path]) -> Iterator[str]:
    """The text of a file and, once each, of those of this folder that it includes."""
    if file in seen or not file.exists():  # FlashInfer's and CUDA's own are elsewhere
        return
    seen.add(file)
    yield (text := file.read_text(encoding="utf-8"))
    for name in re.findall(r'^#include "([^"]+)"', text, re.MULTILINE):
        yield from _texts(CUDA / name, seen)


def load(build: Callable[[], Any], place: torch.device, instead: str) -> Any:
    """What build() gives, or None on another GPU than Hopper's, and where it fails: a warning says so, which
    begins with `instead`, what its callers use."""
    if place.type != "cuda" or torch.cuda.get_device_capability(place) != (9, 0):
        return None
    try:
        return build()
    except Exception as error:  # FlashInfer's builder raises what its tools raise
        reason = str(error).strip().splitlines()
        logger.warning(
            "%s: their own kernel could not be built (%s: %s); it needs nvcc and ninja, as FlashInfer's "
            "kernels do",
            instead,
            type(error).__name__,
            reason[-1] if reason else "no message",
        )
        return None
