# SPDX-License-Identifier: Apache-2.0
"""The CHUNK tensor: new ids of one sequence, as the llm step hands them to postprocessing.

INT64 [1, 6 + n + m]: version, handle, time, flags, max_chars, n, then the last n <= 8 ids that were already
sent for the sequence, then the m new ones. It lets any postprocessing instance turn any chunk into text. One
tensor, since each costs the server and both stubs as much as the rest of a chunk.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flashinfer_backend.text.delta import CONTEXT_IDS

VERSION = 3
HEADER = 6
LAST = 1  # flag: nothing follows, so an incomplete character is flushed
WHOLE = 2  # flag: the ids are a whole sequence, decoded at once
KNOWN_FLAGS = LAST | WHOLE
NO_LIMIT = -1


class PackedChunk(NamedTuple):
    """handle: the engine's name of the sequence (0: none). sent_ns: time.monotonic_ns() when the llm step
    made the chunk. max_chars: length limit of its text in characters (NO_LIMIT: none). context_ids: the last
    ids sent before this chunk, ids: its own."""

    handle: int
    sent_ns: int
    flags: int
    max_chars: int
    context_ids: list[int]
    ids: list[int]

    @property
    def last(self) -> bool:
        return bool(self.flags & LAST)

    @property
    def whole(self) -> bool:
        return bool(self.flags & WHOLE)


def pack_chunk(
    handle: int, sent_ns: int, flags: int, max_chars: int, context_ids: Sequence[int], ids: Sequence[int]
) -> np.ndarray:
    """int64 [1, 6 + n + m]; only the last CONTEXT_IDS of `context_ids` are sent."""
    context = context_ids[-CONTEXT_IDS:]
    header = (VERSION, handle, sent_ns, flags, max_chars, len(context))
    return np.array([[*header, *context, *ids]], dtype=np.int64)


def unpack_chunk(row: np.ndarray) -> PackedChunk:
    """One row (int64 [6 + n + m]) of a CHUNK tensor. Raises ValueError if it is malformed."""
    values: list[int] = row.tolist()
    if len(values) < HEADER or values[0] != VERSION:
        raise ValueError(
            f"CHUNK row begins with {values[:HEADER]}; it should be [{VERSION}, handle, time, flags, "
            "max_chars, number of ids sent before, ids...]"
        )
    _, handle, sent_ns, flags, max_chars, before = values[:HEADER]
    if flags & ~KNOWN_FLAGS or max_chars < NO_LIMIT:
        raise ValueError(
            f"CHUNK row has flags {flags} and max_chars {max_chars}; flags should be 0..{KNOWN_FLAGS}, "
            f"max_chars at least {NO_LIMIT}"
        )
    if not 0 <= before <= min(CONTEXT_IDS, len(values) - HEADER):
        raise ValueError(
            f"CHUNK row has {before} ids sent before, of {len(values) - HEADER} in all; it should be at most "
            f"{CONTEXT_IDS} and at most all"
        )
    context_ids, ids = values[HEADER : HEADER + before], values[HEADER + before :]
    return PackedChunk(handle, sent_ns, flags, max_chars, context_ids, ids)
