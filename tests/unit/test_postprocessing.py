# SPDX-License-Identifier: Apache-2.0
"""Chunks of ids to text."""

from __future__ import annotations

import random

import numpy as np
import pytest
from small_tokenizers import KINDS

from flashinfer_backend.text.chunk import (
    LAST,
    NO_LIMIT,
    WHOLE,
    ChunkContext,
    pack_chunk_context,
    unpack_chunk_context,
)
from flashinfer_backend.text.delta import DeltaDecoder
from flashinfer_backend.transport import protocol
from flashinfer_backend.triton.postprocessing import chunk_contexts, texts

TEXT = "the Größe of 東京 is 😀 isn't it?  Äpfel"


def run(decoder, inputs):
    return [text.decode() for text in texts(decoder, inputs, chunk_contexts(inputs)).tolist()]


def tensors(rows, width=None, **more):
    """rows: per batch row the ids of each beam."""
    width = width or max(len(ids) for beams in rows for ids in beams)
    tokens = np.array([[ids + [-1] * (width - len(ids)) for ids in beams] for beams in rows], np.int32)
    lengths = np.array([[len(ids) for ids in beams] for beams in rows], np.int32)
    return {"TOKENS_BATCH": tokens.reshape(len(rows), -1, width), "SEQUENCE_LENGTH": lengths} | more


@pytest.fixture(params=sorted(KINDS))
def kind(request):
    return request.param


@pytest.fixture
def decoder(kind):
    return DeltaDecoder(KINDS[kind]())


@pytest.fixture
def ids(kind):
    return KINDS[kind]().encode(TEXT, add_special_tokens=False).ids


def test_without_context_each_row_is_decoded_on_its_own(decoder, ids):
    inputs = tensors([[ids, ids[:3]], [ids[3:], []]])
    output = texts(decoder, inputs, None)
    assert output.shape == (4,), "flat: batch * beams"
    assert [t.decode() for t in output] == [
        decoder.decode(ids),
        decoder.decode(ids[:3]),
        decoder.decode(ids[3:]),
        "",
    ]


def test_chunks_with_context_add_up(decoder, ids):
    for seed in range(20):
        generator = random.Random(seed)
        text, begin = "", 0
        while begin < len(ids):
            end = min(len(ids), begin + generator.randint(1, 4))
            context = pack_chunk_context(77, LAST * (end == len(ids)), context_ids=ids[:begin])
            text += run(decoder, tensors([[ids[begin:end]]], CHUNK_CONTEXT=context))[0]
            begin = end
        assert text == decoder.decode(ids)


def test_an_empty_last_chunk_flushes():
    decoder = DeltaDecoder(KINDS["byte_level"]())
    ids = KINDS["byte_level"]().encode("😀").ids[:-1]
    for flags, expected in ((0, ""), (LAST, "\ufffd")):
        inputs = tensors([[[]]], width=1, CHUNK_CONTEXT=pack_chunk_context(1, flags, context_ids=ids))
        assert run(decoder, inputs) == [expected]


def test_max_chars_cuts_the_chunk(decoder, ids):
    context = pack_chunk_context(1, LAST, 3, ids[:4])
    rest = decoder.delta(ids[:4], ids[4:], True)
    assert run(decoder, tensors([[ids[4:]]], CHUNK_CONTEXT=context)) == [rest[:3]]
    context = pack_chunk_context(1, LAST | WHOLE, 5)
    assert run(decoder, tensors([[ids]], CHUNK_CONTEXT=context)) == [decoder.decode(ids)[:5]]
    context = pack_chunk_context(1, LAST, 0, ids[:4])
    assert run(decoder, tensors([[ids[4:]]], CHUNK_CONTEXT=context)) == [""]


def test_a_whole_sequence_is_decoded_at_once(decoder, ids):
    context = np.repeat(pack_chunk_context(1, LAST | WHOLE), 2, axis=0)
    inputs = tensors([[ids, ids[2:]], [ids[1:], ids]], CHUNK_CONTEXT=context)
    assert run(decoder, inputs) == [decoder.decode(part) for part in (ids, ids[2:], ids[1:], ids)]


GOOD = pack_chunk_context(5, LAST, 2, [1, 2])
WRONG = [
    ({"SEQUENCE_LENGTH": None}, "SEQUENCE_LENGTH is missing"),
    ({"TOKENS_BATCH": np.ones((1, 3), np.int32)}, r"TOKENS_BATCH has shape \[1, 3\]"),
    ({"SEQUENCE_LENGTH": np.ones((1, 2), np.int32)}, r"SEQUENCE_LENGTH \[1, 2\]"),
    ({"SEQUENCE_LENGTH": np.array([[4]], np.int32)}, r"SEQUENCE_LENGTH is 4; it should lie in 0..3"),
    ({"SEQUENCE_LENGTH": np.array([[-1]], np.int32)}, "SEQUENCE_LENGTH is -1"),
    ({"TOKENS_BATCH": np.full((1, 1, 3), -1, np.int32)}, "token id -1 is negative"),
    ({"CHUNK_CONTEXT": GOOD[0]}, r"CHUNK_CONTEXT has shape \[6\]"),
    ({"CHUNK_CONTEXT": np.repeat(GOOD, 2, axis=0)}, "CHUNK_CONTEXT has 2 rows; it should have 1"),
    ({"CHUNK_CONTEXT": np.array([[2, 5, 0, -1]])}, r"begins with \[2, 5, 0, -1\]; it should be \[1, handle"),
    ({"CHUNK_CONTEXT": np.array([[1, 5, 0]])}, "begins with"),
    ({"CHUNK_CONTEXT": np.array([[1, 5, 4, -1]])}, "flags 4"),
    ({"CHUNK_CONTEXT": np.array([[1, 5, 0, -2]])}, "max_chars -2"),
    ({"CHUNK_CONTEXT": np.array([[1, 5, 0, -1] + [3] * 9])}, "9 ids"),
    (
        {"TOKENS_BATCH": np.ones((1, 2, 3), np.int32), "SEQUENCE_LENGTH": np.ones((1, 2), np.int32)}
        | {"CHUNK_CONTEXT": GOOD},
        "one sequence a row, but TOKENS_BATCH has 2",
    ),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_wrong_tensors_are_refused(change, message):
    decoder = DeltaDecoder(KINDS["byte_level"]())
    inputs = {k: v for k, v in (tensors([[[5, 6, 7]]]) | change).items() if v is not None}
    with pytest.raises(ValueError, match=message):
        run(decoder, inputs)


def test_chunk_context_round_trip():
    handle = protocol.make_handle(4_194_304, 2**31 - 1)
    packed = pack_chunk_context(handle, WHOLE, 12, range(20))
    assert packed.dtype == np.int64
    assert packed.shape == (1, 12)
    assert unpack_chunk_context(packed[0]) == ChunkContext(handle, WHOLE, 12, list(range(12, 20)))
    assert unpack_chunk_context(pack_chunk_context(0)[0]) == ChunkContext(0, 0, NO_LIMIT, [])
