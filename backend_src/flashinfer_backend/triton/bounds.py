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
MOST_IDS = 1 << 20  # to be decoded for one request, or in one of its lists of words: one second's work
# In all rows of a request together.
ALL_PROMPTS = 8  # times what one prompt may have
ALL_WORDS = 1 << 16  # in one list
ALL_WORD_BYTES = 1 << 20
MOST_BIASES = 1 << 22  # that are not 0, of all sequences: each takes its own to the engine
MOST_PADDED_IDS = 1 << 24  # of prompts, each as long as the longest: 64 MiB


def check_words(name: str, rows: np.ndarray) -> None:
    """Raises ValueError where a list of words (BYTES objects [B, n]) holds too much, in a row or in all."""
    if rows.shape[1] > MOST_WORDS:
        raise ValueError(f"{name} has {rows.shape[1]} words; it should have at most {MOST_WORDS} in a row")
    sizes = [[len(word) for word in row] for row in rows]
    most, total = max(map(sum, sizes)), sum(map(sum, sizes))
    if most > MOST_WORD_BYTES:
        raise ValueError(
            f"{name} has words of {most} bytes; it should have at most {MOST_WORD_BYTES} in a row"
        )
    words = sum(size > 0 for row in sizes for size in row)
    if words > ALL_WORDS or total > ALL_WORD_BYTES:
        raise ValueError(
            f"{name} has {words} words of {total} bytes in {len(rows)} rows; it should have at most"
            f" {ALL_WORDS} words of {ALL_WORD_BYTES} bytes in a request. Send fewer prompts in one"
        )


def check_word_ids(name: str, width: int, rows: int) -> None:
    """Raises ValueError where a sparse list of words has rows of more than MOST_WORD_IDS, or all of them have
    more than MOST_IDS."""
    if width > MOST_WORD_IDS:
        raise ValueError(f"{name} has {width} ids in a row; it should have at most {MOST_WORD_IDS}")
    if rows * width > MOST_IDS:
        raise ValueError(
            f"{name} has {rows} rows of {width} ids; it should have at most {MOST_IDS} in a request. Send"
            " fewer prompts in one"
        )


def check_sequences(name: str, sizes: Iterable[tuple[int, int]], most: int) -> None:
    """Raises ValueError where an input holds more than `most` for all sequences of a request: each of them
    takes its own to the engine. sizes: of each row, what it holds and how many sequences it asks for."""
    sizes = list(sizes)
    total = sum(held * sequences for held, sequences in sizes)
    if total > most:
        raise ValueError(
            f"{name} has {sum(held for held, _ in sizes)} ids, and with num_return_sequences {total} for all"
            f" sequences of the request; it should have at most {most}. Ask for fewer sequences at a time"
        )


def check_prompts(name: str, texts: np.ndarray, most: int) -> None:
    """Raises ValueError where a row of a BYTES tensor has more than `most` bytes, or all of them more than
    ALL_PROMPTS times as many; 0: any number."""
    sizes = [len(text) for text in texts.flat]
    for row, size in enumerate(sizes):
        if most and size > most:
            raise ValueError(
                f"{name} row {row} has {size} bytes; it should have at most {most}. Shorten the prompt,"
                " or raise max_prompt_bytes when building the model repository"
            )
    if most and sum(sizes) > ALL_PROMPTS * most:
        raise ValueError(
            f"{name} has {sum(sizes)} bytes in {len(sizes)} rows; it should have at most {ALL_PROMPTS * most}"
            " in a request. Send fewer prompts in one, or raise max_prompt_bytes when building the model"
            " repository"
        )


def check_padded(name: str, lengths: list[int]) -> None:
    """Raises ValueError where rows of these many ids are too many when each is as long as the longest."""
    padded = max(lengths) * len(lengths)
    if padded > MOST_PADDED_IDS:
        raise ValueError(
            f"{name} has {len(lengths)} rows, the longest of {max(lengths)} ids: padded to it they are"
            f" {padded} ids, and should be at most {MOST_PADDED_IDS}. Send long prompts in requests of their"
            " own"
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
