# SPDX-License-Identifier: Apache-2.0
"""Chunks of ids to text."""

import random

import numpy as np
import pytest
from small_tokenizers import KINDS

from flashinfer_backend.core.bounds import MOST_IDS
from flashinfer_backend.text.chunk import LAST, NO_LIMIT, WHOLE, PackedChunk, pack_chunk, unpack_chunk
from flashinfer_backend.text.delta import DeltaDecoder
from flashinfer_backend.transport import protocol
from flashinfer_backend.triton_server.postprocessing import chunk_text, chunks, whole_texts

TEXT = "the Größe of 東京 is 😀 isn't it?  Äpfel"


def text_of(decoder, handle, *chunk):
    (arrived,) = chunks({"CHUNK": pack_chunk(handle, 0, *chunk)})
    return chunk_text(decoder, arrived)


def tensors(rows):
    """rows: per batch row the ids of each beam."""
    width = max(len(ids) for beams in rows for ids in beams)
    tokens = np.array([[ids + [-1] * (width - len(ids)) for ids in beams] for beams in rows], np.int32)
    lengths = np.array([[len(ids) for ids in beams] for beams in rows], np.int32)
    return {"TOKENS_BATCH": tokens.reshape(len(rows), -1, width), "SEQUENCE_LENGTH": lengths}


@pytest.fixture(params=sorted(KINDS))
def kind(request):
    return request.param


@pytest.fixture
def decoder(kind):
    return DeltaDecoder(KINDS[kind]())


@pytest.fixture
def ids(kind):
    return KINDS[kind]().encode(TEXT, add_special_tokens=False).ids


def test_ids_without_a_chunk_are_decoded_each_sequence_on_its_own(decoder, ids):
    inputs = tensors([[ids, ids[:3]], [ids[3:], []]])
    assert not chunks(inputs)
    assert whole_texts(decoder, inputs) == [
        decoder.decode(ids),
        decoder.decode(ids[:3]),
        decoder.decode(ids[3:]),
        "",
    ]


def test_chunks_add_up(decoder, ids):
    for seed in range(20):
        generator = random.Random(seed)
        text, begin = "", 0
        while begin < len(ids):
            end = min(len(ids), begin + generator.randint(1, 4))
            flags = LAST * (end == len(ids))
            text += text_of(decoder, 77, flags, NO_LIMIT, ids[:begin], ids[begin:end])
            begin = end
        assert text == decoder.decode(ids)


def test_an_empty_last_chunk_flushes():
    decoder = DeltaDecoder(KINDS["byte_level"]())
    ids = KINDS["byte_level"]().encode("😀").ids[:-1]
    for flags, expected in ((0, ""), (LAST, "\ufffd")):
        assert text_of(decoder, 1, flags, NO_LIMIT, ids, []) == expected


def test_max_chars_cuts_the_chunk(decoder, ids):
    rest = decoder.delta(ids[:4], ids[4:], True)
    assert text_of(decoder, 1, LAST, 3, ids[:4], ids[4:]) == rest[:3]
    assert text_of(decoder, 1, LAST | WHOLE, 5, [], ids) == decoder.decode(ids)[:5]
    assert text_of(decoder, 1, LAST, 0, ids[:4], ids[4:]) == ""


def test_a_whole_sequence_is_decoded_at_once(decoder, ids):
    assert text_of(decoder, 1, LAST | WHOLE, NO_LIMIT, [], ids) == decoder.decode(ids)


WRONG_IDS = [
    ({"SEQUENCE_LENGTH": None}, "SEQUENCE_LENGTH is missing"),
    ({"TOKENS_BATCH": np.ones((1, 3), np.int32)}, r"TOKENS_BATCH has shape \[1, 3\]"),
    ({"SEQUENCE_LENGTH": np.ones((1, 2), np.int32)}, r"SEQUENCE_LENGTH \[1, 2\]"),
    ({"SEQUENCE_LENGTH": np.array([[4]], np.int32)}, r"SEQUENCE_LENGTH is 4; it should lie in 0..3"),
    ({"SEQUENCE_LENGTH": np.array([[-1]], np.int32)}, "SEQUENCE_LENGTH is -1"),
    ({"TOKENS_BATCH": np.full((1, 1, 3), -1, np.int32)}, "token id -1 should lie in 0..4294967295"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_IDS)
def test_wrong_ids_are_refused(change, message):
    decoder = DeltaDecoder(KINDS["byte_level"]())
    inputs = {k: v for k, v in (tensors([[[5, 6, 7]]]) | change).items() if v is not None}
    with pytest.raises(ValueError, match=message):
        whole_texts(decoder, inputs)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, 2, 3, 4, 5, 6], r"CHUNK has shape \[6\]"),
        ([[2, 5, 8, 0, -1, 0]], r"begins with \[2, 5, 8, 0, -1, 0\]; it should be \[3, handle"),
        ([[3, 5, 8, 0, -1]], "begins with"),
        ([[3, 5, 8, 4, -1, 0]], "flags 4"),
        ([[3, 5, 8, 0, -2, 0]], "max_chars -2"),
        ([[3, 5, 8, 0, -1, 9, *range(12)]], "9 ids sent before, of 12"),
        ([[3, 5, 8, 0, -1, 3, 7, 7]], "3 ids sent before, of 2"),
        ([[3, 5, 8, 0, -1, -1, 7]], "-1 ids sent before"),
    ],
)
def test_wrong_chunks_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        chunks({"CHUNK": np.array(values)})


def test_a_chunk_beside_other_ids_is_refused():
    inputs = tensors([[[5]]]) | {"CHUNK": pack_chunk(1, 0, 0, NO_LIMIT, [], [5])}
    with pytest.raises(ValueError, match="so SEQUENCE_LENGTH and TOKENS_BATCH should be left out"):
        chunks(inputs)


def test_chunk_round_trip():
    handle = protocol.make_handle(4_194_304, 2**31 - 1)
    packed = pack_chunk(handle, 2**62, WHOLE, 12, range(20), [30, 31])
    assert packed.dtype == np.int64
    assert packed.shape == (1, 6 + 8 + 2)
    assert unpack_chunk(packed[0]) == PackedChunk(handle, 2**62, WHOLE, 12, list(range(12, 20)), [30, 31])
    assert unpack_chunk(pack_chunk(0, 0, 0, NO_LIMIT, [], [])[0]) == PackedChunk(0, 0, 0, NO_LIMIT, [], [])


def test_more_ids_than_a_second_decodes_are_refused(decoder):
    many = np.zeros((1, 1, MOST_IDS + 1), np.int32)
    given = {"TOKENS_BATCH": many, "SEQUENCE_LENGTH": np.full((1, 1), MOST_IDS + 1, np.int32)}
    with pytest.raises(ValueError, match=f"TOKENS_BATCH has {MOST_IDS + 1} ids; it should have at most"):
        whole_texts(decoder, given)
    with pytest.raises(ValueError, match=r"CHUNK has .* ids; it should have at most"):
        chunks({"CHUNK": np.zeros((1, MOST_IDS + 1), np.int64)})
    assert whole_texts(decoder, given | {"SEQUENCE_LENGTH": np.ones((1, 1), np.int32)})
