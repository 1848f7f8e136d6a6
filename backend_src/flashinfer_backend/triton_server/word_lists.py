# SPDX-License-Identifier: Apache-2.0
"""Word lists and biases as TensorRT-LLM's model takes them, turned into lists of token ids."""

from collections.abc import Mapping

import numpy as np

from flashinfer_backend.core.bounds import FIELDS, MOST_WORD, check


def word_list(tensors: Mapping[str, np.ndarray], name: str, row: int, vocab_size: int) -> list[list[int]]:
    """Words of one row of a sparse list int32 [B, 2, W]: in [row, 0] the ids of all words one after
    another, in [row, 1] the ends of the words (inclusive prefix sums of their lengths), padded with -1.

    Raises ValueError for a malformed list.
    """
    lists = tensors.get(name)
    if lists is None or lists.size == 0:
        return []
    if lists.ndim == 2:
        lists = lists[None]
    if lists.ndim != 3 or lists.shape[1] != 2 or row >= len(lists):
        raise ValueError(f"{name} has shape {list(lists.shape)}; it should be [batch, 2, ids of all words]")
    ids, offsets = lists[row].tolist()
    count = offsets.index(-1) if -1 in offsets else len(offsets)
    check(name, count, FIELDS["stop_words_text"].values, "words in a row")
    if any(offset != -1 for offset in offsets[count:]):
        raise ValueError(f"Sparse list must not hold offsets after its padding of -1: {name} has {offsets}")
    words: list[list[int]] = []
    begin = 0
    for end in offsets[:count]:
        if end <= begin:
            raise ValueError(
                f"Sparse list must not hold offsets that do not grow: {name} has {offsets[:count]}; each"
                " should be the end of a word of at least one id"
            )
        if end > len(ids):
            raise ValueError(
                f"Sparse list must not hold offsets beyond its ids: {name} has offset {end} for"
                f" {len(ids)} ids"
            )
        check(name, end - begin, MOST_WORD, "ids in a word")
        word = ids[begin:end]
        for i in word:
            if not 0 <= i < vocab_size:
                raise ValueError(f"{name} holds {i}; token ids should lie in 0..{vocab_size - 1}")
        words.append(word)
        begin = end
    return words


def embedding_bias(
    tensors: Mapping[str, np.ndarray], row: int, vocab_size: int
) -> tuple[list[int], list[float]]:
    """(ids, values) of the non-zero entries of one row of embedding_bias float32 [B, V] or [B, 0].

    V may be less than `vocab_size`: a checkpoint's vocabulary is often padded beyond its tokenizer's.
    """
    biases = tensors.get("embedding_bias")
    if biases is None or biases.size == 0:
        return [], []
    bias = np.atleast_2d(biases)[row]
    if np.any(bias[vocab_size:]):  # a tokenizer may have more ids than the checkpoint
        raise ValueError(
            f"embedding_bias has {len(bias)} values; it should have {vocab_size}, one for each token"
        )
    if np.isnan(bias).any() or (bias == np.inf).any():
        raise ValueError("embedding_bias holds NaN or infinity; it should hold numbers, or -infinity to ban")
    ids = np.flatnonzero(bias)
    return ids.tolist(), bias[ids].tolist()
