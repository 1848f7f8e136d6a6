# SPDX-License-Identifier: Apache-2.0
"""How much one request may hold, so that none keeps a process that serves all of them busy for seconds.

Checked before anything is done with a tensor that takes time by its size.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from flashinfer_backend.serving.generation import GenerationRequest

MOST_WORDS = 4096  # in one list of a row
MOST_WORD_BYTES = 1 << 18  # of all words of one list of a row
MOST_WORD_IDS = 1 << 16  # the same, as ids
MOST_IDS = 1 << 20  # to be decoded for one request, one second's work


def check_words(name: str, words: np.ndarray) -> None:
    """Raises ValueError where a row of a list of words (BYTES objects [n]) holds too much."""
    if len(words) > MOST_WORDS:
        raise ValueError(f"{name} has {len(words)} words; it should have at most {MOST_WORDS} in a row")
    size = sum(map(len, words.flat))
    if size > MOST_WORD_BYTES:
        raise ValueError(
            f"{name} has words of {size} bytes; it should have at most {MOST_WORD_BYTES} in a row"
        )


def check_word_ids(name: str, width: int) -> None:
    """Raises ValueError where a sparse list of words has rows of more than MOST_WORD_IDS."""
    if width > MOST_WORD_IDS:
        raise ValueError(f"{name} has {width} ids in a row; it should have at most {MOST_WORD_IDS}")


def check_prompts(name: str, texts: np.ndarray, most: int) -> None:
    """Raises ValueError where a row of a BYTES tensor has more than `most` bytes, 0: any number."""
    for row, text in enumerate(texts.flat):
        if most and len(text) > most:
            raise ValueError(
                f"{name} row {row} has {len(text)} bytes; it should have at most {most}. Shorten the prompt,"
                " or raise max_prompt_bytes when building the model repository"
            )


def check_ids(name: str, count: int) -> None:
    """Raises ValueError where a request asks for more than MOST_IDS to be decoded."""
    if count > MOST_IDS:
        raise ValueError(f"{name} has {count} ids; it should have at most {MOST_IDS} in a request")


def check_json_logits(
    rows: Iterable[GenerationRequest], vocab_size: int, max_seq_len: int, most_mib: int
) -> None:
    """Raises ValueError where a row asks for more than `most_mib` MiB of logits."""
    for row in rows:
        max_new = min(row.params.max_tokens, max_seq_len - len(row.prompt))
        size = 4 * vocab_size * row.params.logits_rows(len(row.prompt), max_new)
        if size > most_mib << 20:
            raise ValueError(
                f"the logits that are asked for could be {size / (1 << 20):.1f} MiB; as JSON, over HTTP, they"
                f" should be at most {most_mib} MiB, those of {(most_mib << 20) // (4 * vocab_size)} tokens,"
                " since tritonserver answers nobody else while it writes them. Ask over gRPC, or for fewer,"
                " or raise max_json_logits_mib when building the model repository"
            )
