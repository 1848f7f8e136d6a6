# SPDX-License-Identifier: Apache-2.0
"""The CHUNK_CONTEXT tensor: what the llm step tells postprocessing about one chunk of ids.

INT64 [1, 4 + n]: version, handle, flags, max_chars, then the last n <= 8 ids that were already
sent for the sequence. It lets any postprocessing instance turn any chunk into text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flashinfer_backend.text.delta import CONTEXT_IDS

VERSION = 1
HEADER = 4
LAST = 1  # flag: nothing follows, so an incomplete character is flushed
WHOLE = 2  # flag: the ids are a whole sequence, decoded at once
KNOWN_FLAGS = LAST | WHOLE
NO_LIMIT = -1


class ChunkContext(NamedTuple):
    """handle: the engine's name of the sequence (0: none). max_chars: the chunk's text is cut to so
    many characters (NO_LIMIT: not at all). context_ids: the last ids sent before this chunk."""

    handle: int
    flags: int
    max_chars: int
    context_ids: list[int]

    @property
    def last(self) -> bool:
        return bool(self.flags & LAST)

    @property
    def whole(self) -> bool:
        return bool(self.flags & WHOLE)


def pack_chunk_context(
    handle: int, flags: int = 0, max_chars: int = NO_LIMIT, context_ids: Sequence[int] = ()
) -> np.ndarray:
    """int64 [1, 4 + n]; only the last CONTEXT_IDS of `context_ids` are sent."""
    row = [VERSION, handle, flags, max_chars, *context_ids[-CONTEXT_IDS:]]
    return np.array([row], dtype=np.int64)


def unpack_chunk_context(row: np.ndarray) -> ChunkContext:
    """One row (int64 [4 + n]) of a CHUNK_CONTEXT tensor. Raises ValueError saying what is wrong."""
    values: list[int] = row.tolist()
    if len(values) < HEADER or values[0] != VERSION:
        raise ValueError(
            f"CHUNK_CONTEXT row begins with {values[:HEADER]}; it should be [{VERSION}, handle, flags, "
            "max_chars, ids...]"
        )
    _, handle, flags, max_chars = values[:HEADER]
    if flags & ~KNOWN_FLAGS or max_chars < NO_LIMIT or len(values) > HEADER + CONTEXT_IDS:
        raise ValueError(
            f"CHUNK_CONTEXT row has flags {flags}, max_chars {max_chars} and {len(values) - HEADER} ids; "
            f"flags should be 0..{KNOWN_FLAGS}, max_chars at least {NO_LIMIT}, ids at most {CONTEXT_IDS}"
        )
    return ChunkContext(handle, flags, max_chars, values[HEADER:])
