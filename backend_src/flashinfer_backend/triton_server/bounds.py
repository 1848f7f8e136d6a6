# SPDX-License-Identifier: Apache-2.0
"""Tensors are compared with the table of bounds (core/bounds.py) before anything is done with them that takes
time by their size."""

from collections.abc import Iterable, Mapping

import numpy as np

from flashinfer_backend.core.bounds import ALL_PROMPTS, FIELDS, MOST_WORD, check
from flashinfer_backend.serving.generation import GenerationRequest

FEWER = " in a request. Send fewer prompts in one"


# The ensemble's name of a tensor, where it is not the same in lower case: that is what most clients sent.
ENSEMBLE_NAMES = {
    "QUERY": "text_input",
    "STOP_WORDS_DICT": "stop_words",
    "BAD_WORDS_DICT": "bad_words",
    "DECODER_QUERY": "decoder_text_input",
    "stop_words_list": "stop_words",
    "bad_words_list": "bad_words",
    "request_output_len": "max_tokens",
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
}


def known_as(name: str) -> str:
    """A tensor for errors."""
    return f"{name} ({ENSEMBLE_NAMES[name]})" if name in ENSEMBLE_NAMES else name


def check_tensors(tensors: Mapping[str, np.ndarray]) -> None:
    """Raises ValueError for the first tensor [B, ...] that holds too much, in a row or in all of them."""
    for name, tensor in tensors.items():
        if name not in FIELDS or not tensor.size:
            continue
        bound, shown = FIELDS[name], known_as(name)
        rows, width = (len(tensor) if tensor.ndim > 1 else 1), tensor.shape[-1]
        check(shown, width, bound.values, bound.of, " in a row")
        if tensor.dtype != np.object_:
            check(shown, rows * width, bound.all_values, f"{bound.of} in {rows} rows", FEWER)
            continue
        sizes = [[len(text) for text in row] for row in tensor.reshape(rows, -1)]
        check(shown, max(map(sum, sizes)), bound.size, "bytes in a row", "")
        check(shown, sum(map(sum, sizes)), bound.all_size, f"bytes in {rows} rows", FEWER)
        texts = sum(size > 0 for row in sizes for size in row)  # rows are padded with empty ones
        check(shown, texts, bound.all_values, f"{bound.of} in {rows} rows", FEWER)
        if bound.of == "words":
            check(shown, max(map(max, sizes)), MOST_WORD, "bytes in a word")


def check_sequences(name: str, sizes: Iterable[tuple[int, int]]) -> None:
    """Raises ValueError where an input holds too much for all sequences of a request: each of them takes its
    own to the engine. sizes: of each row, what it holds and how many sequences it asks for."""
    sizes, bound = list(sizes), FIELDS[name]
    total = sum(held * sequences for held, sequences in sizes)
    what = f"{bound.of}, and with num_return_sequences {total} for all sequences of the request"
    if bound.sequences is not None and total > bound.sequences:
        raise ValueError(
            f"{name} has {sum(held for held, _ in sizes)} {what}; it should have at most {bound.sequences}."
            " Ask for fewer sequences at a time"
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
    """Raises ValueError where prompts of these many ids are too many when each is as long as the longest."""
    padded, most = max(lengths) * len(lengths), FIELDS["input_ids"].all_values
    if most is not None and padded > most:
        raise ValueError(
            f"{name} has {len(lengths)} rows, the longest of {max(lengths)} ids: padded to it they are"
            f" {padded} ids, and should be at most {most}. Send long prompts in requests of their own"
        )


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
                " since tritonserver answers no other client while it writes them. Ask over gRPC, or for"
                " fewer, or raise max_json_logits_mib when building the model repository"
            )
