# SPDX-License-Identifier: Apache-2.0
"""Where in a safetensors file a tensor's bytes lie, for who reads them without mapping the file.

A file begins with the length of its header in 8 bytes, little endian; the header is a JSON object of each
tensor's shape and `data_offsets`, counted from its end; tensors lie in rows (safetensors' README, "Format").
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec


def state(file: Path | int) -> tuple[int, int]:
    """What changes when a file is replaced or written to: its size, and when that was."""
    found = os.stat(file)
    return found.st_size, found.st_mtime_ns


class _Tensor(msgspec.Struct):
    shape: list[Annotated[int, msgspec.Meta(ge=0)]]
    data_offsets: tuple[int, int]


def read_shapes(path: Path, most: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a file's tensors, by name. Never mapped: a file that is cut meanwhile would end the
    process by a signal. most: bytes of its header. Raises OSError; ValueError for what is no such file."""
    with path.open("rb") as file:
        length, size = int.from_bytes(file.read(8), "little"), state(file.fileno())[0]
        if length > most:
            raise ValueError(f"its header has {length} bytes; it should have at most {most}")
        header = file.read(length)
    try:
        found = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        found.pop("__metadata__", None)
        tensors = {name: msgspec.json.decode(raw, type=_Tensor) for name, raw in found.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"its header is not one of safetensors: {error}") from None
    end = 8 + length + max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    if end != size:
        raise ValueError(f"it has {size} bytes; by its header it should have {end}")
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


class Header:
    """The header of a file that safetensors has checked already. state: the file's state when it was read."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self.state = state(file.fileno())
            length = int.from_bytes(file.read(8), "little")
            self._tensors: dict[str, Any] = json.loads(file.read(length))
        self._end = 8 + length

    @property
    def names(self) -> list[str]:
        """The names of its tensors."""
        return [name for name in self._tensors if name != "__metadata__"]

    def find(self, name: str, part: Sequence[slice]) -> tuple[int, tuple[int, ...]] | None:
        """The first byte of a part of a tensor that is not empty, and the part's shape; None where its bytes
        do not lie together, as of columns. part: a slice of each dimension."""
        shape, (begin, end) = self._tensors[name]["shape"], self._tensors[name]["data_offsets"]
        ranges = [range(*cut.indices(size)) for cut, size in zip(part, shape, strict=True)]
        if any(len(taken) < size for taken, size in zip(ranges[1:], shape[1:], strict=True)):
            return None
        if not ranges or ranges[0].step != 1:
            return None
        start = begin + ranges[0].start * ((end - begin) // shape[0])
        return self._end + start, tuple(map(len, ranges))
