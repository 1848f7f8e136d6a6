# SPDX-License-Identifier: Apache-2.0
"""BYTES tensors as Triton's stub makes arrays of them, before a model sees a request."""

import struct
from typing import Any

import numpy as np

from flashinfer_backend.core.bounds import MOST_TEXTS


class _TooMany:
    """Stands for more texts than any request may have. Its array has the tensor's shape, by which the request
    is refused, and takes no memory."""

    def reshape(self, dims: list[int]) -> np.ndarray:
        return np.broadcast_to(np.array(b"", np.object_), dims)


def bound_texts(pb_utils: Any) -> None:
    """From now on the stub reads MOST_TEXTS of a tensor. It makes an object of each before the model sees the
    request, while no other runs: of the 500 million empty texts that a gRPC message can hold, for minutes.
    pb_utils: the module triton_python_backend_utils."""
    pb_utils.deserialize_bytes_tensor = read_texts


def read_texts(encoded: np.ndarray) -> Any:
    """The texts of a BYTES tensor, uint8 [n]: a little-endian uint32 of its length before each. Raises
    struct.error where they do not fit."""
    texts: list[bytes] = []
    at, data = 0, encoded.data
    while at < len(data):
        if len(texts) == MOST_TEXTS:
            return _TooMany()
        (size,) = struct.unpack_from("<I", data, at)
        (text,) = struct.unpack_from(f"{size}s", data, at + 4)
        texts.append(text)
        at += 4 + size
    return np.array(texts, np.object_)
