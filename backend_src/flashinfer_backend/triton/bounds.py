# SPDX-License-Identifier: Apache-2.0
"""How much one request may hold, so that none keeps a process that serves all of them busy for seconds.

Checked before anything is done with a tensor that takes time by its size.
"""

from __future__ import annotations

import numpy as np

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
