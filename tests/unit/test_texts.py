# SPDX-License-Identifier: Apache-2.0
"""BYTES tensors before a model sees them."""

import struct
from types import SimpleNamespace

import numpy as np
import pytest

from flashinfer_backend.triton_server import texts
from flashinfer_backend.triton_server.bounds import check_tensors


def encoded(*words: bytes) -> np.ndarray:
    return np.frombuffer(b"".join(struct.pack("<I", len(word)) + word for word in words), np.uint8)


def test_texts_are_read_as_the_stub_asks_for_them() -> None:
    pb_utils = SimpleNamespace()
    texts.bound_texts(pb_utils)
    for words in ([], [b""], [b"a", b"", "é".encode(), b"x" * 300]):
        found = pb_utils.deserialize_bytes_tensor(encoded(*words)).reshape([1, len(words)])
        assert found.dtype == np.object_ and found.tolist() == [words]
    for cut in (1, 3, 5):
        with pytest.raises(struct.error):
            texts.read_texts(encoded(b"abc")[:cut])


def test_more_texts_than_any_request_may_have_are_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """60 million empty stop words kept all other requests for 47 s."""
    monkeypatch.setattr(texts, "MOST_TEXTS", 3)
    assert texts.read_texts(encoded(b"a", b"b", b"c")).tolist() == [b"a", b"b", b"c"]
    tensor = texts.read_texts(encoded(*[b""] * 4)).reshape([1, 60_000_000])
    assert tensor.strides == (0, 0)
    words = r"STOP_WORDS_DICT \(stop_words\) has 60000000 words; it should have at most 4096 in a row"
    with pytest.raises(ValueError, match=words):
        check_tensors({"STOP_WORDS_DICT": tensor})
